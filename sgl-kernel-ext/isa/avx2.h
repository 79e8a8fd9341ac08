// AVX2, FMA and F16C: Haswell and Zen onwards. No BMI2: PDEP is microcode on Zen 1 and 2.
struct Avx2 {
  static constexpr int kRows = 4, kSums = 4, kSlowBits = 4;
  static constexpr bool kSpreads = false;

  struct F32 { __m256 lo, hi; };      // columns 0-7, 8-15
  struct Pairs { __m256i lo, hi; };
  struct Pair { __m256 high, low; };
  struct Table { __m256i low_byte, high_byte; };
  using ByteTable = __m256i;  // bf16 of the subnormal E4M3 codes: eight low bytes, eight high bytes

  static F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F32 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
  static F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  static F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  static F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  static F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
  static F32 round(F32 a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
  }
  static __m256 pow2(__m256 a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127)), 23));
  }
  static F32 pow2(F32 a) { return {pow2(a.lo), pow2(a.hi)}; }

  static Pairs load_pairs(const void* p) {
    auto q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
  }
  static void store_pairs(void* p, Pairs w) {
    auto q = static_cast<__m256i*>(p);
    _mm256_store_si256(q, w.lo);
    _mm256_store_si256(q + 1, w.hi);
  }
  static __m256 high(__m256i w) { return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000u)))); }
  static __m256 low(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
  static Pair broadcast(const uint16_t* a) {
    int32_t two;
    __builtin_memcpy(&two, a, 4);
    const __m256i v = _mm256_set1_epi32(two);
    return {high(v), low(v)};
  }
  static F32 dot2(F32 acc, Pair a, Pairs w) {
    // High half first: the order of the bf16 dot instruction.
    acc = {_mm256_fmadd_ps(a.high, high(w.lo), acc.lo), _mm256_fmadd_ps(a.high, high(w.hi), acc.hi)};
    return {_mm256_fmadd_ps(a.low, low(w.lo), acc.lo), _mm256_fmadd_ps(a.low, low(w.hi), acc.hi)};
  }

  static Table table(const uint16_t* codes) {
    alignas(16) uint8_t low_byte[16], high_byte[16];
    for (int i = 0; i < 16; ++i) {
      low_byte[i] = uint8_t(codes[i]);
      high_byte[i] = uint8_t(codes[i] >> 8);
    }
    return {_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(low_byte))),
            _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(high_byte)))};
  }
  // Codes j and j + 2 of every word lie in its low and high byte: one byte shuffle looks both up.
  static void nibbles(__m256i words, const Table& t, __m256i* out, int stride) {
    const __m256i byte = _mm256_set1_epi16(0x00ff);
    for (int j = 0; j < 2; ++j) {
      const __m256i index = _mm256_and_si256(j ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi8(15));
      const __m256i lows = _mm256_shuffle_epi8(t.low_byte, index), highs = _mm256_shuffle_epi8(t.high_byte, index);
      out[j * stride] = _mm256_or_si256(_mm256_and_si256(lows, byte), _mm256_slli_epi16(highs, 8));
      out[(j + 2) * stride] = _mm256_or_si256(_mm256_srli_epi16(lows, 8), _mm256_andnot_si256(byte, highs));
    }
  }
  static void nibbles(const uint8_t* block, const Table& t, Pairs* out) {
    const Pairs words = load_pairs(block);
    nibbles(words.lo, t, &out[0].lo, 2);
    nibbles(words.hi, t, &out[0].hi, 2);
  }
  static ByteTable e4m3_table() {
    const __m128i subnormal = _mm_setr_epi8(0, 0, char(0x80), char(0xc0), 0, 0x20, 0x40, 0x60, 0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c);
    return _mm256_broadcastsi128_si256(subnormal);
  }
  static __m256i e4m3_low(__m256i words, ByteTable subnormal) {  // codes in the low bytes, high bytes zero
    const __m256i abs = _mm256_and_si256(words, _mm256_set1_epi16(0x7f));
    const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(abs, 4), _mm256_set1_epi16(0x3c00));
    const __m256i index = _mm256_or_si256(_mm256_or_si256(abs, _mm256_slli_epi16(abs, 8)), _mm256_set1_epi16(0x0800));
    const __m256i small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), abs);
    const __m256i r = _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(subnormal, index), small);
    return _mm256_or_si256(r, _mm256_slli_epi16(_mm256_srli_epi16(words, 7), 15));
  }
  static void e4m3_codes(const uint8_t* block, ByteTable subnormal, Pairs* out) {
    const Pairs words = load_pairs(block);
    const __m256i byte = _mm256_set1_epi16(0x00ff);
    out[0] = {e4m3_low(_mm256_and_si256(words.lo, byte), subnormal), e4m3_low(_mm256_and_si256(words.hi, byte), subnormal)};
    out[1] = {e4m3_low(_mm256_srli_epi16(words.lo, 8), subnormal), e4m3_low(_mm256_srli_epi16(words.hi, 8), subnormal)};
  }
  // Eight f16 in the low halves of 32-bit lanes, high halves zero.
  static __m256 half_lanes(__m256i lanes) {
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1)));
  }
  static void half_pairs(__m256i words, __m256i* first, __m256i* second) {
    const __m256i low_half = _mm256_set1_epi32(0xffff);
    const __m256 even = half_lanes(_mm256_and_si256(words, low_half)), odd = half_lanes(_mm256_srli_epi32(words, 16));
    const __m256 even_high = high(_mm256_castps_si256(even)), odd_high = high(_mm256_castps_si256(odd));
    const auto join = [](__m256 a, __m256 b) { return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(a), 16), _mm256_castps_si256(b)); };
    *first = join(even_high, odd_high);
    *second = join(_mm256_sub_ps(even, even_high), high(_mm256_castps_si256(_mm256_sub_ps(odd, odd_high))));
  }
  static void half_pairs(const uint8_t* block, Pairs* out) {
    const Pairs words = load_pairs(block);
    half_pairs(words.lo, &out[0].lo, &out[1].lo);
    half_pairs(words.hi, &out[0].hi, &out[1].hi);
  }
  static __m256 e8m0_half(const uint8_t* p) {
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
  }
  static F32 e8m0(const uint8_t* p) { return {e8m0_half(p), e8m0_half(p + 8)}; }
  // An e4m3 pattern shifted left by 7 is a binary16 of 2^-8 its value, subnormals included.
  static F32 e4m3(const uint8_t* p) {
    const __m256i h = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
    const __m256 unit = _mm256_set1_ps(256.0f);
    return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), unit),
            _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)), unit)};
  }
  static F32 half(const uint16_t* p) {
    auto q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
  }
  static __m256 signed_half(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static F32 signed_bytes(const uint8_t* p) { return {signed_half(p), signed_half(p + 8)}; }
  static void store_half(uint16_t* p, F32 a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, mode));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, mode));
  }
  static __m128i bf16_half(__m256 a) {
    const __m256i u = _mm256_castps_si256(a), abs = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_cmpgt_epi32(abs, _mm256_set1_epi32(0x7f800000));
    const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), abs);
    r = _mm256_blendv_epi8(r, _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40)), nan);
    r = _mm256_blendv_epi8(r, _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x8000)), tiny);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  }
  static __m256 widen_half(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
  }
  static F32 widen(const uint16_t* p) { return {widen_half(p), widen_half(p + 8)}; }
  static void store_bf16(uint16_t* p, F32 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bf16_half(a.lo));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), bf16_half(a.hi));
  }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
};
static_assert(LaneIsa<Avx2>);
