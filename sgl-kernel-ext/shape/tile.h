// Many rows on matrix multipliers (AMX): weights are decoded to bf16 tiles in a scratch that the caches hold, a block
// of k ahead of the multiplications, and every tile is used for all rows. The sums of 32 rows and two panels stay in
// four tiles over a block. Another order of summation than product.h, so results agree with it within rounding only.
//
// Multiplying tiles leaves most of a core idle. So all else happens a little at a time between the products: decoding or
// fetching the weights that come next, and the epilogue of the rows before.
//
// Scales: what is exact in bf16 (powers of two, E4M3 times E2M1: F::kFold) is multiplied into the decoded weights.
// Other group scales are applied in float32 to the sums of a run of k that shares them.

using lk::kTileRows;
constexpr int kTileBytes = 1024, kPair = 2;  // a tile: 16 rows of 64 bytes; panels side by side
constexpr int kMostSteps = 64;               // steps of kUnit k that are decoded at a time: two panels are 128 KB
constexpr int kMostTileRows = 512;           // rows that share one decoding
constexpr size_t kActivationBytes = size_t(1) << 20;  // of the rows that are gathered, about half an L2
constexpr int kExpectRows = 2;               // ahead of the epilogue; long before, an L1 would have lost them again

template <class I> constexpr bool kTiles = TileIsa<I>;

struct TileScratch {
  static constexpr size_t kWeights = size_t(kPair) * kMostSteps * kTileBytes;  // one block
  static constexpr size_t kSums = size_t(kMostTileRows) * kPair * lk::kColumns * sizeof(float);  // of a pair of panels
  static constexpr size_t kRun = size_t(2 * kTileRows) * kPair * lk::kColumns * sizeof(float);
  static constexpr size_t kGroupSums = kActivationBytes / 2 / lk::kUnit * sizeof(float);  // groups x rows at most
  static constexpr size_t kBytes = kActivationBytes + 2 * kWeights + 2 * kSums + kRun + kGroupSums;
  uint8_t* base;

  uint8_t* weights(int which) const { return base + kActivationBytes + size_t(which) * kWeights; }
  float* sums(int which) const { return reinterpret_cast<float*>(base + kActivationBytes + 2 * kWeights + size_t(which) * kSums); }
  float* run() const { return sums(2); }
  float* group_sums() const { return run() + kRun / sizeof(float); }
};

// Rows that fit the gathered activations; fewer than two tiles' worth: the depth is beyond this shape.
inline int tile_rows_of(int depth) {
  const size_t fit = kActivationBytes / (size_t(depth) * 2);
  return int(fit < kMostTileRows ? fit : kMostTileRows) / (2 * kTileRows) * (2 * kTileRows);
}

// Some items spread evenly over some calls.
struct Pace {
  int items, calls;
  int due = 0, done = 0;  // due: items * calls so far, less calls * done

  template <class Item> void some(const Item& item) {
    if (done == items) return;
    for (due += items; due >= calls && done < items; due -= calls, ++done) item();
  }
  template <class Item> void rest(const Item& item) {
    for (; done < items; ++done) item();
  }
};

// Rows of one expert (at most kMostTileRows) times a range of panels.
template <class F, class I, class Epilogue> class TileProduct {
 public:
  TileProduct(const lk::Product& a, const Epilogue& done, int first, int rows)
      : a_(a), layout_(*a.layout), done_(done), scratch_{a.scratch}, first_(first), rows_(rows),
        end_((a.first + a.count) * Epilogue::kPanels), steps_(layout_.depth / lk::kUnit), row_pairs_((rows + 2 * kTileRows - 1) / (2 * kTileRows)),
        // Equal blocks, so that none is short.
        block_steps_((steps_ + blocks() - 1) / blocks()) {
    if (!a.in_tiles) gather();
    if (F::kZeros && layout_.zeros) sum_groups(layout_, a_.rows + first_, rows_, scratch_.group_sums());
  }

  // The blocks of all panel pairs are one sequence, so that decoding stays ahead over the end of a pair, too.
  void run() {
    Block next = first_block();
    prepare(next, 0, 1);
    ahead_.rest([&] { prepare_next(); });
    for (int count = 0; next.panel < end_; ++count) {
      const Block now = next;
      next = after(now);
      prepare(next, (count + 1) & 1, row_pairs_ * now.steps);
      if (now.step == 0 && now.steps < steps_) which_sums_ ^= 1;
      if (now.panels == kPair) multiply<kPair>(now, count & 1);
      else multiply<1>(now, count & 1);
    }
    finish_rest();
  }

 private:
  static constexpr bool kStoredAsUsed = F::kBlock == 2 && F::kTerms == 1;  // bf16 codes are tiles
  static constexpr int kStepBytes = kTileBytes * F::kTerms, kMostBlock = kMostSteps / F::kTerms;
  static constexpr int kStepCodes = lk::kUnit / F::kBlock * 64;
  static constexpr int kGroupK = F::kGroup > 0 ? F::kGroup : lk::kUnit, kFoldBytes = F::kFold ? 16 : 0;  // of a group's scales
  static constexpr size_t step_scales() { return size_t(lk::kUnit / kGroupK) * kFoldBytes; }
  struct Block { int panel, panels, step, steps; };

  bool last() const { return first_ + rows_ == a_.row_count; }
  int blocks() const { return kStoredAsUsed ? 1 : (steps_ + kMostBlock - 1) / kMostBlock; }
  Block at(int panel, int step) const {
    return {panel, end_ - panel == 1 ? 1 : kPair, step, steps_ - step < block_steps_ ? steps_ - step : block_steps_};
  }
  Block first_block() const { return at(a_.first * Epilogue::kPanels, 0); }
  // Behind the last panel it is the first block of what comes next, which has as many panels.
  Block after(const Block& b) const {
    if (b.step + b.steps < steps_) return at(b.panel, b.step + b.steps);
    Block next = at(b.panel + b.panels, 0);
    if (next.panel == end_) next.panels = first_block().panels;
    return next;
  }

  // Rows to tiles: kUnit k of 16 rows are one kilobyte, a row's steps follow each other. Tiles read in place would
  // touch a line in each of 32 distant rows per step, which neither the TLB nor the prefetchers like: 2-3 times slower.
  void gather() {
    for (int r = 0; r < rows_; ++r) {
      uint8_t* to = scratch_.base + size_t(r / kTileRows) * steps_ * kTileBytes + size_t(r % kTileRows) * 64;
      const uint8_t* from = reinterpret_cast<const uint8_t*>(a_.rows[first_ + r]);
      for (int s = 0; s < steps_; ++s) I::copy_line(to + size_t(s) * kTileBytes, from + size_t(s) * 64);
    }
  }
  const uint8_t* row_tile(int row) const {
    if (a_.in_tiles) return reinterpret_cast<const uint8_t*>(a_.rows[first_ + row]);
    return scratch_.base + size_t(row / kTileRows) * steps_ * kTileBytes;
  }

  // Decodes or fetches the weights of a block, tile by tile, over `calls` calls. Behind the last panel only codes that
  // are used as they are can be fetched.
  void prepare(const Block& b, int which, int calls) {
    const bool beyond = b.panel == end_;
    ahead_ = {beyond && !(kStoredAsUsed && last() && a_.next_codes) ? 0 : b.panels * b.steps, calls};
    const uint8_t* codes = beyond ? a_.next_codes : a_.panels.codes + size_t(b.panel) * layout_.codes;
    ahead_codes_ = codes + size_t(b.step) * kStepCodes;
    ahead_scales_ = a_.panels.scales + size_t(b.panel) * layout_.scales + size_t(b.step) * step_scales();
    ahead_tile_ = scratch_.weights(which);
    ahead_block_ = b;
    ahead_step_ = 0;
  }
  void prepare_next() {
    if constexpr (kStoredAsUsed) {
#pragma GCC unroll 16
      for (int line = 0; line < kTileBytes; line += 64) I::prefetch_far(ahead_codes_ + line);
    } else {
      decode();
    }
    ahead_codes_ += kStepCodes;
    ahead_scales_ += step_scales();
    ahead_tile_ += kStepBytes;
    if (++ahead_step_ < ahead_block_.steps) return;
    ahead_step_ = 0;
    ahead_codes_ += layout_.codes - size_t(ahead_block_.steps) * kStepCodes;
    ahead_scales_ += layout_.scales - size_t(ahead_block_.steps) * step_scales();
    ahead_tile_ += size_t(kMostBlock - ahead_block_.steps) * kStepBytes;
  }

  // One tile (f16: two, whose sum the weights are). Not inlined: between tiles its pointers and constants would be
  // spilled and loaded again.
  [[gnu::noinline]] void decode() {
    const uint8_t *codes = ahead_codes_, *scales = ahead_scales_;
    const uint8_t* const soon = codes_ahead(a_, codes, a_.panels.codes + size_t(end_) * layout_.codes);
#pragma GCC unroll 16
    for (int line = 0; line < kStepCodes; line += 64) I::prefetch(soon + line);
    uint8_t* to = ahead_tile_;
#pragma GCC unroll 4
    for (int g = 0; g < lk::kUnit / kGroupK; ++g) {
      if constexpr (F::kFold) {
        typename I::Pairs exponents;
        if (layout_.scale == lk::Scale::e8m0 && I::exponents(scales, exponents)) {
          decode_group(codes, to, [&](typename I::Pairs w) { return I::raised(w, exponents); });
        } else {
          const auto scale = decoder_.scale(layout_.scale, scales);
          decode_group(codes, to, [&](typename I::Pairs w) { return I::scaled(w, scale); });
        }
      } else {
        decode_group(codes, to, [](typename I::Pairs w) { return w; });
      }
      codes += kGroupK / F::kBlock * 64;
      scales += kFoldBytes;
      to += kGroupK / 2 * 64;
    }
  }
  template <class Fold> void decode_group(const uint8_t* codes, uint8_t* to, const Fold& fold) const {
    constexpr int kRows = F::kBlock / 2;
#pragma GCC unroll 16
    for (int block = 0; block < kGroupK / F::kBlock; ++block) {
      typename I::Pairs rows[kRows * F::kTerms];
      decoder_.rows(codes + block * 64, rows);
#pragma GCC unroll 4
      for (int j = 0; j < kRows * F::kTerms; ++j)
        I::store_pairs(to + j % F::kTerms * kTileBytes + (block * kRows + j / F::kTerms) * 64, fold(rows[j]));
    }
  }

  // The tiles of panel p of a block.
  const uint8_t* tiles(const Block& b, int which, int p) const {
    if constexpr (kStoredAsUsed) return a_.panels.codes + size_t(b.panel + p) * layout_.codes;
    return scratch_.weights(which) + size_t(p * kMostBlock) * kStepBytes;
  }
  // Where the sums of a pair of row tiles go: in one block nobody asks for them after the epilogue, so two pairs take
  // turns in a place that an L1 keeps.
  float* next_sums(int row) {
    constexpr size_t kRow = kPair * lk::kColumns;
    if (block_steps_ < steps_) return scratch_.sums(which_sums_) + size_t(row) * kRow;
    which_sums_ ^= 1;
    return scratch_.sums(0) + size_t(which_sums_) * 2 * kTileRows * kRow;
  }
  static constexpr ptrdiff_t kSumStride = kPair * lk::kColumns * sizeof(float);

  // Scales that are not folded, where the layout has them.
  static constexpr bool kMayScale = F::kGroup == kOpen && F::kTerms == 1;
  bool scaled() const { return kMayScale && layout_.scale != lk::Scale::none; }

  template <int P> void multiply(const Block& b, int which) {
    for (int row = 0; row < rows_; row += 2 * kTileRows) {
      if (rows_ - row > kTileRows) multiply_rows<P, 2>(b, which, row);
      else multiply_rows<P, 1>(b, which, row);
    }
  }

  template <int P, int M> void multiply_rows(const Block& b, int which, int row) {
    const bool whole = b.step + b.steps == steps_;
    const uint8_t *weights[P], *x[M];
    for (int p = 0; p < P; ++p) weights[p] = tiles(b, which, p);
    for (int m = 0; m < M; ++m) x[m] = row_tile(row + m * kTileRows);
    float* const sums = next_sums(row);
    if (kMayScale && scaled()) {
      if constexpr (kMayScale) multiply_runs<P, M>(b, weights, x, row, sums);
    } else {
      if (b.step == 0) clear<P, M>();
      else load_sums<P, M>(sums);
      for (int s = 0; s < b.steps; ++s) step<P, M>(weights, s, x, b.step + s);
      store_sums<P, M>(sums);
    }
    finish_rest();
    if (whole) finish_later(b, row, sums);
  }

  // Runs of k under one scale: summed in tiles, then added in float32.
  template <int P, int M> void multiply_runs(const Block& b, const uint8_t* const (&weights)[P], const uint8_t* const (&x)[M], int row, float* sums) {
    const int per_group = layout_.group / lk::kUnit, end = b.step + b.steps;
    const int some = rows_ - row < M * kTileRows ? rows_ - row : M * kTileRows;
    if (b.step == 0) __builtin_memset(sums, 0, size_t(some) * kSumStride);
    for (int s = b.step; s < end;) {
      const int group = s / per_group, until = (group + 1) * per_group < end ? (group + 1) * per_group : end;
      const bool opens = s == group * per_group;
      clear<P, M>();
      for (; s < until; ++s) step<P, M>(weights, s - b.step, x, s);
      store_sums<P, M>(scratch_.run());
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) add_run(b.panel + p, p, group, row, some, opens, sums + p * lk::kColumns);
    }
  }

  void add_run(int panel, int p, int group, int row, int some, bool opens, float* to) {
    const auto scale = decoder_.scale(layout_.scale, a_.panels.scales + size_t(panel) * layout_.scales +
                                                         size_t(group) * size_t(lk::kScaleBytes[int(layout_.scale)]));
    const float* from = scratch_.run() + p * lk::kColumns;
    if (F::kZeros && layout_.zeros && opens) {
      const uint8_t* zeros = a_.panels.zeros + size_t(panel) * layout_.zeros + size_t(group) * lk::kColumns;
      const auto offset = I::mul(I::signed_bytes(zeros), scale);
      const float* group_sums = scratch_.group_sums() + size_t(group) * size_t(rows_) + row;
      for (int r = 0; r < some; ++r, from += kPair * lk::kColumns, to += kPair * lk::kColumns)
        I::store(to, I::fma(offset, I::set1(group_sums[r]), I::fma(I::load(from), scale, I::load(to))));
    } else {
      for (int r = 0; r < some; ++r, from += kPair * lk::kColumns, to += kPair * lk::kColumns)
        I::store(to, I::fma(I::load(from), scale, I::load(to)));
    }
  }

  // Sums are tiles 0-3 (row tile m, panel p: 2m + p), activations 4 and 5, weights 6 and 7.
  template <int P, int M> static void clear() {
    I::template tile_zero<0>();
    if constexpr (P == 2) I::template tile_zero<1>();
    if constexpr (M == 2) I::template tile_zero<2>();
    if constexpr (P == 2 && M == 2) I::template tile_zero<3>();
  }
  template <int P, int M> static void load_sums(const float* from) {
    I::template tile_load<0>(from, kSumStride);
    if constexpr (P == 2) I::template tile_load<1>(from + lk::kColumns, kSumStride);
    if constexpr (M == 2) I::template tile_load<2>(from + kTileRows * kPair * lk::kColumns, kSumStride);
    if constexpr (P == 2 && M == 2) I::template tile_load<3>(from + (kTileRows * kPair + 1) * lk::kColumns, kSumStride);
  }
  template <int P, int M> static void store_sums(float* to) {
    I::template tile_store<0>(to, kSumStride);
    if constexpr (P == 2) I::template tile_store<1>(to + lk::kColumns, kSumStride);
    if constexpr (M == 2) I::template tile_store<2>(to + kTileRows * kPair * lk::kColumns, kSumStride);
    if constexpr (P == 2 && M == 2) I::template tile_store<3>(to + (kTileRows * kPair + 1) * lk::kColumns, kSumStride);
  }
  // kUnit k of M row tiles and P panels: `at` in the block, `s` in the depth. All other work is between the products, in
  // two places, so that neither is long enough to let the multiplier run dry.
  template <int P, int M> void step(const uint8_t* const (&weights)[P], int at, const uint8_t* const (&x)[M], int s) {
#pragma GCC unroll 2
    for (int term = 0; term < F::kTerms; ++term) {
      const size_t offset = size_t(at) * kStepBytes + size_t(term) * kTileBytes;
      const bool opens = term == 0, ends = term == F::kTerms - 1;
      if (opens) I::template tile_load_once<4>(x[0] + size_t(s) * kTileBytes, 64);
      I::template tile_load<6>(weights[0] + offset, 64);
      if constexpr (P == 2) I::template tile_load<7>(weights[P - 1] + offset, 64);
      I::template tile_dot<0, 4, 6>();
      if (opens) fetch_near(x[0], s);
      if constexpr (P == 2) I::template tile_dot<1, 4, 7>();
      if (opens) ahead_.some([&] { prepare_next(); });
      if constexpr (M == 2) {
        if (opens) I::template tile_load_once<5>(x[M - 1] + size_t(s) * kTileBytes, 64);
        I::template tile_dot<2, 5, 6>();
        if (opens) fetch_near(x[M - 1], s);
        if constexpr (P == 2) I::template tile_dot<3, 5, 7>();
      }
      if (ends) behind_.some([&] { finish_next(); });
    }
  }
  // A row tile of a later step, from an L2 to an L1. Behind the last step it is another row's.
  static void fetch_near(const uint8_t* x, int s) {
    if constexpr (I::kNearSteps) {
      const uint8_t* tile = x + size_t(s + I::kNearSteps) * kTileBytes;
#pragma GCC unroll 16
      for (int line = 0; line < kTileBytes; line += 64) I::prefetch(tile + line);
    }
  }

  // All k of some rows are summed: split rows become one, and every tile goes to the epilogue.
  void finish_later(const Block& b, int row, const float* sums) {
    const int some = rows_ - row < 2 * kTileRows ? rows_ - row : 2 * kTileRows;
    behind_ = {some / a_.split, b.steps};
    behind_panel_ = b.panel;
    behind_panels_ = b.panels;
    behind_row_ = (first_ + row) / a_.split;
    behind_sums_ = sums;
    for (int i = 0; i < kExpectRows && i < behind_.items; ++i) expect(behind_row_ + i);
  }
  void expect(int row) const {
    for (int p = 0; p < behind_panels_; p += Epilogue::kPanels) done_.expect((behind_panel_ + p) / Epilogue::kPanels, row);
  }
  void finish_next() {
    if (behind_.done + kExpectRows < behind_.items) expect(behind_row_ + kExpectRows);
    if (Epilogue::kPanels == kPair || behind_panels_ == kPair) finish<kPair>();
    else finish<Epilogue::kPanels>();
    ++behind_row_;
    behind_sums_ += size_t(a_.split) * kPair * lk::kColumns;
  }
  template <int P> [[gnu::flatten, gnu::noinline]] void finish() {
    typename I::F32 all[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      all[p] = I::load(behind_sums_ + p * lk::kColumns);
      if (a_.split == 2) all[p] = I::add(all[p], I::load(behind_sums_ + (kPair + p) * lk::kColumns));
    }
#pragma GCC unroll 2
    for (int p = 0; p < P; p += Epilogue::kPanels) done_((behind_panel_ + p) / Epilogue::kPanels, behind_row_, &all[p]);
  }
  void finish_rest() {
    behind_.rest([&] { finish_next(); });
  }

  const lk::Product& a_;
  const lk::PanelLayout& layout_;
  const Epilogue& done_;
  const TileScratch scratch_;
  const int first_, rows_, end_, steps_, row_pairs_, block_steps_;
  const typename F::template Decoder<I> decoder_{};
  Pace ahead_{0, 1}, behind_{0, 1};
  Block ahead_block_{};
  const uint8_t *ahead_codes_ = nullptr, *ahead_scales_ = nullptr;
  uint8_t* ahead_tile_ = nullptr;
  const float* behind_sums_ = nullptr;
  int ahead_step_ = 0, behind_row_ = 0, behind_panel_ = 0, behind_panels_ = 0, which_sums_ = 0;
};

// Whether tiles take a product: not with few rows, nor with rows too long for the scratch.
template <class F, class I> bool takes_tiles(const lk::Product& a) {
  constexpr int kFew = F::kBlock == 2 && F::kTerms == 1 ? I::kFewBf16Rows : I::kFewRows;
  return (a.row_count > kFew || a.tiles_only) && tile_rows_of(a.layout->depth);
}

template <class F, class I, class Epilogue> void tile_product(const lk::Product& a, const Epilogue& done) {
  const int at_once = tile_rows_of(a.layout->depth);
  I::tile_begin(a.row_count < kTileRows ? a.row_count : kTileRows);
  for (int first = 0; first < a.row_count; first += at_once)
    TileProduct<F, I, Epilogue>(a, done, first, a.row_count - first < at_once ? a.row_count - first : at_once).run();
  I::tile_end();
}
