// Rows times panels, from one row to thousands: weights are decoded in registers and multiplied with up to I::kRows
// rows at once. One row is memory's speed. Where decoding is slow and more blocks of rows follow, the panels are decoded
// once, to a scratch that an L2 holds, and the blocks read it; where splitting pairs of activations costs as much as
// multiplying them, that is done once for some panels, too. A column's sum over k has one order for any number of
// rows, so results do not depend on the batch.
//
// Panels are the outer loop: all rows pass over a panel while the caches hold it.

// What blocks() decodes once for many rows: F's codes as rows of pairs, and F's scales.
template <class F> struct Decoded {
  static constexpr int kBlock = 2, kGroup = F::kGroup, kTerms = 1;
  static constexpr bool kZeros = F::kZeros, kFold = F::kFold;
  template <class I> struct Decoder : F::template Decoder<I> {
    void rows(const uint8_t* block, typename I::Pairs* out) const { *out = I::load_pairs(block); }
  };
};
// A format that may have zero points, in a matrix without: what adds them costs registers also where it is not run.
template <class F> struct Plain : F {
  static constexpr bool kZeros = false;
};
template <class F> constexpr bool kIsDecoded = false;
template <class F> constexpr bool kIsDecoded<Decoded<F>> = true;

// Whether two blocks of rows and more are worth it: not where an instruction set decodes about as fast as it loads, nor
// for f16, which would become twice its bytes.
template <class F, class I> constexpr bool kDecodesOnce = F::kBlock > 2 && F::kTerms == 1 && 32 / F::kBlock >= I::kSlowBits;
constexpr size_t kDecodedBytes = size_t(1) << 20;  // scratch for panels side by side; deeper ones are decoded in registers
constexpr size_t decoded_bytes(int depth) { return size_t(depth) * lk::kColumns * 2; }

template <class F, class I>
void decode(const uint8_t* codes, size_t bytes, const typename F::template Decoder<I>& decoder, uint8_t* out) {
  constexpr int kPairs = F::kBlock / 2;
  for (const uint8_t* const end = codes + bytes; codes < end; codes += 64, out += kPairs * 64) {
    typename I::Pairs w[kPairs];
    I::prefetch(codes + kAhead);
    decoder.rows(codes, w);
#pragma GCC unroll 4
    for (int j = 0; j < kPairs; ++j) I::store_pairs(out + j * 64, w[j]);
  }
}

// Whether so many rows wait for memory.
template <class F> constexpr bool streams(int rows) { return rows <= 2 && !kIsDecoded<F>; }

// Panels side by side for so many rows. One or two rows wait for memory, and memory likes one stream: one panel after
// the other reads 20-80 % faster than four at once. More rows multiply: then there are enough independent sums to
// hide the latency of dot2, and few enough to stay in registers (grouped formats keep two sets, the group's sum
// and the total).
template <class F, class I> constexpr int panels_for(int rows) {
  if (streams<F>(rows)) return 1;
  const int panels = I::kSums / (F::kGroup != 0 ? 2 : 1) / rows;
  return panels >= 4 ? 4 : panels >= 2 ? 2 : 1;
}

// Whether blocks of R rows have their activations as floats: kUnit k of every row in turn, the low halves of the pairs in
// front of the high ones.
template <class I, int R> constexpr bool kSpread = I::kSpreads && R > I::kRows / 2;
constexpr size_t kSpreadBytes = size_t(1) << 20;  // scratch behind the decoded panels
constexpr int kMostSpreadDepth = int(kSpreadBytes / sizeof(float)) / 8;  // of eight rows; deeper ones go by half as many
template <class I, int R> void spread_rows(const uint16_t* const* rows, int depth, float* to) {
  for (int k = 0; k < depth; k += lk::kUnit)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, to += lk::kUnit) I::spread(rows[r] + k, to);
}

// One step of kStepOf k: blocks are decoded and multiplied with every row, the pairs in turn for each of kChains sums.
// `ahead`: what to fetch while one or two rows wait for memory.
template <class F, class I, int P, int R>
inline void dot_step(const uint8_t* const (&codes)[P], const uint8_t* ahead, const uint16_t* const* rows, const float* spread, int at,
                     const typename F::template Decoder<I>& decoder, typename I::F32 (&acc)[kChains<I>][R][P]) {
  constexpr int kPairs = F::kBlock / 2 * F::kTerms;
#pragma GCC unroll 16
  for (int b = 0; b < kStepOf<F> / F::kBlock; ++b) {
    typename I::Pairs w[P][kPairs];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      I::prefetch((streams<F>(R) ? ahead : codes[p] + kAhead) + b * 64);
      decoder.rows(codes[p] + b * 64, w[p]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kPairs; ++j)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const int k = b * F::kBlock + 2 * (j / F::kTerms);
        typename I::Pair pair;
        if constexpr (kSpread<I, R>) pair = I::spread_pair(spread + r * lk::kUnit + k / 2);
        else pair = I::broadcast(rows[r] + at + k);
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
          typename I::F32& sum = acc[(b * kPairs + j) % kChains<I>][r][p];
          sum = I::dot2(sum, pair, w[p][j]);
        }
      }
  }
}

// The sum of a row's activations over the group from `begin` to `end`.
inline float sum_of(const lk::PanelLayout& layout, const uint16_t* row, int begin, int end) {
  const float* parts = reinterpret_cast<const float*>(row + layout.depth);
  float sum = 0.0f;
  for (int i = begin / lk::kSumOf; i < end / lk::kSumOf; ++i) sum += parts[i];
  return sum;
}

// Of `count` rows the sums over every group, those of one group side by side.
inline void sum_groups(const lk::PanelLayout& layout, const uint16_t* const* rows, int count, float* to) {
  for (int begin = 0; begin < layout.depth; begin += layout.group)
    for (int r = 0; r < count; ++r)
      *to++ = sum_of(layout, rows[r], begin, begin + layout.group < layout.depth ? begin + layout.group : layout.depth);
}

// Where there are zero points and blocks of three rows and more, the sums are made once for all panels if the scratch
// holds them; otherwise anew for every panel.
constexpr size_t kSumBytes = size_t(256) << 10;  // scratch behind what is spread
template <class F, int R> bool sums_once(const lk::Product& a) {
  const lk::PanelLayout& layout = *a.layout;
  return F::kZeros && R > 2 && size_t(a.row_count) * size_t((layout.depth + layout.group - 1) / layout.group) * sizeof(float) <= kSumBytes;
}
template <class I> float* sums_at(const lk::Product& a) {
  return reinterpret_cast<float*>(a.scratch + kDecodedBytes + (I::kSpreads ? kSpreadBytes : 0));
}

// What the zero points of the group from `begin` to `end` add: (8 - z) * scale times the sum of the activations, which may be
// known.
template <class I, int P, int R>
inline void add_zero_points(const lk::PanelLayout& layout, const uint8_t* const (&zeros)[P], const typename I::F32 (&scale)[P],
                            const uint16_t* const* rows, const float* known, int begin, int end, typename I::F32 (&sums)[R][P]) {
  typename I::F32 each[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) each[p] = I::mul(I::signed_bytes(zeros[p]), scale[p]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const auto sum = I::set1(known ? known[r] : sum_of(layout, rows[r], begin, end));
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) sums[r][p] = I::fma(each[p], sum, sums[r][p]);
  }
}

// Where to fetch from while `codes` are multiplied: kAhead further on. Panels of the product end at `end`; behind it
// begins what the worker reads next, far away, or what is not its own to read.
inline const uint8_t* codes_ahead(const lk::Product& a, const uint8_t* codes, const uint8_t* end) {
  if (codes + kAhead < end) return codes + kAhead;
  return a.next_codes ? a.next_codes + (codes + kAhead - end) : codes;
}

// While several blocks of rows pass over some panels, the panels after them are fetched, a part during each pass: memory
// would rest while all but the first block multiply, and the first wait for it. Only bf16 has so many bytes for so
// few multiplications that it waits at all.
template <class F> constexpr bool kFetchAhead = F::kBlock == 2 && F::kTerms == 1;
struct Ahead {
  const uint8_t* at;
  int bytes;    // of the codes of one step
  int every;    // passes over the panels, so one step of several fetches
  int due = 1;

  template <class I> void step() {
    if (--due) return;
    due = every;
    for (int i = 0; i < bytes; i += 64) I::prefetch_far(at + i);
    at += bytes;
  }
};

template <class I, int P, int R> inline void clear(typename I::F32 (&sums)[kChains<I>][R][P]) {
#pragma GCC unroll 4
  for (int c = 0; c < kChains<I>; ++c)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sums[c][r][p] = I::zero();
}
template <class I, int P, int R> inline typename I::F32 together(const typename I::F32 (&sums)[kChains<I>][R][P], int r, int p) {
  static_assert(kChains<I> == 1 || (kChains<I> == 2 && !kLane<I>));
  if constexpr (kChains<I> == 1) return sums[0][r][p];
  else return I::add(sums[0][r][p], sums[1][r][p]);
}

// Formats with scales sum every step on its own and add it, scaled, to the total: a long group would be one chain of
// dependent dot2, and their latency would be what one row waits for. `end`: the panel behind the product's last.
template <class F, class I, int P, int R>
[[gnu::always_inline]] inline void dot_panels(const lk::Product& a, int panel, int end, const uint16_t* const* rows, const float* spread, const float* known,
                       Ahead* ahead, const typename F::template Decoder<I>& decoder, typename I::F32 (&sums)[R][P]) {
  using F32 = typename I::F32;
  constexpr bool kScaled = F::kGroup != 0;
  const lk::PanelLayout& layout = *a.layout;
  const int group = F::kGroup > 0 ? F::kGroup : layout.group, scale_bytes = lk::kScaleBytes[int(layout.scale)];
  const uint8_t *codes[P], *scales[P], *zeros[P];
  const uint8_t* const end_of_codes = a.panels.codes + size_t(end) * layout.codes;
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
    codes[p] = a.panels.codes + size_t(panel + p) * layout.codes;
    scales[p] = a.panels.scales + size_t(panel + p) * layout.scales;
    zeros[p] = a.panels.zeros + size_t(panel + p) * layout.zeros;
  }
  // The same group of the panel that comes next.
  size_t to_scales = layout.scales;
  if (streams<F>(R) && panel + 1 == end) to_scales = a.next_scales ? size_t(a.next_scales - scales[0]) : 0;
  F32 parts[kChains<I>][R][P];  // of one step where there are scales, else of the whole depth
  if constexpr (kScaled) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sums[r][p] = I::zero();
  } else {
    clear<I, P, R>(parts);
  }

  for (int begin = 0; begin < layout.depth; begin += group) {
    F32 scale[P];
    if constexpr (kScaled) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        I::prefetch(scales[p] + (streams<F>(R) ? to_scales : layout.scales));
        scale[p] = decoder.scale(layout.scale, scales[p]);
        scales[p] += scale_bytes;
      }
    }
    const int end_of_group = F::kGroup > 0 || begin + group < layout.depth ? begin + group : layout.depth;
    int k = begin;
    do {
      if constexpr (kScaled) clear<I, P, R>(parts);
      if (kFetchAhead<F> && !streams<F>(R) && ahead) ahead->step<I>();
      const float* const spread_step = kSpread<I, R> ? spread + k / lk::kUnit * lk::kUnit * R + k % lk::kUnit / 2 : nullptr;
      dot_step<F, I, P, R>(codes, streams<F>(R) ? codes_ahead(a, codes[0], end_of_codes) : nullptr, rows, spread_step, k, decoder, parts);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        codes[p] += kStepOf<F> / F::kBlock * 64;
        if constexpr (kScaled) {
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sums[r][p] = I::fma(together<I, P, R>(parts, r, p), scale[p], sums[r][p]);
        }
      }
      k += kStepOf<F>;
    } while (F::kGroup != kStepOf<F> && k < end_of_group);
    if constexpr (F::kZeros) {
      add_zero_points<I, P, R>(layout, zeros, scale, rows, known, begin, end_of_group, sums);
      if (known) known += a.row_count;
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) zeros[p] += lk::kColumns;
    }
  }
  if constexpr (!kScaled) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sums[r][p] = together<I, P, R>(parts, r, p);
  }
}

// R rows times N panels, P at a time; adds the parts of split rows and hands every tile on. One function with all that
// it loops over, and not part of another: GCC unrolls loops inside of at most seven others, and loops that stay loops
// keep their sums in memory (2.5 times slower); sums that a call hands back cost 2-4 %.
template <class F, class I, int P, int N, int R, class Epilogue>
[[gnu::noinline]] void block(const lk::Product& a, int panel, int end, int first, Ahead* ahead,
                             const typename F::template Decoder<I>& decoder, const Epilogue& done) {
  typename I::F32 all[R][N];
  for (int r = 0; r < R; r += a.split)
    for (int n = 0; n < N; n += Epilogue::kPanels) done.expect((panel + n) / Epilogue::kPanels, (first + r) / a.split);
  float* const spread = reinterpret_cast<float*>(a.scratch + kDecodedBytes);
  if constexpr (kSpread<I, R>) spread_rows<I, R>(a.rows + first, a.layout->depth, spread);
  const float* const known = sums_once<F, R>(a) ? sums_at<I>(a) + first : nullptr;
  for (int n = 0; n < N; n += P) {
    typename I::F32 sums[R][P];
    dot_panels<F, I, P, R>(a, panel + n, end, a.rows + first, spread, known, ahead, decoder, sums);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) all[r][n + p] = sums[r][p];
  }
  for (int r = 0; r < R; r += a.split) {
    if (R > 1 && a.split == 2)
      for (int n = 0; n < N; ++n) all[r][n] = I::add(all[r][n], all[r + 1 < R ? r + 1 : r][n]);
    for (int n = 0; n < N; n += Epilogue::kPanels) done((panel + n) / Epilogue::kPanels, (first + r) / a.split, &all[r][n]);
  }
}

// Calls block() with as many template rows as there are rows, Least to R.
template <class F, class I, int P, int N, int Least, int R, class Epilogue>
inline void block_of(int rows, const lk::Product& a, int panel, int end, int first, Ahead* ahead,
                     const typename F::template Decoder<I>& decoder, const Epilogue& done) {
  if (rows == R) return block<F, I, P, N, R>(a, panel, end, first, ahead, decoder, done);
  if constexpr (R > Least) block_of<F, I, P, N, Least, R - 1>(rows, a, panel, end, first, ahead, decoder, done);
}

// Whether product() gives blocks<R>() more rows than R. Fewer make a block of more than R / 2, and more rows than R blocks
// of R / 2 and more; what cannot come is not compiled: the object would take twice as long.
template <class I, int R> constexpr bool kManyBlocks = R == I::kRows || (I::kSpreads && R * 2 == I::kRows);

// All rows over all panels of the range, P side by side; the rest in the epilogue's own step.
template <class F, class I, int P, int R, class Epilogue>
void blocks(const lk::Product& a, const Epilogue& done) {
  constexpr int kStep = Epilogue::kPanels, kRest = P < kStep ? P : kStep;
  constexpr int kLeast = !kSpread<I, R> ? kStep : kDecodesOnce<F, I> ? 2 : 4;  // panels that share what is spread
  constexpr int N = P > kLeast ? P : kLeast > kStep ? kLeast : kStep;
  constexpr int kFewest = R == 1 ? 1 : kManyBlocks<I, R> ? R / 2 : R / 2 + 1;
  const typename F::template Decoder<I> decoder;
  const int end = (a.first + a.count) * kStep;
  if (sums_once<F, R>(a)) sum_groups(*a.layout, a.rows, a.row_count, sums_at<I>(a));
  // Equal blocks, of an even number of rows where two make one: no thin last one.
  const int64_t units = a.row_count / a.split, count = (a.row_count + R - 1) / R;
  const auto each_block = [&]<class G>(const lk::Product& product, const typename G::template Decoder<I>& its, int panel, int next) {
    const bool whole = panel + N == next;
    Ahead ahead{next < end ? a.panels.codes + size_t(next) * a.layout->codes : a.next_codes,
                (whole ? P : kRest) * kStepOf<F> / F::kBlock * 64, int(count)};
    for (int64_t b = 0; b < count; ++b) {
      const int first = int(units * b / count) * a.split, rows = int(units * (b + 1) / count) * a.split - first;
      Ahead* const fetch = count > 1 && ahead.at ? &ahead : nullptr;
      if (whole) block_of<G, I, P, N, kFewest, R>(rows, product, panel, end, first, fetch, its, done);
      else block_of<G, I, kRest, kStep, kFewest, R>(rows, product, panel, end, first, fetch, its, done);
    }
  };
  const auto each_step = [&](const auto& body) {
    for (int panel = a.first * kStep, next; panel < end; panel = next) {
      next = panel + N <= end ? panel + N : panel + kStep;
      body(panel, next);
    }
  };
  if constexpr (kManyBlocks<I, R> && kDecodesOnce<F, I>) {
    lk::PanelLayout layout = *a.layout;
    layout.codes = decoded_bytes(layout.depth);
    if (count > 1 && N * layout.codes <= kDecodedBytes) {
      lk::Product decoded = a;
      decoded.layout = &layout;
      const typename Decoded<F>::template Decoder<I> its;
      return each_step([&](int panel, int next) {
        for (int p = panel; p < next; ++p)
          decode<F, I>(a.panels.codes + size_t(p) * a.layout->codes, a.layout->codes, decoder, a.scratch + size_t(p - panel) * layout.codes);
        decoded.panels.codes = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(a.scratch) - size_t(panel) * layout.codes);
        each_block.template operator()<Decoded<F>>(decoded, its, panel, next);
      });
    }
  }
  each_step([&](int panel, int next) { each_block.template operator()<F>(a, decoder, panel, next); });
}

template <class F, class I, int R = 1, class Epilogue> void product(const lk::Product& a, const Epilogue& done) {
  if constexpr (R == 1 && F::kZeros) {
    if (!a.layout->zeros) return product<Plain<F>, I>(a, done);
  }
  if constexpr (R < I::kRows) {
    if (a.row_count > R && !(R * 2 == I::kRows && I::kSpreads && a.layout->depth > kMostSpreadDepth)) return product<F, I, R * 2>(a, done);
  }
  blocks<F, I, panels_for<F, I>(R), R>(a, done);
}
