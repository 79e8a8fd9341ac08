// f16: eleven significant bits are two bf16 values, high part and rest, so nothing is lost and every row is
// multiplied twice. Stored as the checkpoint has it.
struct F16 {
  static constexpr int kBlock = 2, kGroup = kOpen, kTerms = 2;
  static constexpr bool kZeros = false, kFold = false;
  template <class I> struct Decoder {
    void rows(const uint8_t* block, typename I::Pairs* out) const { I::half_pairs(block, out); }
    typename I::F32 scale(lk::Scale, const uint8_t*) const { return I::set1(1.0f); }
  };
};
static_assert(WeightFormat<F16>);
