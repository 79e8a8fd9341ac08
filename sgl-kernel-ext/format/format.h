// What a new weight format implements. One file here, one enumerator and its row of tables in kernels.h, one
// packer in pack.cpp; the loops in shape/ and the registers in isa/ do not change.
//
//   kBlock    k of one 64-byte block of codes
//   kGroup    k that share one scale; kOpen: the checkpoint says, or none; 0: never any, and one chain of sums
//   kTerms    rows of bf16 pairs whose sum is one row of codes
//   kZeros    whether there may be zero points
//   kFold     whether scale times code is always a bf16 value (tiles take it so)
//   struct Decoder<I>    rows(block, out): one block -> kBlock / 2 * kTerms rows of unscaled codes
//                        scale(layout, p): the 16 scales of the group at p
constexpr int kOpen = -1;

template <class F>
concept WeightFormat = requires {
  { F::kBlock + F::kGroup + F::kTerms + int(F::kZeros) + int(F::kFold) };
};

// k of the inner, fully unrolled step.
template <class F> constexpr int kStepOf = F::kGroup > 0 && F::kGroup < lk::kUnit ? F::kGroup : lk::kUnit;

// Codes of the E2M1 float (sign, 2 exponent bits, 1 mantissa bit) as bf16: 0 .5 1 1.5 2 3 4 6 and negatives.
constexpr uint16_t kE2M1[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
// 4-bit integers, less 8: -8 .. 7.
constexpr uint16_t kInt4[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// 4-bit codes: one block is 16 columns x 8 k. The 16-bit word at (column c, parity p) holds four codes;
// nibble j is k = 2j + p. So one shift and one table look-up give row j, and no mask is needed.
template <class I> struct Nibbles {
  typename I::Table table;
  explicit Nibbles(const uint16_t* codes) : table(I::table(codes)) {}
  void rows(const uint8_t* block, typename I::Pairs* out) const { I::nibbles(block, table, out); }
};

// 8-bit codes: one block is 16 columns x 4 k. Byte j of the 16-bit word at (column c, parity p) is k = 2j + p.
template <class I> struct Bytes {
  typename I::ByteTable table = I::e4m3_table();
  void rows(const uint8_t* block, typename I::Pairs* out) const { I::e4m3_codes(block, table, out); }
};

// Scales whose type the checkpoint says. Predicted branches, once per group.
template <class I> typename I::F32 open_scale(lk::Scale type, const uint8_t* p) {
  switch (type) {
    case lk::Scale::bf16: return I::widen(reinterpret_cast<const uint16_t*>(p));
    case lk::Scale::f16: return I::half(reinterpret_cast<const uint16_t*>(p));
    case lk::Scale::f32: return I::load(reinterpret_cast<const float*>(p));
    case lk::Scale::f32_shared: return I::set1(*reinterpret_cast<const float*>(p));
    default: return I::set1(1.0f);
  }
}
