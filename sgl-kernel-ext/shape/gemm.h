// Many rows: a block of weights is decoded once into L1, scales folded in where that is exact (e2m1 times
// e8m0 or e4m3 has at most six significant bits, bf16 has eight), and all rows run over it.
// A column sums over k in order, one accumulator, so results do not depend on the blocking.

template <class F, class I>
inline void decode_block(const uint8_t* panel, int k, int depth, const typename F::template Decoder<I>& decoder,
                         uint32_t* out, int stride) {
  using Pairs = typename I::Pairs;
  constexpr int kPairs = F::kBlock / 2;
  for (int at = k; at < k + depth; at += F::kBlock) {
    const uint8_t* super = panel + size_t(at / F::kSuper) * kSuperBytesOf<F>;
    const int inside = at % F::kSuper;
    Pairs w[kPairs];
    decoder.rows(super + inside / F::kBlock * 64, w);
    if constexpr (F::kGroup > 0) {
      const auto s = decoder.scale(super + kCodeBytesOf<F> + inside / F::kGroup * F::kScaleBytes);
#pragma GCC unroll 4
      for (int j = 0; j < kPairs; ++j) w[j] = I::scale_pairs(w[j], s);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kPairs; ++j) I::store_pairs(out + size_t((at - k) / 2 + j) * stride, w[j]);
  }
}

// R rows times P panels over one decoded block; sums stay in registers.
template <class I, int P, int R>
inline void gemm_tile(const uint32_t* w, const uint16_t* const* rows, int k, int depth, float* sums, bool first) {
  using F32 = typename I::F32;
  F32 acc[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) acc[r][p] = first ? I::zero() : I::load(sums + (r * P + p) * 16);
  const uint16_t* x[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) x[r] = rows[r] + k;
  for (int i = 0; i < depth; i += 2, w += P * 16) {
    typename I::Pairs row[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) row[p] = I::load_pairs(reinterpret_cast<const uint8_t*>(w + p * 16));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto a = I::broadcast(x[r] + i);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = I::dot2(acc[r][p], a, row[p]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) I::store(sums + (r * P + p) * 16, acc[r][p]);
}

template <class I, int P, int R>
void gemm_tiles(const uint32_t* w, const uint16_t* const* rows, int count, int k, int depth, float* sums, bool first) {
  if (count == R) return gemm_tile<I, P, R>(w, rows, k, depth, sums, first);
  if constexpr (R > 1) gemm_tiles<I, P, R - 1>(w, rows, count, k, depth, sums, first);
}

// Part `part` of `parts` of the bytes of a block that is decoded next: fetched while this one is multiplied.
template <class F, class I, int P>
inline void prefetch_block(const lk::Product& a, int panel, int k, int part, int parts) {
  const int depth = a.depth - k < lk::kGemmDepth ? a.depth - k : lk::kGemmDepth;
  const int lines = (depth + F::kSuper - 1) / F::kSuper * (kSuperBytesOf<F> / 64);
  const uint8_t* block = a.panels + size_t(panel) * a.panel_bytes + size_t(k / F::kSuper) * kSuperBytesOf<F>;
  for (int line = lines * part / parts; line < lines * (part + 1) / parts; ++line)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) I::prefetch_l2(block + size_t(p) * a.panel_bytes + size_t(line) * 64);
}

template <class F, class I, int P, class Epilogue>
void gemm_panels(const lk::Product& a, int panel, const Epilogue& done) {
  const typename F::template Decoder<I> decoder;
  uint32_t* weights = static_cast<uint32_t*>(a.scratch);
  float* sums = reinterpret_cast<float*>(weights + P * 16 * (lk::kGemmDepth / 2));
  for (int row = 0; row < a.row_count; row += lk::kGemmRows) {
    const int rows = a.row_count - row < lk::kGemmRows ? a.row_count - row : lk::kGemmRows;
    const int tiles = (rows + I::kGemmRows - 1) / I::kGemmRows;  // equal tiles: no thin last one
    for (int k = 0; k < a.depth; k += lk::kGemmDepth) {
      const int depth = a.depth - k < lk::kGemmDepth ? a.depth - k : lk::kGemmDepth;
      for (int p = 0; p < P; ++p)
        decode_block<F, I>(a.panels + size_t(panel + p) * a.panel_bytes, k, depth, decoder, weights + p * 16, P * 16);
      for (int t = 0; t < tiles; ++t) {
        const int begin = rows * t / tiles, end = rows * (t + 1) / tiles;
        gemm_tiles<I, P, I::kGemmRows>(weights, a.rows + row + begin, end - begin, k, depth, sums + begin * P * 16, k == 0);
        if (k + depth < a.depth) prefetch_block<F, I, P>(a, panel, k + depth, t, tiles);
        else prefetch_block<F, I, P>(a, panel + P, 0, t, tiles);
      }
    }
    for (int r = 0; r < rows; r += a.split)
      for (int p = 0; p < P; p += Epilogue::kPanels) {
        typename I::F32 s[Epilogue::kPanels];
        for (int q = 0; q < Epilogue::kPanels; ++q) {
          s[q] = I::load(sums + (r * P + p + q) * 16);
          if (a.split == 2) s[q] = I::add(s[q], I::load(sums + ((r + 1) * P + p + q) * 16));
        }
        done((panel + p) / Epilogue::kPanels, (row + r) / a.split, s);
      }
  }
}

template <class F, class I, class Epilogue>
void gemm(const lk::Product& a, const Epilogue& done) {
  constexpr int kStep = Epilogue::kPanels, P = I::kGemmPanels > kStep ? I::kGemmPanels : kStep;
  static_assert(P <= lk::kGemmMaxPanels);
  const int end = (a.first + a.count) * kStep;
  int p = a.first * kStep;
  for (; p + P <= end; p += P) gemm_panels<F, I, P>(a, p, done);
  if constexpr (P > kStep)
    for (; p < end; p += kStep) gemm_panels<F, I, kStep>(a, p, done);
}
