// NVFP4: E2M1 codes, one E4M3 scale per column and 16 k; the second scale is applied once per matrix.
struct Nvfp4 {
  static constexpr int kSuper = 64, kGroup = 16, kBlock = 8, kScaleBytes = 16;
  template <class I> struct Decoder : Nibbles<I> {
    typename I::F32 scale(const uint8_t* p) const { return I::e4m3(p); }
  };
};
