// Few rows: every weight is decoded in registers and used at once, so the speed is memory's.
// P panels side by side give independent sums enough to hide the latency of dot2; each column still
// sums over k in order, so a result does not depend on how panels were grouped.

template <class F, class I, int P, int R>
inline void gemv_panels(const lk::Product& a, const uint8_t* panels, const uint16_t* const* rows,
                        const typename F::template Decoder<I>& decoder, typename I::F32 (*sums)[P]) {
  using F32 = typename I::F32;
  using Pairs = typename I::Pairs;
  constexpr int kPairs = F::kBlock / 2, kBlocks = kGroupOf<F> / F::kBlock;
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
      if constexpr (F::kGroup > 0) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
          for (int p = 0; p < P; ++p) group[r][p] = I::zero();
      }
      auto& acc = [&]() -> auto& { if constexpr (F::kGroup > 0) return group; else return *reinterpret_cast<F32(*)[R][P]>(sums); }();
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
      if constexpr (F::kGroup > 0) {
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

// Adds the parts of split rows and hands every tile on.
template <class I, int P, int R, class Epilogue>
inline void finish(const lk::Product& a, int panel, int first, typename I::F32 (&sums)[R][P], const Epilogue& done) {
  constexpr int kStep = Epilogue::kPanels;
  for (int r = 0; r < R; r += a.split) {
    if (R > 1 && a.split == 2)
      for (int p = 0; p < P; ++p) sums[r][p] = I::add(sums[r][p], sums[r + 1 < R ? r + 1 : r][p]);
    for (int p = 0; p < P; p += kStep) done((panel + p) / kStep, (first + r) / a.split, &sums[r][p]);
  }
}

// R rows over all panels of the range, P at a time, the rest in the epilogue's own step.
template <class F, class I, int P, int R, class Epilogue>
void gemv_rows(const lk::Product& a, int first, const Epilogue& done) {
  constexpr int kStep = Epilogue::kPanels;
  const typename F::template Decoder<I> decoder;
  const int end = (a.first + a.count) * kStep;
  int p = a.first * kStep;
  for (; p + P <= end; p += P) {
    typename I::F32 sums[R][P];
    gemv_panels<F, I, P, R>(a, a.panels + size_t(p) * a.panel_bytes, a.rows + first, decoder, sums);
    finish<I>(a, p, first, sums, done);
  }
  if constexpr (P > kStep)
    for (; p < end; p += kStep) {
      typename I::F32 sums[R][kStep];
      gemv_panels<F, I, kStep, R>(a, a.panels + size_t(p) * a.panel_bytes, a.rows + first, decoder, sums);
      finish<I>(a, p, first, sums, done);
    }
}

// 1..kGemvRows rows. Sums and group sums must fit the registers: fewer panels as rows grow. Split rows come in
// pairs, so they meet the cases 2 and 4 only.
template <class F, class I, class Epilogue>
void gemv(const lk::Product& a, const Epilogue& done) {
  constexpr int kNarrow = I::kTiles * 2, kOne = Epilogue::kPanels;
  int r = 0;
  while (r < a.row_count) {
    switch (a.row_count - r) {
      case 1: gemv_rows<F, I, kNarrow, 1>(a, r, done); r += 1; break;
      case 2: gemv_rows<F, I, kNarrow, 2>(a, r, done); r += 2; break;
      case 3: gemv_rows<F, I, kNarrow, 3>(a, r, done); r += 3; break;
      default: gemv_rows<F, I, kOne, 4>(a, r, done); r += 4; break;
    }
  }
}
