// NEON of any Armv8-A processor. Conversion to and from binary16 is part of the baseline; bf16 arithmetic is not.
struct Neon {
  static constexpr int kRows = 4, kSums = 4;

  struct F32 { float32x4_t v[4]; };   // columns 0-3, 4-7, 8-11, 12-15
  struct Pairs { uint32x4_t v[4]; };
  struct Pair { float32x4_t high, low; };
  struct Table { uint8x16_t low_byte, high_byte; };
  using ByteTable = Table;  // bf16 of the E4M3 codes 0-15: the subnormal ones and the next eight

  // Four registers at a time; the loop is gone at any optimisation level that is shipped.
  template <class R, class Op> static R each(Op op) {
    R r;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) r.v[i] = op(i);
    return r;
  }

  static F32 zero() { return set1(0.0f); }
  static F32 set1(float x) { return each<F32>([=](int) { return vdupq_n_f32(x); }); }
  static F32 load(const float* p) { return each<F32>([=](int i) { return vld1q_f32(p + 4 * i); }); }
  static void store(float* p, const F32& a) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
  }
  static F32 add(const F32& a, const F32& b) { return each<F32>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
  static F32 mul(const F32& a, const F32& b) { return each<F32>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
  static F32 div(const F32& a, const F32& b) { return each<F32>([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
  // A comparison and a choice: the min and max instructions return a NaN from either side, x86's the second operand.
  static F32 min(const F32& a, const F32& b) {
    return each<F32>([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
  }
  static F32 max(const F32& a, const F32& b) {
    return each<F32>([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
  }
  static F32 fma(const F32& a, const F32& b, const F32& c) {
    return each<F32>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
  }
  static F32 round(const F32& a) { return each<F32>([&](int i) { return vrndnq_f32(a.v[i]); }); }
  static F32 pow2(const F32& a) {
    return each<F32>([&](int i) {
      return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(a.v[i]), vdupq_n_s32(127)), 23));
    });
  }

  static Pairs load_pairs(const void* p) {
    const uint8_t* bytes = static_cast<const uint8_t*>(p);
    return each<Pairs>([=](int i) { return vreinterpretq_u32_u8(vld1q_u8(bytes + 16 * i)); });
  }
  static float32x4_t high(uint32x4_t w) { return vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xffff0000u))); }
  static float32x4_t low(uint32x4_t w) { return vreinterpretq_f32_u32(vshlq_n_u32(w, 16)); }
  static uint32x4_t two(const uint16_t* a) {
    uint32_t bits;
    __builtin_memcpy(&bits, a, 4);
    return vdupq_n_u32(bits);
  }
  static Pair broadcast(const uint16_t* a) { return {high(two(a)), low(two(a))}; }
  static F32 dot2(const F32& acc, const Pair& a, const Pairs& w) {
    // High half first: the order of all lane instruction sets.
    return each<F32>([&](int i) { return vfmaq_f32(vfmaq_f32(acc.v[i], a.high, high(w.v[i])), a.low, low(w.v[i])); });
  }

  static Table table(const uint16_t* codes) {
    const uint8x16x2_t bytes = vld2q_u8(reinterpret_cast<const uint8_t*>(codes));
    return {bytes.val[0], bytes.val[1]};
  }
  // Codes j and j + 2 of every word lie in its low and high byte: one look-up finds a byte of both, and a
  // transposition puts the two bytes of each value together.
  static void nibbles(const uint8_t* block, const Table& t, Pairs* out) {
    const Pairs words = load_pairs(block);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t bytes = vreinterpretq_u8_u32(words.v[i]);
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const uint8x16_t index = j ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
        const uint8x16_t lows = vqtbl1q_u8(t.low_byte, index), highs = vqtbl1q_u8(t.high_byte, index);
        out[j].v[i] = vreinterpretq_u32_u8(vtrn1q_u8(lows, highs));
        out[j + 2].v[i] = vreinterpretq_u32_u8(vtrn2q_u8(lows, highs));
      }
    }
  }
  static ByteTable e4m3_table() {
    static const uint8_t low[16] = {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
    static const uint8_t high[16] = {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c};
    return {vld1q_u8(low), vld1q_u8(high)};
  }
  // Above the subnormals a code is the middle of its bf16: (code << 4) + 0x3c00, made byte by byte. TBX replaces
  // what has an index below 16 by the table's and leaves the rest.
  static void e4m3_codes(const uint8_t* block, const ByteTable& t, Pairs* out) {
    const Pairs words = load_pairs(block);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t codes = vreinterpretq_u8_u32(words.v[i]), sign = vdupq_n_u8(0x80), abs = vbicq_u8(codes, sign);
      const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(codes, 4), t.low_byte, abs);
      const uint8x16_t high = vqtbx1q_u8(vaddq_u8(vshrq_n_u8(abs, 4), vdupq_n_u8(0x3c)), t.high_byte, abs);
      const uint8x16_t signed_high = vbslq_u8(sign, codes, high);
      out[0].v[i] = vreinterpretq_u32_u8(vtrn1q_u8(low, signed_high));
      out[1].v[i] = vreinterpretq_u32_u8(vtrn2q_u8(low, signed_high));
    }
  }
  static uint32x4_t upper_halves(float32x4_t a, float32x4_t b) {
    return vreinterpretq_u32_u16(vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b)));
  }
  static void half_pairs(const uint8_t* block, Pairs* out) {
    const Pairs words = load_pairs(block);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const float16x8_t h = vreinterpretq_f16_u32(words.v[i]);
      const float32x4_t a = vcvt_f32_f16(vget_low_f16(h)), b = vcvt_high_f32_f16(h);
      out[0].v[i] = upper_halves(a, b);
      out[1].v[i] = upper_halves(vsubq_f32(a, high(vreinterpretq_u32_f32(a))), vsubq_f32(b, high(vreinterpretq_u32_f32(b))));
    }
  }
  struct Words { uint32x4_t v[4]; };
  static Words widen_words(uint16x8_t a, uint16x8_t b) {
    return {{vmovl_u16(vget_low_u16(a)), vmovl_high_u16(a), vmovl_u16(vget_low_u16(b)), vmovl_high_u16(b)}};
  }
  static F32 e8m0(const uint8_t* p) {
    const uint8x16_t e = vld1q_u8(p);
    const Words w = widen_words(vmovl_u8(vget_low_u8(e)), vmovl_high_u8(e));
    return each<F32>([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(w.v[i], 23)); });
  }
  // An e4m3 pattern shifted left by 7 is a binary16 of 2^-8 its value, subnormals included.
  static F32 e4m3(const uint8_t* p) {
    const uint8x16_t e = vld1q_u8(p);
    return mul(half(vshll_n_u8(vget_low_u8(e), 7), vshll_high_n_u8(e, 7)), set1(256.0f));
  }
  static F32 half(uint16x8_t x, uint16x8_t y) {
    const float16x8_t a = vreinterpretq_f16_u16(x), b = vreinterpretq_f16_u16(y);
    return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
  }
  static F32 half(const uint16_t* p) { return half(vld1q_u16(p), vld1q_u16(p + 8)); }
  static F32 signed_bytes(const uint8_t* p) {
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t a = vmovl_s8(vget_low_s8(bytes)), b = vmovl_high_s8(bytes);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))), vcvtq_f32_s32(vmovl_high_s16(a)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))), vcvtq_f32_s32(vmovl_high_s16(b))}};
  }
  static void store_half(uint16_t* p, const F32& a) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
  }
  static F32 widen(const uint16_t* p) {
    const Words w = widen_words(vld1q_u16(p), vld1q_u16(p + 8));
    return each<F32>([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(w.v[i], 16)); });
  }
  static uint16x4_t bf16_bits(float32x4_t a) {
    const uint32x4_t u = vreinterpretq_u32_f32(a), abs = vandq_u32(u, vdupq_n_u32(0x7fffffffu)), top = vshrq_n_u32(u, 16);
    const uint32x4_t odd = vandq_u32(top, vdupq_n_u32(1));
    uint32x4_t r = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    r = vbslq_u32(vcgtq_u32(abs, vdupq_n_u32(0x7f800000u)), vorrq_u32(top, vdupq_n_u32(0x40)), r);
    r = vbslq_u32(vcltq_u32(abs, vdupq_n_u32(0x00800000u)), vandq_u32(top, vdupq_n_u32(0x8000)), r);
    return vmovn_u32(r);
  }
  static void store_bf16(uint16_t* p, const F32& a) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, bf16_bits(a.v[i]));
  }
  static void prefetch(const void* p) { __builtin_prefetch(p); }
};
static_assert(LaneIsa<Neon>);
