// Scalar: any processor. Slow and obvious; the reference that the vector tables are compared with.
// Not inlined: sixteen lanes unrolled into every shape would take a minute to compile.
#define LK_CALL [[gnu::noinline]]

struct Scalar {
  static constexpr int kRows = 4, kSums = 4, kSlowBits = 4;
  static constexpr bool kSpreads = true;  // for tests on any processor

  struct F32 { float v[16]; };
  struct Pairs { uint32_t v[16]; };
  struct Pair { float high, low; };
  struct Table { uint16_t v[16]; };
  struct ByteTable {};

  static float from_bits(uint32_t u) { return __builtin_bit_cast(float, u); }
  static uint32_t bits(float f) { return __builtin_bit_cast(uint32_t, f); }
  template <class Op> static F32 each(Op op) {
    F32 r;
    for (int i = 0; i < 16; ++i) r.v[i] = op(i);
    return r;
  }

  static F32 zero() { return set1(0.0f); }
  static F32 set1(float x) { return each([=](int) { return x; }); }
  static F32 load(const float* p) { return each([=](int i) { return p[i]; }); }
  static void store(float* p, F32 a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i]; }
  static F32 add(F32 a, F32 b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
  static F32 mul(F32 a, F32 b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
  LK_CALL static F32 div(F32 a, F32 b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
  // Operand order as the vector instructions: the second operand where either is NaN.
  LK_CALL static F32 min(F32 a, F32 b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
  LK_CALL static F32 max(F32 a, F32 b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
  LK_CALL static F32 fma(F32 a, F32 b, F32 c) {
    return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
  }
  static F32 round(F32 a) { return each([&](int i) { return __builtin_rintf(a.v[i]); }); }
  static F32 pow2(F32 a) { return each([&](int i) { return from_bits(uint32_t(int(a.v[i]) + 127) << 23); }); }

  static void spread(const uint16_t* row, float* out) {
    for (int i = 0; i < 16; ++i) {
      out[i] = from_bits(uint32_t(row[2 * i]) << 16);
      out[16 + i] = from_bits(uint32_t(row[2 * i + 1]) << 16);
    }
  }
  static Pairs load_pairs(const void* p) {
    Pairs r;
    __builtin_memcpy(r.v, p, 64);
    return r;
  }
  static void store_pairs(void* p, const Pairs& w) { __builtin_memcpy(p, w.v, 64); }
  // Every half of a pair times its column's scale; exact, so nothing is rounded.
  LK_CALL static Pairs scaled(const Pairs& w, const F32& scale) {
    Pairs r;
    for (int i = 0; i < 16; ++i)
      r.v[i] = bits(from_bits(w.v[i] << 16) * scale.v[i]) >> 16 | (bits(from_bits(w.v[i] & 0xffff0000u) * scale.v[i]) & 0xffff0000u);
    return r;
  }
  // A power of two is added to the exponents, but not to zero's.
  static bool exponents(const uint8_t* e8m0, Pairs& out) {
    bool all = true;
    for (int i = 0; i < 16; ++i) {
      const int n = int(e8m0[i]) - 127;
      all = all && n >= -100 && n <= 100;
      out.v[i] = (uint32_t(n) << 7 & 0xffffu) | uint32_t(n) << 23;
    }
    return all;
  }
  static Pairs raised(const Pairs& w, const Pairs& exponents) {
    Pairs r;
    for (int i = 0; i < 16; ++i) {
      const uint32_t low = w.v[i] & 0xffffu, high = w.v[i] & 0xffff0000u;
      r.v[i] = (low & 0x7fffu ? (low + exponents.v[i]) & 0xffffu : low) | (high & 0x7fff0000u ? high + (exponents.v[i] & 0xffff0000u) : high);
    }
    return r;
  }
  static Pair broadcast(const uint16_t* a) { return {from_bits(uint32_t(a[1]) << 16), from_bits(uint32_t(a[0]) << 16)}; }
  static Pair spread_pair(const float* p) { return {p[16], p[0]}; }
  LK_CALL static F32 dot2(F32 acc, Pair a, const Pairs& w) {
    return each([&](int i) {
      // High half first: the order of the bf16 dot instruction.
      float high = __builtin_fmaf(a.high, from_bits(w.v[i] & 0xffff0000u), acc.v[i]);
      return __builtin_fmaf(a.low, from_bits(w.v[i] << 16), high);
    });
  }

  static Table table(const uint16_t* codes) {
    Table t;
    __builtin_memcpy(t.v, codes, 32);
    return t;
  }
  LK_CALL static void nibbles(const uint8_t* block, const Table& t, Pairs* out) {
    uint16_t words[32];
    __builtin_memcpy(words, block, 64);
    for (int j = 0; j < 4; ++j)
      for (int c = 0; c < 16; ++c)
        out[j].v[c] = t.v[(words[2 * c] >> (4 * j)) & 15] | uint32_t(t.v[(words[2 * c + 1] >> (4 * j)) & 15]) << 16;
  }
  static float e4m3(uint8_t code) {
    const int e = code >> 3 & 15, m = code & 7;
    const float f = e ? from_bits(uint32_t(e + 120) << 23 | uint32_t(m) << 20) : float(m) * 0x1p-9f;
    return code & 0x80 ? -f : f;
  }
  static float half(uint16_t h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const float f = e == 31 ? from_bits(0x7f800000u | uint32_t(m) << 13)
                    : e ? from_bits(uint32_t(e + 112) << 23 | uint32_t(m) << 13) : float(m) * 0x1p-24f;
    return h & 0x8000 ? -f : f;
  }
  static ByteTable e4m3_table() { return {}; }
  LK_CALL static void e4m3_codes(const uint8_t* block, ByteTable, Pairs* out) {
    for (int j = 0; j < 2; ++j)
      for (int c = 0; c < 16; ++c)
        out[j].v[c] = bits(e4m3(block[4 * c + j])) >> 16 | (bits(e4m3(block[4 * c + 2 + j])) & 0xffff0000u);
  }
  LK_CALL static void half_pairs(const uint8_t* block, Pairs* out) {
    uint16_t values[32];
    __builtin_memcpy(values, block, 64);
    for (int c = 0; c < 16; ++c) {
      uint32_t high[2], rest[2];
      for (int p = 0; p < 2; ++p) {
        const float x = half(values[2 * c + p]);
        high[p] = bits(x) & 0xffff0000u;
        rest[p] = bits(x - from_bits(high[p]));
      }
      out[0].v[c] = high[0] >> 16 | high[1];
      out[1].v[c] = rest[0] >> 16 | (rest[1] & 0xffff0000u);
    }
  }
  static F32 e8m0(const uint8_t* p) { return each([=](int i) { return from_bits(uint32_t(p[i]) << 23); }); }
  LK_CALL static F32 e4m3(const uint8_t* p) { return each([=](int i) { return e4m3(p[i]); }); }
  LK_CALL static F32 half(const uint16_t* p) { return each([=](int i) { return half(p[i]); }); }
  static F32 signed_bytes(const uint8_t* p) { return each([=](int i) { return float(int8_t(p[i])); }); }
  LK_CALL static void store_half(uint16_t* p, F32 a) {
    for (int i = 0; i < 16; ++i) {
      const uint32_t u = bits(a.v[i]), sign = u >> 16 & 0x8000u, abs = u & 0x7fffffffu;
      if (abs > 0x7f800000u) p[i] = uint16_t(sign | 0x7e00u | (abs >> 13 & 0x3ffu));
      else if (abs >= 0x477ff000u) p[i] = uint16_t(sign | 0x7c00u);  // rounds to infinity
      else if (abs >= 0x38800000u) p[i] = uint16_t(sign | ((abs - 0x38000000u + 0xfffu + (abs >> 13 & 1u)) >> 13));
      else p[i] = uint16_t(sign | (bits(from_bits(abs) + 0.5f) - 0x3f000000u));  // adding 0.5 rounds to a multiple of 2^-24
    }
  }
  static F32 widen(const uint16_t* p) { return each([=](int i) { return from_bits(uint32_t(p[i]) << 16); }); }
  LK_CALL static void store_bf16(uint16_t* p, F32 a) {
    for (int i = 0; i < 16; ++i) {
      const uint32_t u = bits(a.v[i]);
      // Subnormals become zero, as in the bf16 conversion instruction; NaN stays NaN.
      if ((u & 0x7f800000u) == 0) p[i] = uint16_t(u >> 16 & 0x8000u);
      else if ((u & 0x7fffffffu) > 0x7f800000u) p[i] = uint16_t(u >> 16 | 0x40u);
      else p[i] = uint16_t((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
    }
  }
  static void prefetch(const void* p) { __builtin_prefetch(p); }
  static void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
};
static_assert(LaneIsa<Scalar>);
