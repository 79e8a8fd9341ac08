// Many rows on matrix multipliers (AMX): weights are decoded to bf16 tiles in a scratch that the caches hold, a block
// of k ahead of the multiplications, and every tile is used for all rows. The sums of 32 rows and two panels stay in
// four tiles over a block. Another order of summation than product.h, so results agree with it within rounding only.
//
// Scales: what is exact in bf16 (powers of two, E4M3 times E2M1: F::kFold) is multiplied into the decoded weights.
// Other group scales are applied in float32 to the sums of a run of k that shares them.

constexpr int kTileRows = 16, kTileBytes = 1024, kPair = 2;  // a tile: 16 rows of 64 bytes; panels side by side
constexpr int kMostSteps = 16;                               // steps of kUnit k in a block: two panels are 32 KB, an L1
constexpr int kMostTileRows = 512;                           // rows that share one decoding
constexpr size_t kActivationBytes = size_t(1) << 20;         // of the rows that are gathered, about half an L2
constexpr int kFewRows = 8;                                  // up to here product.h is as fast or faster

template <class I> constexpr bool kTiles = TileIsa<I>;

struct TileScratch {
  static constexpr size_t kWeights = size_t(kPair) * kMostSteps * 2 * kTileBytes;  // one block; f16 has two terms
  static constexpr size_t kSums = size_t(kMostTileRows) * kPair * lk::kColumns * sizeof(float);
  static constexpr size_t kRun = size_t(2 * kTileRows) * kPair * lk::kColumns * sizeof(float);
  static constexpr size_t kGroupSums = kActivationBytes / 2 / lk::kUnit * sizeof(float);  // groups x rows at most
  static constexpr size_t kBytes = kActivationBytes + 2 * kWeights + kSums + kRun + kGroupSums;
  uint8_t* base;

  uint8_t* weights(int which) const { return base + kActivationBytes + size_t(which) * kWeights; }
  float* sums() const { return reinterpret_cast<float*>(base + kActivationBytes + 2 * kWeights); }
  float* run() const { return reinterpret_cast<float*>(base + kActivationBytes + 2 * kWeights + kSums); }
  float* group_sums() const { return reinterpret_cast<float*>(base + kActivationBytes + 2 * kWeights + kSums + kRun); }
};

// Rows that fit the gathered activations; fewer than two tiles' worth: the depth is beyond this shape.
inline int tile_rows_of(int depth) {
  const size_t fit = kActivationBytes / (size_t(depth) * 2);
  return int(fit < kMostTileRows ? fit : kMostTileRows) / (2 * kTileRows) * (2 * kTileRows);
}

// Rows of one expert (at most kMostTileRows) times a range of panels.
template <class F, class I, class Epilogue> class TileProduct {
 public:
  TileProduct(const lk::Product& a, const Epilogue& done, int first, int rows)
      : a_(a), layout_(*a.layout), done_(done), scratch_{a.scratch}, first_(first), rows_(rows),
        end_((a.first + a.count) * Epilogue::kPanels), steps_(layout_.depth / lk::kUnit),
        // Equal blocks, so that none is short.
        block_steps_((steps_ + blocks() - 1) / blocks()) {
    gather();
    if (F::kZeros && layout_.zeros) sum_groups();
  }

  // The blocks of all panel pairs are one sequence, so that decoding stays ahead over the end of a pair, too.
  void run() {
    Block next = first_block();
    for (int i = 0; i < next.panels * next.steps; ++i) prepare(next, 0, i);
    for (int count = 0; next.panel < end_; ++count) {
      const Block now = next;
      next = after(now);
      Ahead ahead{*this, next, (count + 1) & 1, next.panel < end_ ? next.panels * next.steps : 0,
                  (rows_ + 2 * kTileRows - 1) / (2 * kTileRows) * now.steps};
      if (now.panels == kPair) multiply<kPair>(now, count & 1, ahead);
      else multiply<1>(now, count & 1, ahead);
      if (now.step + now.steps == steps_) finish(now);
    }
  }

 private:
  static constexpr bool kStoredAsUsed = F::kBlock == 2 && F::kTerms == 1;  // bf16 codes are tiles
  static constexpr int kStepBytes = kTileBytes * F::kTerms;
  struct Block { int panel, panels, step, steps; };

  // Spreads the decoding or fetching of the next block over the multiplications of this one.
  struct Ahead {
    TileProduct& product;
    Block block;
    int which, tiles, calls;
    int due = 0, done = 0;  // due: tiles * calls so far, less calls * done
    void some() {
      for (due += tiles; due >= calls; due -= calls) product.prepare(block, which, done++);
    }
  };

  int blocks() const { return (steps_ + kMostSteps - 1) / kMostSteps; }
  Block at(int panel, int step) const {
    return {panel, end_ - panel < kPair ? 1 : kPair, step, steps_ - step < block_steps_ ? steps_ - step : block_steps_};
  }
  Block first_block() const { return at(a_.first * Epilogue::kPanels, 0); }
  Block after(const Block& b) const { return b.step + b.steps < steps_ ? at(b.panel, b.step + b.steps) : at(b.panel + b.panels, 0); }

  // Rows to tiles: kUnit k of 16 rows are one kilobyte, a row's steps follow each other. Tiles read in place would
  // touch a line in each of 32 distant rows per step, which neither the TLB nor the prefetchers like: 2-3 times slower.
  void gather() {
    for (int r = 0; r < rows_; ++r) {
      uint8_t* to = scratch_.base + size_t(r / kTileRows) * steps_ * kTileBytes + size_t(r % kTileRows) * 64;
      const uint8_t* from = reinterpret_cast<const uint8_t*>(a_.rows[first_ + r]);
      for (int s = 0; s < steps_; ++s) I::copy_line(to + size_t(s) * kTileBytes, from + size_t(s) * 64);
    }
  }

  // The sum of every group of a row, for the zero points.
  void sum_groups() {
    for (int r = 0; r < rows_; ++r) {
      const float* parts = reinterpret_cast<const float*>(a_.rows[first_ + r] + layout_.depth);
      for (int begin = 0, g = 0; begin < layout_.depth; begin += layout_.group, ++g) {
        const int end = begin + layout_.group < layout_.depth ? begin + layout_.group : layout_.depth;
        float sum = 0.0f;
        for (int i = begin / lk::kSumOf; i < end / lk::kSumOf; ++i) sum += parts[i];
        scratch_.group_sums()[size_t(g) * size_t(rows_) + size_t(r)] = sum;
      }
    }
  }

  // Tile `index` of a block: panel by panel, step by step.
  void prepare(const Block& b, int which, int index) {
    if constexpr (kStoredAsUsed) {
      const uint8_t* tile = tiles(b, which, index / b.steps) + size_t(index % b.steps) * kTileBytes;
      for (int line = 0; line < kTileBytes; line += 64) I::prefetch_far(tile + line);
    } else {
      decode(b, which, index);
    }
  }
  void decode(const Block& b, int which, int index) {
    const int p = index / b.steps, step = b.step + index % b.steps, panel = b.panel + p;
    const uint8_t* codes = a_.panels.codes + size_t(panel) * layout_.codes + size_t(step) * (lk::kUnit / F::kBlock * 64);
    const uint8_t* scales = a_.panels.scales + size_t(panel) * layout_.scales;
    uint8_t* out = scratch_.weights(which) + size_t(p * kMostSteps + index % b.steps) * kStepBytes;
    constexpr int kRowsOut = F::kBlock / 2 * F::kTerms, kGroupK = F::kGroup > 0 ? F::kGroup : lk::kUnit;
#pragma GCC unroll 4
    for (int g = 0; g < lk::kUnit / kGroupK; ++g) {
      typename I::F32 scale;
      if constexpr (F::kFold) scale = decoder_.scale(layout_.scale, scales + (step * (lk::kUnit / kGroupK) + g) * lk::kScaleBytes[int(layout_.scale)]);
#pragma GCC unroll 16
      for (int block = g * kGroupK / F::kBlock; block < (g + 1) * kGroupK / F::kBlock; ++block) {
        typename I::Pairs rows[kRowsOut];
        I::prefetch(codes_ahead(a_, codes + block * 64, a_.panels.codes + size_t(end_) * layout_.codes));
        decoder_.rows(codes + block * 64, rows);
#pragma GCC unroll 4
        for (int j = 0; j < kRowsOut; ++j) {
          const int row = block * (F::kBlock / 2) + j / F::kTerms, term = j % F::kTerms;
          if constexpr (F::kFold) rows[j] = I::scaled(rows[j], scale);
          I::store_pairs(out + term * kTileBytes + row * 64, rows[j]);
        }
      }
    }
  }

  // The tiles of panel p of a block.
  const uint8_t* tiles(const Block& b, int which, int p) const {
    if constexpr (kStoredAsUsed) return a_.panels.codes + size_t(b.panel + p) * layout_.codes + size_t(b.step) * kTileBytes;
    return scratch_.weights(which) + size_t(p * kMostSteps) * kStepBytes;
  }
  float* sums(int row, int p) const { return scratch_.sums() + (size_t(row) * kPair + size_t(p)) * lk::kColumns; }
  static constexpr ptrdiff_t kSumStride = kPair * lk::kColumns * sizeof(float);

  // Scales that are not folded, where the layout has them.
  static constexpr bool kMayScale = F::kGroup == kOpen && F::kTerms == 1;
  bool scaled() const { return kMayScale && layout_.scale != lk::Scale::none; }

  template <int P> void multiply(const Block& b, int which, Ahead& ahead) {
    if (scaled() && b.step == 0) __builtin_memset(scratch_.sums(), 0, size_t(rows_) * kSumStride);
    const bool last = b.step + b.steps == steps_;
    for (int row = 0; row < rows_; row += 2 * kTileRows) {
      if (last) expect(b, row);
      if (rows_ - row > kTileRows) multiply_rows<P, 2>(b, which, row, ahead);
      else multiply_rows<P, 1>(b, which, row, ahead);
    }
  }

  template <int P, int M> void multiply_rows(const Block& b, int which, int row, Ahead& ahead) {
    const uint8_t* weights[P];
    for (int p = 0; p < P; ++p) weights[p] = tiles(b, which, p);
    if constexpr (kMayScale) {
      if (scaled()) return multiply_runs<P, M>(b, weights, row, ahead);
    }
    if (b.step == 0) clear<P, M>();
    else load_sums<P, M>(sums(row, 0));
    for (int s = 0; s < b.steps; ++s) {
      step<P, M>(weights, s, row, b.step + s);
      ahead.some();
    }
    store_sums<P, M>(sums(row, 0));
  }

  // Runs of k under one scale: summed in tiles, then added in float32.
  template <int P, int M> void multiply_runs(const Block& b, const uint8_t* const (&weights)[P], int row, Ahead& ahead) {
    const int per_group = layout_.group / lk::kUnit, end = b.step + b.steps;
    for (int s = b.step; s < end;) {
      const int group = s / per_group, until = (group + 1) * per_group < end ? (group + 1) * per_group : end;
      const bool opens = s == group * per_group;
      clear<P, M>();
      for (; s < until; ++s) {
        step<P, M>(weights, s - b.step, row, s);
        ahead.some();
      }
      store_sums<P, M>(scratch_.run());
      const int some = rows_ - row < M * kTileRows ? rows_ - row : M * kTileRows;
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) add_run(b.panel + p, p, group, row, some, opens);
    }
  }

  void add_run(int panel, int p, int group, int row, int some, bool opens) {
    const auto scale = decoder_.scale(layout_.scale, a_.panels.scales + size_t(panel) * layout_.scales +
                                                         size_t(group) * size_t(lk::kScaleBytes[int(layout_.scale)]));
    const float* from = scratch_.run() + p * lk::kColumns;
    float* to = sums(row, p);
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
  // kUnit k of M row tiles and P panels: `at` in the block, `s` in the depth. Loads first, then products: loads do
  // not overlap with products that wait for the same tiles.
  template <int P, int M> void step(const uint8_t* const (&weights)[P], int at, int row, int s) {
    const size_t below = size_t(steps_) * kTileBytes;  // from a row tile to the next
    const uint8_t* x = scratch_.base + size_t(row / kTileRows) * below + size_t(s) * kTileBytes;
#pragma GCC unroll 2
    for (int term = 0; term < F::kTerms; ++term) {
      const size_t offset = size_t(at) * kStepBytes + size_t(term) * kTileBytes;
      if (term == 0) {
        I::template tile_load<4>(x, 64);
        if constexpr (M == 2) I::template tile_load<5>(x + below, 64);
      }
      I::template tile_load<6>(weights[0] + offset, 64);
      if constexpr (P == 2) I::template tile_load<7>(weights[P - 1] + offset, 64);
      I::template tile_dot<0, 4, 6>();
      if constexpr (P == 2) I::template tile_dot<1, 4, 7>();
      if constexpr (M == 2) I::template tile_dot<2, 5, 6>();
      if constexpr (P == 2 && M == 2) I::template tile_dot<3, 5, 7>();
    }
  }

  // What finish() will write for the rows of two tiles.
  void expect(const Block& b, int row) const {
    const int end = rows_ - row < 2 * kTileRows ? rows_ : row + 2 * kTileRows;
    for (int r = row; r < end; r += a_.split)
      for (int p = 0; p < b.panels; p += Epilogue::kPanels) done_.expect((b.panel + p) / Epilogue::kPanels, (first_ + r) / a_.split);
  }

  // All k are summed: split rows become one, and every tile goes to the epilogue.
  void finish(const Block& b) {
    for (int r = 0; r < rows_; r += a_.split) {
      typename I::F32 all[kPair];
      for (int p = 0; p < b.panels; ++p) {
        all[p] = I::load(sums(r, p));
        if (a_.split == 2) all[p] = I::add(all[p], I::load(sums(r + 1, p)));
      }
      for (int p = 0; p < b.panels; p += Epilogue::kPanels) done_((b.panel + p) / Epilogue::kPanels, (first_ + r) / a_.split, &all[p]);
    }
  }

  const lk::Product& a_;
  const lk::PanelLayout& layout_;
  const Epilogue& done_;
  const TileScratch scratch_;
  const int first_, rows_, end_, steps_, block_steps_;
  const typename F::template Decoder<I> decoder_{};
};

// Whether tiles took the product; false: too few rows, or rows too long for the scratch.
template <class F, class I, class Epilogue> bool tile_product(const lk::Product& a, const Epilogue& done) {
  const int at_once = tile_rows_of(a.layout->depth);
  if ((a.row_count <= kFewRows && !a.tiles_only) || at_once == 0) return false;
  I::tile_begin(a.row_count < kTileRows ? a.row_count : kTileRows);
  for (int first = 0; first < a.row_count; first += at_once)
    TileProduct<F, I, Epilogue>(a, done, first, a.row_count - first < at_once ? a.row_count - first : at_once).run();
  I::tile_end();
  return true;
}
