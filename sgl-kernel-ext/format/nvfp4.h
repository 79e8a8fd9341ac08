// NVFP4: E2M1 codes, one E4M3 scale per column and 16 k; the second scale is applied once per matrix.
struct Nvfp4 {
  static constexpr int kBlock = 8, kGroup = 16, kTerms = 1;
  static constexpr bool kZeros = false, kFold = true;
  template <class I> struct Decoder : Nibbles<I> {
    Decoder() : Nibbles<I>(kE2M1) {}
    typename I::F32 scale(lk::Scale, const uint8_t* p) const { return I::e4m3(p); }
  };
};
static_assert(WeightFormat<Nvfp4>);
