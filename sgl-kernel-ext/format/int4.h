// INT4 (AWQ, GPTQ, compressed-tensors): unsigned codes, (q - 8) * scale, or (q - z) * scale with a zero point z per
// column and group: the sum over a group is that of q - 8 plus (8 - z) times the sum of the activations.
struct Int4 {
  static constexpr int kBlock = 8, kGroup = kOpen, kTerms = 1;
  static constexpr bool kZeros = true, kFold = false;
  template <class I> struct Decoder : Nibbles<I> {
    Decoder() : Nibbles<I>(kInt4) {}
    typename I::F32 scale(lk::Scale type, const uint8_t* p) const { return open_scale<I>(type, p); }
  };
};
static_assert(WeightFormat<Int4>);
