// What happens to a finished tile of sums: the activation of gate and up, or the weighted add. `expect` fetches
// what will be written while the sums are made.
// Elementwise, and written once over the operations of isa/, so every lane ISA rounds alike.

template <class I> struct Maths {
  using F32 = typename I::F32;
  static constexpr float kLargestBf16 = 0x1.fep127f;

  // exp(x): x = n ln2 + r with |r| <= ln2 / 2, then a degree-6 Taylor polynomial (error below 2 ulp).
  static F32 exp(F32 x) {
    x = I::max(I::min(x, I::set1(88.0f)), I::set1(-87.0f));
    const F32 n = I::round(I::mul(x, I::set1(1.44269504f)));
    F32 r = I::fma(n, I::set1(-0.693145752f), x);      // ln2, high bits
    r = I::fma(n, I::set1(-1.42860677e-6f), r);        // ln2, the rest
    F32 p = I::set1(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = I::fma(p, r, I::set1(c));
    return I::mul(p, I::pow2(n));
  }
  static F32 sigmoid(F32 x) { return I::div(I::set1(1.0f), I::add(I::set1(1.0f), exp(I::mul(x, I::set1(-1.0f))))); }

  // x between the largest numbers of bf16; NaN stays. Infinity less this is infinity again, so it can be split.
  static F32 finite(F32 x) { return I::max(I::set1(-kLargestBf16), I::min(I::set1(kLargestBf16), x)); }

  // erf, Abramowitz & Stegun 7.1.26: absolute error below 1.5e-7, far under a bf16 step. It is 1 from 4 on, and at
  // infinity the formula has none.
  static F32 erf(F32 x) {
    x = I::max(I::min(x, I::set1(8.0f)), I::set1(-8.0f));
    const F32 a = I::max(x, I::mul(x, I::set1(-1.0f)));
    const F32 t = I::div(I::set1(1.0f), I::fma(I::set1(0.3275911f), a, I::set1(1.0f)));
    F32 p = I::set1(1.061405429f);
    for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = I::fma(p, t, I::set1(c));
    p = I::mul(I::mul(p, t), exp(I::mul(I::mul(a, a), I::set1(-1.0f))));
    const F32 y = I::add(I::set1(1.0f), I::mul(p, I::set1(-1.0f)));
    const F32 sign = I::div(x, I::max(a, I::set1(1e-30f)));
    return I::mul(y, sign);
  }
  // Of all 16, in halves: every instruction set adds in this order.
  static float sum(F32 x) {
    float v[16];
    I::store(v, x);
    for (int half = 8; half; half /= 2)
      for (int i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
  }
  static F32 apply(lk::Gate kind, float alpha, F32 g) {
    switch (kind) {
      case lk::Gate::gelu:
        return I::mul(I::mul(g, I::set1(0.5f)), I::add(I::set1(1.0f), erf(I::mul(g, I::set1(0.70710678f)))));
      case lk::Gate::gelu_tanh: {  // 0.5 g (1 + tanh z) = g sigmoid(2z)
        const F32 cubic = I::fma(I::mul(I::mul(g, g), g), I::set1(0.044715f), g);
        return I::mul(g, sigmoid(I::mul(cubic, I::set1(1.59576912f))));
      }
      case lk::Gate::relu2: {
        const F32 r = I::max(I::zero(), g);
        return I::mul(r, r);
      }
      default:
        return I::mul(g, sigmoid(I::mul(g, I::set1(alpha))));
    }
  }
};

// Tile t of a gate_up product: panels 2t (gate) and 2t + 1 (up) of one split row.
template <class I> struct GateUpEpilogue {
  using F32 = typename I::F32;
  static constexpr int kPanels = 2;  // panels that belong together
  const lk::GateUp& args;

  void expect(int tile, int row) const { I::prefetch(place(row * args.product.split, tile)); }
  void operator()(int tile, int row, const F32* sums) const {
    using M = Maths<I>;
    const lk::Activation& a = args.activation;
    const float factor = args.input_weight ? args.input_weight[row] : 1.0f;
    F32 gate = I::mul(I::mul(sums[0], I::set1(args.gate_scale)), I::set1(factor));
    F32 up = I::mul(I::mul(sums[1], I::set1(args.up_scale)), I::set1(factor));
    if (args.gate_columns) {
      gate = I::mul(gate, I::load(args.gate_columns + tile * lk::kColumns));
      up = I::mul(up, I::load(args.up_columns + tile * lk::kColumns));
    }
    if (args.gate_bias) {
      gate = I::add(gate, I::load(args.gate_bias + tile * lk::kColumns));
      up = I::add(up, I::load(args.up_bias + tile * lk::kColumns));
    }
    const bool limited = a.limit > 0.0f;
    // The value is the second operand: min and max return that one where either is NaN, so NaN stays visible.
    if (limited && !a.limit_after) gate = I::min(I::set1(a.limit), gate);
    gate = M::apply(a.gate, a.alpha, gate);
    if (limited && a.limit_after) gate = I::min(I::set1(a.limit), gate);
    if (limited) up = I::max(I::set1(-a.limit), I::min(I::set1(a.limit), up));
    const F32 y = I::mul(gate, I::add(up, I::set1(a.up_bias)));
    const int split = args.product.split;
    put(row * split, tile, split == 2 ? M::finite(y) : y);
    if (split == 2) put(row * 2 + 1, tile, I::fma(I::widen(place(row * 2, tile)), I::set1(-1.0f), y));
  }

 private:
  // A tile is as wide as a sum. Padding is zero, which it is not by itself where the input is infinite.
  void put(int row, int tile, F32 y) const {
    static_assert(lk::kSumOf == lk::kColumns);
    uint16_t* const out = place(row, tile);
    I::store_bf16(out, y);
    for (int c = args.width - tile * lk::kColumns; c < lk::kColumns; ++c) out[c] = 0;
    if (args.sums) reinterpret_cast<float*>(args.out[row] + args.sums)[tile] = Maths<I>::sum(I::widen(out));
  }
  // Where a row's values of a tile of sums are; two of those are one tile of rows.
  uint16_t* place(int row, int tile) const {
    static_assert(lk::kUnit == 2 * lk::kColumns);
    const unsigned t = unsigned(tile);
    return args.out[row] + (args.out_in_tiles ? t / 2 * lk::kTileRows * lk::kUnit + t % 2 * lk::kColumns : t * lk::kColumns);
  }
};

// Panel p of a down product: out += weight * (scale * sum + bias).
template <class I> struct DownEpilogue {
  using F32 = typename I::F32;
  static constexpr int kPanels = 1;
  const lk::Down& args;

  void expect(int panel, int row) const { I::prefetch(args.out[row] + panel * lk::kColumns); }
  void operator()(int panel, int row, const F32* sums) const {
    F32 y = I::mul(sums[0], I::set1(args.scale));
    if (args.columns) y = I::mul(y, I::load(args.columns + panel * lk::kColumns));
    if (args.bias) y = I::add(y, I::load(args.bias + panel * lk::kColumns));
    float* out = args.out[row] + panel * lk::kColumns;
    I::store(out, I::fma(y, I::set1(args.weight ? args.weight[row] : 1.0f), I::load(out)));
  }
};
