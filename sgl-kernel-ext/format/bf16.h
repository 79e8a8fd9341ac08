// bf16: a block is one row, stored as it is used.
struct Bf16 {
  static constexpr int kBlock = 2, kGroup = 0, kTerms = 1;
  static constexpr bool kZeros = false, kFold = false;
  template <class I> struct Decoder {
    void rows(const uint8_t* block, typename I::Pairs* out) const { out[0] = I::load_pairs(block); }
  };
};
static_assert(WeightFormat<Bf16>);
