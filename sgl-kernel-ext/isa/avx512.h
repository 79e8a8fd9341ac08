// AVX-512 F, BW, VL and DQ: Skylake-X onwards.
struct Avx512 {
  static constexpr int kRows = 8, kSums = 16, kSlowBits = 8;

  using F32 = __m512;
  using Pairs = __m512i;
  struct Pair { __m512 high, low; };
  using Table = __m512i;
  using ByteTable = __m512i;

  static F32 zero() { return _mm512_setzero_ps(); }
  static F32 set1(float x) { return _mm512_set1_ps(x); }
  static F32 load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F32 a) { _mm512_storeu_ps(p, a); }
  static F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
  static F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
  static F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
  static F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
  static F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
  static F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
  static F32 round(F32 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F32 pow2(F32 a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127)), 23));
  }

  static Pairs load_pairs(const void* p) { return _mm512_loadu_si512(p); }
  static void store_pairs(void* p, Pairs w) { _mm512_store_si512(p, w); }
  static __m512 high(__m512i w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u)))); }
  static __m512 low(__m512i w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
  static __m512i two(const uint16_t* a) {
    int32_t bits;
    __builtin_memcpy(&bits, a, 4);
    return _mm512_set1_epi32(bits);
  }
  static Pair broadcast(const uint16_t* a) { return {high(two(a)), low(two(a))}; }
  // Splitting a broadcast pair takes the two ports that multiply (Skylake-X to Ice Lake).
  static constexpr bool kSpreads = true;
  static void spread(const uint16_t* row, float* out) {
    const __m512i w = _mm512_loadu_si512(row);
    _mm512_store_ps(out, low(w));
    _mm512_store_ps(out + 16, high(w));
  }
  static Pair spread_pair(const float* p) { return {_mm512_set1_ps(p[16]), _mm512_set1_ps(p[0])}; }
  static F32 dot2(F32 acc, Pair a, Pairs w) {
    // High half first: the order of the bf16 dot instruction.
    return _mm512_fmadd_ps(a.low, low(w), _mm512_fmadd_ps(a.high, high(w), acc));
  }

  // vpermw reads five index bits: the table stands twice, so the stray fifth bit needs no mask.
  static Table table(const uint16_t* codes) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  }
  static void nibbles(const uint8_t* block, Table t, Pairs* out) {
    const __m512i words = _mm512_loadu_si512(block);
    out[0] = _mm512_permutexvar_epi16(words, t);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), t);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), t);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), t);
  }
  // Subnormal E4M3 codes (exponent 0) by their mantissa; all others are a shift and another exponent bias.
  static ByteTable e4m3_table() {
    const uint16_t subnormal[16] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    return table(subnormal);
  }
  static Pairs e4m3_high(__m512i words, ByteTable subnormal) {  // codes in the high bytes
    const __m512i normal = _mm512_add_epi16(_mm512_srli_epi16(_mm512_and_si512(words, _mm512_set1_epi16(0x7f00)), 4), _mm512_set1_epi16(0x3c00));
    const __mmask32 small = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x7800));
    // With an exponent of 0 the code's low five bits are its mantissa and two zeros: an index that vpermw takes as it is.
    const __m512i r = _mm512_mask_permutexvar_epi16(normal, small, _mm512_srli_epi16(words, 8), subnormal);
    return _mm512_ternarylogic_epi32(r, words, _mm512_set1_epi16(int16_t(0x8000)), 0xf8);  // r | (words & sign)
  }
  static void e4m3_codes(const uint8_t* block, ByteTable subnormal, Pairs* out) {
    const __m512i words = _mm512_loadu_si512(block);
    out[0] = e4m3_high(_mm512_slli_epi16(words, 8), subnormal);
    out[1] = e4m3_high(words, subnormal);
  }
  static void half_pairs(const uint8_t* block, Pairs* out) {
    const __m512i words = _mm512_loadu_si512(block);
    const __m512i even = _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)));
    const __m512i odd = _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16))));
    const __m512i top = _mm512_set1_epi32(int(0xffff0000u));
    out[0] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(even, 16), odd, top, 0xf8);
    const __m512i even_rest = _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(even), high(even)));
    const __m512i odd_rest = _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(odd), high(odd)));
    out[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(even_rest, 16), odd_rest, top, 0xf8);
  }
  static __m128i sixteen(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static F32 e8m0(const uint8_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(sixteen(p)), 23)); }
  // An e4m3 pattern shifted left by 7 is a binary16 of 2^-8 its value, subnormals included.
  static F32 e4m3(const uint8_t* p) {
    const __m512 f = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen(p)), 7));
    return _mm512_mul_ps(f, _mm512_set1_ps(256.0f));
  }
  static F32 half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F32 signed_bytes(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(p))); }
  static void store_half(uint16_t* p, F32 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static F32 widen(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
  }
  static void store_bf16(uint16_t* p, F32 a) {
    const __m512i u = _mm512_castps_si512(a), abs = _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i top = _mm512_srli_epi32(u, 16);
    r = _mm512_mask_or_epi32(r, _mm512_cmpgt_epi32_mask(abs, _mm512_set1_epi32(0x7f800000)), top, _mm512_set1_epi32(0x40));
    r = _mm512_mask_and_epi32(r, _mm512_cmplt_epi32_mask(abs, _mm512_set1_epi32(0x00800000)), top, _mm512_set1_epi32(0x8000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
  }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
};
static_assert(LaneIsa<Avx512>);
