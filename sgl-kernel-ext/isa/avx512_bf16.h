// AVX512-BF16 and VBMI (Zen 4, Sapphire Rapids; Cooper Lake has no VBMI): one instruction for dot2, one for a
// table look-up of 64 bytes.
#include "avx512.h"

struct Avx512Bf16 : Avx512 {
  static constexpr int kRows = 8, kSums = 16, kSlowBits = 16;
  static constexpr bool kSpreads = false;

  using Pair = __m512i;
  struct ByteTable { __m512i low[2], high[2]; };  // low and high byte of the bf16 of the 128 positive E4M3 codes

  static ByteTable e4m3_table() {
    uint8_t low[128], high[128];
    for (int i = 0; i < 128; ++i) {
      const int e = i >> 3, m = i & 7;
      const float f = e ? float(8 + m) * __builtin_bit_cast(float, (e + 117) << 23) : float(m) * 0x1p-9f;
      const uint32_t bits = __builtin_bit_cast(uint32_t, f);
      low[i] = uint8_t(bits >> 16);
      high[i] = uint8_t(bits >> 24);
    }
    return {{_mm512_loadu_si512(low), _mm512_loadu_si512(low + 64)}, {_mm512_loadu_si512(high), _mm512_loadu_si512(high + 64)}};
  }
  // vpermi2b takes seven index bits, so the sign need not be masked off.
  static void e4m3_codes(const uint8_t* block, const ByteTable& t, Pairs* out) {
    const __m512i codes = _mm512_loadu_si512(block);
    const __m512i low = _mm512_permutex2var_epi8(t.low[0], codes, t.low[1]);
    const __m512i high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(t.high[0], codes, t.high[1]), codes,
                                                   _mm512_set1_epi8(char(0x80)), 0xf8);  // | (codes & sign)
    const __m512i byte = _mm512_set1_epi16(0x00ff);
    out[0] = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, byte, 0xf8);
    out[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, byte, 0xf4);  // | (high & ~byte)
  }

  // Flushes subnormals and keeps NaN, as the others do by hand.
  static void store_bf16(uint16_t* p, F32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a)); }
  static Pair broadcast(const uint16_t* a) { return two(a); }
  static F32 dot2(F32 acc, Pair a, Pairs w) { return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)a); }
};
static_assert(LaneIsa<Avx512Bf16>);
