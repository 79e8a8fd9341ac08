// NEON of any Armv8-A processor. Conversion to and from binary16 is part of the baseline; bf16 arithmetic is not.
struct Neon {
  static constexpr int kRows = 4, kSums = 4, kSlowBits = 4;
  static constexpr bool kSpreads = false;

  // Named registers, not an array: the compiler keeps arrays of vectors in memory here.
  struct F32 { float32x4_t a, b, c, d; };   // columns 0-3, 4-7, 8-11, 12-15
  struct Pairs { uint32x4_t a, b, c, d; };
  struct Pair { float32x4_t high, low; };
  struct Table { uint8x16_t low_byte, high_byte; };
  using ByteTable = Table;  // bf16 of the E4M3 codes 0-15: the subnormal ones and the next eight

  // op on the first registers of all arguments, on the second ones, ...
  template <class R, class Op, class... X> static R each(Op op, const X&... x) {
    return {op(x.a...), op(x.b...), op(x.c...), op(x.d...)};
  }
  using V = float32x4_t;
  using W = uint32x4_t;

  static F32 zero() { return set1(0.0f); }
  static F32 set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static F32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
  static void store(float* p, const F32& x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
  }
  static F32 add(const F32& x, const F32& y) { return each<F32>([](V p, V q) { return vaddq_f32(p, q); }, x, y); }
  static F32 mul(const F32& x, const F32& y) { return each<F32>([](V p, V q) { return vmulq_f32(p, q); }, x, y); }
  static F32 div(const F32& x, const F32& y) { return each<F32>([](V p, V q) { return vdivq_f32(p, q); }, x, y); }
  // A comparison and a choice: the min and max instructions return a NaN from either side, x86's the second operand.
  static F32 min(const F32& x, const F32& y) { return each<F32>([](V p, V q) { return vbslq_f32(vcltq_f32(p, q), p, q); }, x, y); }
  static F32 max(const F32& x, const F32& y) { return each<F32>([](V p, V q) { return vbslq_f32(vcgtq_f32(p, q), p, q); }, x, y); }
  static F32 fma(const F32& x, const F32& y, const F32& z) {
    return each<F32>([](V p, V q, V r) { return vfmaq_f32(r, p, q); }, x, y, z);
  }
  static F32 round(const F32& x) { return each<F32>([](V p) { return vrndnq_f32(p); }, x); }
  static F32 pow2(const F32& x) {
    return each<F32>([](V p) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(p), vdupq_n_s32(127)), 23)); }, x);
  }

  static W words_at(const void* p, ptrdiff_t bytes) { return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p) + bytes)); }
  static Pairs load_pairs(const void* p) { return {words_at(p, 0), words_at(p, 16), words_at(p, 32), words_at(p, 48)}; }
  static void store_pairs(void* p, const Pairs& w) {
    uint32_t* to = static_cast<uint32_t*>(p);
    vst1q_u32(to, w.a);
    vst1q_u32(to + 4, w.b);
    vst1q_u32(to + 8, w.c);
    vst1q_u32(to + 12, w.d);
  }
  static V high(W w) { return vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xffff0000u))); }
  static V low(W w) { return vreinterpretq_f32_u32(vshlq_n_u32(w, 16)); }
  static W two(const uint16_t* p) {
    uint32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return vdupq_n_u32(bits);
  }
  static Pair broadcast(const uint16_t* p) { return {high(two(p)), low(two(p))}; }
  static F32 dot2(const F32& acc, const Pair& x, const Pairs& w) {
    // High half first: the order of all lane instruction sets.
    return each<F32>([&](V sum, W pair) { return vfmaq_f32(vfmaq_f32(sum, x.high, high(pair)), x.low, low(pair)); }, acc, w);
  }

  static Table table(const uint16_t* codes) {
    const uint8x16x2_t bytes = vld2q_u8(reinterpret_cast<const uint8_t*>(codes));
    return {bytes.val[0], bytes.val[1]};
  }
  // The bf16 values of the even bytes' codes, and of the odd bytes'.
  static W even(uint8x16_t lows, uint8x16_t highs) { return vreinterpretq_u32_u8(vtrn1q_u8(lows, highs)); }
  static W odd(uint8x16_t lows, uint8x16_t highs) { return vreinterpretq_u32_u8(vtrn2q_u8(lows, highs)); }
  // Codes j and j + 2 of every word lie in its low and high byte: one look-up finds a byte of both, and a
  // transposition puts the two bytes of each value together.
  static void nibbles(W words, const Table& t, W& out0, W& out1, W& out2, W& out3) {
    const uint8x16_t bytes = vreinterpretq_u8_u32(words), first = vandq_u8(bytes, vdupq_n_u8(15)), second = vshrq_n_u8(bytes, 4);
    const uint8x16_t low0 = vqtbl1q_u8(t.low_byte, first), high0 = vqtbl1q_u8(t.high_byte, first);
    const uint8x16_t low1 = vqtbl1q_u8(t.low_byte, second), high1 = vqtbl1q_u8(t.high_byte, second);
    out0 = even(low0, high0);
    out1 = even(low1, high1);
    out2 = odd(low0, high0);
    out3 = odd(low1, high1);
  }
  static void nibbles(const uint8_t* block, const Table& t, Pairs* out) {
    const Pairs words = load_pairs(block);
    nibbles(words.a, t, out[0].a, out[1].a, out[2].a, out[3].a);
    nibbles(words.b, t, out[0].b, out[1].b, out[2].b, out[3].b);
    nibbles(words.c, t, out[0].c, out[1].c, out[2].c, out[3].c);
    nibbles(words.d, t, out[0].d, out[1].d, out[2].d, out[3].d);
  }
  static ByteTable e4m3_table() {
    static const uint8_t lows[16] = {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
    static const uint8_t highs[16] = {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c};
    return {vld1q_u8(lows), vld1q_u8(highs)};
  }
  // Above the subnormals a code is the middle of its bf16: (code << 4) + 0x3c00, made byte by byte. TBX replaces
  // what has an index below 16 by the table's and leaves the rest.
  static void e4m3_codes(W words, const ByteTable& t, W& out0, W& out1) {
    const uint8x16_t codes = vreinterpretq_u8_u32(words), sign = vdupq_n_u8(0x80), abs = vbicq_u8(codes, sign);
    const uint8x16_t lows = vqtbx1q_u8(vshlq_n_u8(codes, 4), t.low_byte, abs);
    const uint8x16_t highs = vqtbx1q_u8(vaddq_u8(vshrq_n_u8(abs, 4), vdupq_n_u8(0x3c)), t.high_byte, abs);
    const uint8x16_t signed_highs = vbslq_u8(sign, codes, highs);
    out0 = even(lows, signed_highs);
    out1 = odd(lows, signed_highs);
  }
  static void e4m3_codes(const uint8_t* block, const ByteTable& t, Pairs* out) {
    const Pairs words = load_pairs(block);
    e4m3_codes(words.a, t, out[0].a, out[1].a);
    e4m3_codes(words.b, t, out[0].b, out[1].b);
    e4m3_codes(words.c, t, out[0].c, out[1].c);
    e4m3_codes(words.d, t, out[0].d, out[1].d);
  }
  static W upper_halves(V x, V y) { return vreinterpretq_u32_u16(vuzp2q_u16(vreinterpretq_u16_f32(x), vreinterpretq_u16_f32(y))); }
  static V rest(V x) { return vsubq_f32(x, high(vreinterpretq_u32_f32(x))); }
  static void half_pairs(W words, W& out0, W& out1) {
    const float16x8_t h = vreinterpretq_f16_u32(words);
    const V x = vcvt_f32_f16(vget_low_f16(h)), y = vcvt_high_f32_f16(h);
    out0 = upper_halves(x, y);
    out1 = upper_halves(rest(x), rest(y));
  }
  static void half_pairs(const uint8_t* block, Pairs* out) {
    const Pairs words = load_pairs(block);
    half_pairs(words.a, out[0].a, out[1].a);
    half_pairs(words.b, out[0].b, out[1].b);
    half_pairs(words.c, out[0].c, out[1].c);
    half_pairs(words.d, out[0].d, out[1].d);
  }
  static Pairs widen_words(uint16x8_t x, uint16x8_t y) {
    return {vmovl_u16(vget_low_u16(x)), vmovl_high_u16(x), vmovl_u16(vget_low_u16(y)), vmovl_high_u16(y)};
  }
  static F32 e8m0(const uint8_t* p) {
    const uint8x16_t e = vld1q_u8(p);
    return each<F32>([](W w) { return vreinterpretq_f32_u32(vshlq_n_u32(w, 23)); }, widen_words(vmovl_u8(vget_low_u8(e)), vmovl_high_u8(e)));
  }
  static F32 half(uint16x8_t x, uint16x8_t y) {
    const float16x8_t h = vreinterpretq_f16_u16(x), k = vreinterpretq_f16_u16(y);
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h), vcvt_f32_f16(vget_low_f16(k)), vcvt_high_f32_f16(k)};
  }
  static F32 half(const uint16_t* p) { return half(vld1q_u16(p), vld1q_u16(p + 8)); }
  // An e4m3 pattern shifted left by 7 is a binary16 of 2^-8 its value, subnormals included.
  static F32 e4m3(const uint8_t* p) {
    const uint8x16_t e = vld1q_u8(p);
    return mul(half(vshll_n_u8(vget_low_u8(e), 7), vshll_high_n_u8(e, 7)), set1(256.0f));
  }
  static F32 signed_bytes(const uint8_t* p) {
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t x = vmovl_s8(vget_low_s8(bytes)), y = vmovl_high_s8(bytes);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(y))), vcvtq_f32_s32(vmovl_high_s16(y))};
  }
  static F32 widen(const uint16_t* p) {
    return each<F32>([](W w) { return vreinterpretq_f32_u32(vshlq_n_u32(w, 16)); }, widen_words(vld1q_u16(p), vld1q_u16(p + 8)));
  }
  static uint16x4_t half_bits(V x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
  static void store_half(uint16_t* p, const F32& x) {
    vst1q_u16(p, vcombine_u16(half_bits(x.a), half_bits(x.b)));
    vst1q_u16(p + 8, vcombine_u16(half_bits(x.c), half_bits(x.d)));
  }
  static uint16x4_t bf16_bits(V x) {
    const W u = vreinterpretq_u32_f32(x), abs = vandq_u32(u, vdupq_n_u32(0x7fffffffu)), top = vshrq_n_u32(u, 16);
    const W uneven = vandq_u32(top, vdupq_n_u32(1));
    W r = vshrq_n_u32(vaddq_u32(u, vaddq_u32(uneven, vdupq_n_u32(0x7fff))), 16);
    r = vbslq_u32(vcgtq_u32(abs, vdupq_n_u32(0x7f800000u)), vorrq_u32(top, vdupq_n_u32(0x40)), r);
    r = vbslq_u32(vcltq_u32(abs, vdupq_n_u32(0x00800000u)), vandq_u32(top, vdupq_n_u32(0x8000)), r);
    return vmovn_u32(r);
  }
  static void store_bf16(uint16_t* p, const F32& x) {
    vst1q_u16(p, vcombine_u16(bf16_bits(x.a), bf16_bits(x.b)));
    vst1q_u16(p + 8, vcombine_u16(bf16_bits(x.c), bf16_bits(x.d)));
  }
  static void prefetch(const void* p) { __builtin_prefetch(p); }
  static void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
};
static_assert(LaneIsa<Neon>);
