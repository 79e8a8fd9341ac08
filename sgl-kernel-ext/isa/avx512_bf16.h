// AVX512-BF16 (Cooper Lake, Zen 4, Sapphire Rapids): AVX-512 with one instruction for dot2.
#include "avx512.h"

struct Avx512Bf16 : Avx512 {
  static constexpr int kRows = 8, kSums = 16;

  using Pair = __m512i;

  static Pair broadcast(const uint16_t* a) { return two(a); }
  static F32 dot2(F32 acc, Pair a, Pairs w) { return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)a); }
};
static_assert(LaneIsa<Avx512Bf16>);
