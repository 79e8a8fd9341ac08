// Rows times panels, from one row to thousands: weights are decoded in registers and multiplied with up to
// I::kRows rows at once. One row is memory's speed; from about eight rows on, decoding hides behind the
// multiplications, so there is no second, blocked copy of the weights and no second order of summation: a
// column's sum over k is the same for any number of rows, and results do not depend on the batch.
//
// Panels are the outer loop: all rows pass over a panel while the caches hold it.

// Panels side by side for R rows. One or two rows wait for memory, and memory likes one stream: one panel after
// the other reads 20-80 % faster than four at once. More rows multiply: then there are enough independent sums to
// hide the latency of dot2, and few enough to stay in registers (grouped formats keep two sets, the group's sum
// and the total).
template <class F, class I> constexpr int panels_for(int rows) {
  if (rows <= 2) return 1;
  const int panels = I::kSums / (F::kGroup ? 2 : 1) / rows;
  return panels >= 4 ? 4 : panels >= 2 ? 2 : 1;
}

template <class F, class I, int P, int R>
inline void dot_panels(const lk::Product& a, const uint8_t* panels, const uint16_t* const* rows,
                       const typename F::template Decoder<I>& decoder, typename I::F32 (&sums)[R][P]) {
  using F32 = typename I::F32;
  using Pairs = typename I::Pairs;
  constexpr int kPairs = F::kBlock / 2, kBlocks = kGroupOf<F> / F::kBlock;
  constexpr bool kGrouped = F::kGroup > 0;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) sums[r][p] = I::zero();

  const uint8_t* codes[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) codes[p] = panels + size_t(p) * a.panel_bytes;
  for (int k = 0; k < a.depth; k += F::kSuper) {
    for (int g = 0; g < kGroupsOf<F>; ++g) {
      F32 group[R][P];
      if constexpr (kGrouped) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
          for (int p = 0; p < P; ++p) group[r][p] = I::zero();
      }
      F32(&acc)[R][P] = kGrouped ? group : sums;
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const int at = k + g * kGroupOf<F> + b * F::kBlock, offset = (g * kBlocks + b) * 64;
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
          Pairs w[kPairs];
          I::prefetch(codes[p] + offset + kAhead);
          decoder.rows(codes[p] + offset, w);
#pragma GCC unroll 4
          for (int j = 0; j < kPairs; ++j)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[r][p] = I::dot2(acc[r][p], I::broadcast(rows[r] + at + 2 * j), w[j]);
        }
      }
      if constexpr (kGrouped) {
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
          const F32 s = decoder.scale(codes[p] + kCodeBytesOf<F> + g * F::kScaleBytes);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sums[r][p] = I::fma(group[r][p], s, sums[r][p]);
        }
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) codes[p] += kSuperBytesOf<F>;
  }
}

// R rows times N panels, P at a time; adds the parts of split rows and hands every tile on.
template <class F, class I, int P, int N, int R, class Epilogue>
inline void block(const lk::Product& a, int panel, int first, const typename F::template Decoder<I>& decoder, const Epilogue& done) {
  typename I::F32 all[R][N];
  for (int r = 0; r < R; r += a.split)
    for (int n = 0; n < N; n += Epilogue::kPanels) done.expect((panel + n) / Epilogue::kPanels, (first + r) / a.split);
  for (int n = 0; n < N; n += P) {
    typename I::F32 sums[R][P];
    dot_panels<F, I, P, R>(a, a.panels + size_t(panel + n) * a.panel_bytes, a.rows + first, decoder, sums);
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

// Calls block() with as many template rows as there are rows.
template <class F, class I, int P, int N, int R, class Epilogue>
inline void block_of(int rows, const lk::Product& a, int panel, int first, const typename F::template Decoder<I>& decoder,
                     const Epilogue& done) {
  if (rows == R) return block<F, I, P, N, R>(a, panel, first, decoder, done);
  if constexpr (R > 1) block_of<F, I, P, N, R - 1>(rows, a, panel, first, decoder, done);
}

// All rows over all panels of the range, P side by side; the rest in the epilogue's own step.
template <class F, class I, int P, int R, class Epilogue>
void blocks(const lk::Product& a, const Epilogue& done) {
  constexpr int kStep = Epilogue::kPanels, N = P > kStep ? P : kStep, kRest = P < kStep ? P : kStep;
  const typename F::template Decoder<I> decoder;
  const int end = (a.first + a.count) * kStep;
  // Equal blocks, of an even number of rows where two make one: no thin last one.
  const int64_t units = a.row_count / a.split, count = (a.row_count + R - 1) / R;
  for (int panel = a.first * kStep; panel < end;) {
    const bool whole = panel + N <= end;
    for (int64_t b = 0; b < count; ++b) {
      const int first = int(units * b / count) * a.split, rows = int(units * (b + 1) / count) * a.split - first;
      if (whole) block_of<F, I, P, N, R>(rows, a, panel, first, decoder, done);
      else block_of<F, I, kRest, kStep, R>(rows, a, panel, first, decoder, done);
    }
    panel += whole ? N : kStep;
  }
}

template <class F, class I, int R = 1, class Epilogue> void product(const lk::Product& a, const Epilogue& done) {
  if constexpr (R < I::kRows) {
    if (a.row_count > R) return product<F, I, R * 2>(a, done);
  }
  blocks<F, I, panels_for<F, I>(R), R>(a, done);
}
