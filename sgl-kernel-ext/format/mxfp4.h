// MXFP4: E2M1 codes, one E8M0 scale (a power of two) per column and 32 k.
struct Mxfp4 {
  static constexpr int kSuper = 128, kGroup = 32, kBlock = 8, kScaleBytes = 16;
  template <class I> struct Decoder : Nibbles<I> {
    typename I::F32 scale(const uint8_t* p) const { return I::e8m0(p); }
  };
};
