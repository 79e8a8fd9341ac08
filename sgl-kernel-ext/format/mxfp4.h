// MXFP4: E2M1 codes, one E8M0 scale (a power of two) per column and 32 k.
struct Mxfp4 {
  static constexpr int kBlock = 8, kGroup = 32, kTerms = 1;
  static constexpr bool kZeros = false, kFold = true;
  template <class I> struct Decoder : Nibbles<I> {
    Decoder() : Nibbles<I>(kE2M1) {}
    typename I::F32 scale(lk::Scale, const uint8_t* p) const { return I::e8m0(p); }
  };
};
static_assert(WeightFormat<Mxfp4>);
