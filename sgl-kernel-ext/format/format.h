// What a new weight format implements. One file here, one enumerator in kernels.h, one packer in
// pack.cpp; the loops in shape/ and the registers in isa/ do not change.
//
// A super-group is what a panel repeats along k: `kSuper / kGroup` groups of codes, each a run of
// 64-byte blocks of `kBlock` k, then the scales of all its groups, 16 columns each.
//   layout()                 the bytes, for the packer
//   kGroup == 0              no scale: codes are the values
//   struct Decoder<I>        rows(block, out): one 64-byte block -> kBlock / 2 rows of unscaled codes
//                            scale(p): one group's 16 scales
template <class F>
concept WeightFormat = requires {
  { F::kSuper + F::kGroup + F::kBlock + F::kScaleBytes };
};

template <class F> constexpr int kGroupOf = F::kGroup ? F::kGroup : F::kSuper;
template <class F> constexpr int kGroupsOf = F::kSuper / kGroupOf<F>;
template <class F> constexpr int kCodeBytesOf = F::kSuper / F::kBlock * 64;
template <class F> constexpr int kSuperBytesOf = kCodeBytesOf<F> + kGroupsOf<F> * F::kScaleBytes;

template <class F> constexpr lk::PanelLayout layout_of() {
  static_assert(WeightFormat<F>);
  static_assert(kSuperBytesOf<F> % 64 == 0, "a super-group keeps 64-byte alignment");
  return {F::kSuper, kSuperBytesOf<F>, F::kGroup};
}

// Codes of the E2M1 float (sign, 2 exponent bits, 1 mantissa bit) as bf16: 0 .5 1 1.5 2 3 4 6 and negatives.
constexpr uint16_t kE2M1[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

// 4-bit codes: one block is 16 columns x 8 k. The 16-bit word at (column c, parity p) holds four codes;
// nibble j is k = 2j + p. So one shift and one table look-up give row j, and no mask is needed.
template <class I> struct Nibbles {
  typename I::Table table = I::table(kE2M1);
  void rows(const uint8_t* block, typename I::Pairs* out) const { I::nibbles(block, table, out); }
};
