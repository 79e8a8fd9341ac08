// AMX-BF16 (Sapphire Rapids onwards): AVX512-BF16 for few rows, tiles of 16 x 16 sums for many. In inline assembly,
// because the compiler's intrinsics do not tell it that tiles read and write memory.
#include "avx512_bf16.h"

struct Amx : Avx512Bf16 {
  static constexpr bool kOwnOrder = true;
  static constexpr int kFewRows = 2, kFewBf16Rows = 4;
  // One sum for the 16 dot2 of a step of 4-bit codes: 15 % slower for one row. Four sums: no faster than two.
  static constexpr int kChains = 2;
  // A core that shares its physical one with a busy neighbour has too short a queue of instructions to begin loads from
  // an L2 in time; one of its own loses nothing by it.
  static constexpr int kNearSteps = 2;

  // Every half of a pair times its column's scale; exact, so nothing is rounded.
  static Pairs scaled(Pairs w, F32 scale) {
    const __m512i low_half = _mm512_castps_si512(_mm512_mul_ps(low(w), scale)), high_half = _mm512_castps_si512(_mm512_mul_ps(high(w), scale));
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(low_half, 16), high_half, _mm512_set1_epi32(int(0xffff0000u)), 0xf8);
  }
  // A power of two is added to the exponents, but not to zero's: two instructions in place of scaled()'s six.
  static bool exponents(const uint8_t* e8m0, Pairs& out) {
    const __m512i n = _mm512_sub_epi32(_mm512_cvtepu8_epi32(sixteen(e8m0)), _mm512_set1_epi32(127)), high_half = _mm512_slli_epi32(n, 23);
    out = _mm512_or_si512(high_half, _mm512_srli_epi32(high_half, 16));
    return _mm512_cmp_epu32_mask(_mm512_add_epi32(n, _mm512_set1_epi32(100)), _mm512_set1_epi32(200), _MM_CMPINT_NLE) == 0;
  }
  static Pairs raised(Pairs w, Pairs exponents) {
    return _mm512_mask_add_epi16(w, _mm512_test_epi16_mask(w, _mm512_set1_epi16(0x7fff)), w, exponents);
  }

  static void copy_line(void* to, const void* from) { _mm512_store_si512(to, _mm512_loadu_si512(from)); }
  static void tile_begin(int rows) {
    struct alignas(64) { uint8_t palette = 1, start_row = 0, none[14] = {}; uint16_t row_bytes[16] = {}; uint8_t rows[16] = {}; } config;
    for (int t = 0; t < 8; ++t) {
      config.row_bytes[t] = 64;
      config.rows[t] = uint8_t(t < 6 ? rows : 16);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  static void tile_end() { __asm__ volatile("tilerelease" ::: "memory"); }
  template <int T> static void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(T)); }
  template <int T> static void tile_load(const void* p, ptrdiff_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T> static void tile_load_once(const void* p, ptrdiff_t stride) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T> static void tile_store(void* p, ptrdiff_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  // Sums += activations (16 rows of k pairs) times weights (16 pairs of 16 columns).
  template <int Sums, int Rows, int Weights> static void tile_dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Weights));
  }
};
static_assert(TileIsa<Amx>);
