// FP8: E4M3 codes; scales per group as the checkpoint says (block-scaled), or none (per tensor, per channel:
// the epilogue's factors).
struct Fp8 {
  static constexpr int kBlock = 4, kGroup = kOpen, kTerms = 1;
  static constexpr bool kZeros = false, kFold = false;
  template <class I> struct Decoder : Bytes<I> {
    typename I::F32 scale(lk::Scale type, const uint8_t* p) const { return open_scale<I>(type, p); }
  };
};
static_assert(WeightFormat<Fp8>);
