// What a new instruction set implements. One file here, one lk_isa() row in CMakeLists.txt.
//
// Only these files use intrinsics. They include nothing from the standard library: a template
// instantiated here would become a weak symbol compiled for this instruction set, and the linker could
// pick it for everyone. Everything sits in the unnamed namespace that kernels.cpp opens.
//
// Lane instruction sets agree bit for bit. The common order of dot2 is the bf16 dot instruction's:
// high half first, then low half, each a fused multiply-add, subnormals flushed (the engine sets the
// flush bits for its threads; vdpbf16ps always flushes).

template <class I>
concept LaneIsa = requires(typename I::F32 f, typename I::Pairs p, typename I::Pair a, typename I::Table t, typename I::ByteTable b,
                           typename I::Pairs* out, const uint8_t* bytes, const float* in, float* to,
                           const uint16_t* codes, uint16_t* bf16) {
  { I::kRows + I::kSums };             // rows at once (a power of two), F32 sums that fit the registers
  { I::kSpreads };                     // whether many rows' pairs are split once: spread(row, 32 floats), spread_pair(float*) as broadcast
  { I::kSlowBits };                    // codes of so many bits and more are decoded once for many rows (16: none): measured
  { I::zero() };                       // F32: 16 floats
  { I::set1(1.0f) };
  { I::load(in) };
  { I::store(to, f) };
  { I::add(f, f) };
  { I::mul(f, f) };
  { I::div(f, f) };
  { I::min(f, f) };
  { I::max(f, f) };
  { I::fma(f, f, f) };                 // f * f + f, rounded once
  { I::round(f) };                     // to nearest even integer
  { I::pow2(f) };                      // 2^f for integral f in [-126, 127]
  { I::load_pairs(bytes) };            // Pairs: one row of a panel
  { I::store_pairs(to, p) };           // on a cache line
  { I::broadcast(codes) };             // Pair: (k, k+1) of one activation row, for dot2
  { I::dot2(f, a, p) };                // f + a.high * p.high + a.low * p.low
  { I::table(codes) };                 // 16 bf16 values, looked up by
  { I::nibbles(bytes, t, out) };       // a 64-byte block of 4-bit codes -> 4 rows
  { I::e4m3_table() };                 // whatever helps with
  { I::e4m3_codes(bytes, b, out) };    // a 64-byte block of E4M3 codes (no NaN) -> 2 rows
  { I::half_pairs(bytes, out) };       // a 64-byte block of f16 pairs -> 2 rows: high parts (truncated), rest
  { I::e8m0(bytes) };                  // 16 scales of 16 columns -> F32
  { I::e4m3(bytes) };
  { I::half(codes) };                  // 16 f16 values -> F32
  { I::signed_bytes(bytes) };          // 16 int8 values -> F32
  { I::store_half(bf16, f) };          // F32 -> f16, to nearest even
  { I::store_bf16(bf16, f) };          // round to nearest even
  { I::widen(codes) };                 // 16 bf16 values -> F32
  { I::prefetch(bytes) };              // to the first cache; far: to the second
  { I::prefetch_far(bytes) };
};

// Instruction sets whose dot2 sums in an order of their own say so with `kOwnOrder`: they satisfy the concept, and
// agree with the others within a bound instead of bit for bit.
template <class I> constexpr bool kLane = !requires { I::kOwnOrder; };

// How many sums the dot2 of a step take in turn: each waits for the one before it in its sum, and where dot2 takes long to
// finish a single row waits for that instead of memory. Those that agree bit for bit have one.
template <class I> constexpr int kChains = 1;
template <class I> requires requires { I::kChains; } constexpr int kChains<I> = I::kChains;

// A matrix multiplier: eight tiles of 16 rows of 64 bytes, by number. On top of a lane instruction set for few rows,
// and of another order of sums. shape/tile.h has the loops.
template <class I>
concept TileIsa = LaneIsa<I> && requires(typename I::F32 f, typename I::Pairs p, typename I::Pairs& out, const uint8_t* bytes, void* to, const void* from) {
  { I::kFewRows + I::kFewBf16Rows };          // up to so many rows product.h is as fast or faster; of bf16, which it need not decode
  { I::kNearSteps };                          // of k, that rows are fetched to the first cache ahead of tile_load_once; 0: not
  { I::tile_begin(16) };                      // before a thread's first tile, with the rows of tiles 0-5; and
  { I::tile_end() };                          // after its last: what tiles hold is gone
  { I::template tile_zero<0>() };
  { I::template tile_load<0>(from, 64) };     // rows `stride` bytes apart
  { I::template tile_load_once<4>(from, 64) };  // the same of bytes that others should stay in a cache for
  { I::template tile_store<0>(to, 64) };
  { I::template tile_dot<0, 4, 6>() };        // tile 0 += rows of k pairs (tile 4) times rows of a panel (tile 6)
  { I::copy_line(to, from) };                 // 64 bytes, to a cache line
  { I::scaled(p, f) };                        // both halves times the column's scale, where that is exact
  { I::exponents(bytes, out) };               // 16 E8M0 scales -> *out for raised(); false: some are beyond 2^-100 .. 2^100
  { I::raised(p, p) };                        // both halves, of E2M1 or E4M3 codes, times such scales
};
