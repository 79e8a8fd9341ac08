// Armv8.6 BF16 (Neoverse V1, N2, V2, Cortex-X925): NEON with BFDOT for few rows and BFMMLA for many. Not a lane
// instruction set: BFDOT adds the two products of a pair first and rounds both additions to odd, where the lane order
// is two fused multiply-adds (docs/explanation/numerics.md). BFMMLA does the same to two pairs, one after the other.
#include "neon.h"

struct NeonBf16 : Neon {
  static constexpr bool kOwnOrder = true;
  static constexpr int kFewRows = 8, kFewBf16Rows = 8;  // a tile's 16 rows are always multiplied
  static constexpr int kNearSteps = 0;  // tiles are loaded line by line, as any other loop does

  using Pair = W;

  // GCC 12 turns constant bf16 vectors into binary16 immediates of another value: no constant may reach BFDOT.
  static W opaque(W v) {
    __asm__("" : "+w"(v));
    return v;
  }
  static Pairs load_pairs(const void* p) { return each<Pairs>([](W w) { return opaque(w); }, Neon::load_pairs(p)); }
  static Pair broadcast(const uint16_t* p) { return opaque(two(p)); }
  static F32 dot2(const F32& acc, Pair x, const Pairs& w) {
    return each<F32>([&](V sum, W pair) { return vbfdotq_f32(sum, vreinterpretq_bf16_u32(pair), vreinterpretq_bf16_u32(x)); }, acc, w);
  }

  static void copy_line(void* to, const void* from) { store_pairs(to, Neon::load_pairs(from)); }
  // Every half of a pair times its column's scale; exact, so nothing is rounded.
  static Pairs scaled(const Pairs& w, const F32& scale) {
    return each<Pairs>([](W pair, V s) {
      return vsriq_n_u32(vreinterpretq_u32_f32(vmulq_f32(high(pair), s)), vreinterpretq_u32_f32(vmulq_f32(low(pair), s)), 16);
    }, w, scale);
  }

  // A power of two is added to the exponents, but not to zero's.
  static bool exponents(const uint8_t* e8m0, Pairs& out) {
    const int8x16_t n = vreinterpretq_s8_u8(vsubq_u8(vld1q_u8(e8m0), vdupq_n_u8(127)));
    // The high byte of a half is n / 2, the low one the last bit of n on top: n << 7.
    const uint8x16_t highs = vreinterpretq_u8_s8(vshrq_n_s8(n, 1)), lows = vshlq_n_u8(vreinterpretq_u8_s8(n), 7);
    const uint8x16_t first = vzip1q_u8(lows, highs), second = vzip2q_u8(lows, highs);
    const auto twice = [](uint8x16_t halves, bool upper) {
      const uint16x8_t v = vreinterpretq_u16_u8(halves);
      return vreinterpretq_u32_u16(upper ? vzip2q_u16(v, v) : vzip1q_u16(v, v));
    };
    out = {twice(first, false), twice(first, true), twice(second, false), twice(second, true)};
    return vmaxvq_s8(n) <= 100 && vminvq_s8(n) >= -100;
  }
  static Pairs raised(const Pairs& w, const Pairs& exponents) {
    return each<Pairs>([](W pair, W n) {
      const uint16x8_t halves = vreinterpretq_u16_u32(pair);
      return vreinterpretq_u32_u16(vaddq_u16(halves, vandq_u16(vreinterpretq_u16_u32(n), vtstq_u16(halves, vdupq_n_u16(0x7fff)))));
    }, w, exponents);
  }

  // Tiles in memory, in the order of BFMMLA, which multiplies 2 rows x 4 k by 4 k x 2 columns: vector [i][q] of
  // activations is row pair i at k = 4q, vector [q][j] of weights is column pair j, vector [i][j] of sums is 2 x 2.
  struct Tile { W v[8][8]; };
  inline static thread_local Tile tiles[8];  // 0-3 sums, 4 and 5 activations, 6 and 7 weights

  static W first_halves(W a, W b) {
    return vreinterpretq_u32_u64(vzip1q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
  }
  static W second_halves(W a, W b) {
    return vreinterpretq_u32_u64(vzip2q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
  }
  static void tile_begin(int) {}  // all of a tile's 16 rows may be read and written
  static void tile_end() {}
  template <int T> static void tile_zero() { __builtin_memset(&tiles[T], 0, sizeof tiles[T]); }
  template <int T> static void tile_load(const void* p, ptrdiff_t stride) {
    Tile& tile = tiles[T];
    for (int i = 0; i < 8; ++i)
#pragma GCC unroll 4
      for (int m = 0; m < 4; ++m) {
        const W a = words_at(p, 2 * i * stride + 16 * m), b = words_at(p, (2 * i + 1) * stride + 16 * m);
        tile.v[i][2 * m] = T >= 6 ? vzip1q_u32(a, b) : first_halves(a, b);
        tile.v[i][2 * m + 1] = T >= 6 ? vzip2q_u32(a, b) : second_halves(a, b);
      }
  }
  template <int T> static void tile_load_once(const void* p, ptrdiff_t stride) { tile_load<T>(p, stride); }
  template <int T> static void tile_store(void* p, ptrdiff_t stride) {
    const Tile& tile = tiles[T];
    for (int i = 0; i < 8; ++i)
#pragma GCC unroll 4
      for (int m = 0; m < 4; ++m) {
        uint8_t* to = static_cast<uint8_t*>(p) + 2 * i * stride + 16 * m;
        vst1q_u8(to, vreinterpretq_u8_u32(first_halves(tile.v[i][2 * m], tile.v[i][2 * m + 1])));
        vst1q_u8(to + stride, vreinterpretq_u8_u32(second_halves(tile.v[i][2 * m], tile.v[i][2 * m + 1])));
      }
  }
  template <int Sums, int Rows, int Weights> static void tile_dot() { dot(tiles[Sums], tiles[Rows], tiles[Weights]); }

  // Quarters of 8 rows x 8 columns: 16 sums, 4 vectors of activations and 4 of weights stay in registers.
  [[gnu::noinline]] static void dot(Tile& sums, const Tile& rows, const Tile& weights) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int i0 = quarter / 2 * 4, j0 = quarter % 2 * 4;
      float32x4_t acc[4][4];
#pragma GCC unroll 16
      for (int n = 0; n < 16; ++n) acc[n / 4][n % 4] = vreinterpretq_f32_u32(sums.v[i0 + n / 4][j0 + n % 4]);
      for (int q = 0; q < 8; ++q) {
        bfloat16x8_t w[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) w[j] = vreinterpretq_bf16_u32(weights.v[q][j0 + j]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) acc[i][j] = vbfmmlaq_f32(acc[i][j], vreinterpretq_bf16_u32(rows.v[i0 + i][q]), w[j]);
      }
#pragma GCC unroll 16
      for (int n = 0; n < 16; ++n) sums.v[i0 + n / 4][j0 + n % 4] = vreinterpretq_u32_f32(acc[n / 4][n % 4]);
    }
  }
};
static_assert(TileIsa<NeonBf16>);
