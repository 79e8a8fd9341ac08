// Armv8.6 BF16 (Neoverse V1, N2, V2, Cortex-X925): NEON with BFDOT. Not a lane instruction set: BFDOT adds the two
// products of a pair first and rounds three times to odd (docs/explanation/numerics.md), where the lane order
// is two fused multiply-adds.
#include "neon.h"

struct NeonBf16 : Neon {
  static constexpr bool kOwnOrder = true;

  using Pair = uint32x4_t;

  // GCC 12 turns constant bf16 vectors into binary16 immediates of another value: no constant may reach BFDOT.
  static uint32x4_t opaque(uint32x4_t v) {
    __asm__("" : "+w"(v));
    return v;
  }
  static Pairs load_pairs(const void* p) {
    const Pairs w = Neon::load_pairs(p);
    return each<Pairs>([&](int i) { return opaque(w.v[i]); });
  }
  static Pair broadcast(const uint16_t* a) { return opaque(two(a)); }
  static F32 dot2(const F32& acc, Pair a, const Pairs& w) {
    return each<F32>([&](int i) {
      return vbfdotq_f32(acc.v[i], vreinterpretq_bf16_u32(w.v[i]), vreinterpretq_bf16_u32(a));
    });
  }
};
static_assert(LaneIsa<NeonBf16>);
