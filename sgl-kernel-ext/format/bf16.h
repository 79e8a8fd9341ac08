// bf16: a block is one row, stored as it is used.
struct Bf16 {
  static constexpr int kSuper = 32, kGroup = 0, kBlock = 2, kScaleBytes = 0;
  template <class I> struct Decoder {
    void rows(const uint8_t* block, typename I::Pairs* out) const { out[0] = I::load_pairs(block); }
  };
};
