// The slow truth: checkpoint matrices of every format, and one layer's experts in float64, with the error that a
// kernel is allowed. A new format is a row of kForms and a case in code_value and code_of_one.
#pragma once

#include <vector>

#include "check/guarded.h"
#include "check/numbers.h"
#include "moe/experts.h"

namespace check {

struct Form {
  const char* name;
  lk::Coding coding;
  bool columns = false;  // a factor per output column
  bool global = false;   // a second scale per matrix
};
using F = lk::Format;
using S = lk::Scale;
constexpr Form kForms[] = {
    {"bf16", {F::bf16, 0, S::none, false}},
    {"f16", {F::f16, 0, S::none, false}},
    {"fp8_channel", {F::fp8, 0, S::none, false}, true, true},
    {"fp8_block128", {F::fp8, 128, S::f32_shared, false}, false, true},
    {"fp8_group32", {F::fp8, 32, S::f32, false}, false, true},
    {"mxfp8", {F::mxfp8, 32, S::e8m0, false}},
    {"mxfp4", {F::mxfp4, 32, S::e8m0, false}},
    {"nvfp4", {F::nvfp4, 16, S::e4m3, false}, false, true},
    {"int4_channel", {F::int4, 0, S::none, false}, true, true},
    {"int4_group32", {F::int4, 32, S::bf16, false}, false, true},
    {"int4_group128", {F::int4, 128, S::f32, false}, false, true},
    {"int4_group64_zeros", {F::int4, 64, S::f16, true}, false, true},
};

inline double code_value(lk::Format format, uint32_t code) {
  switch (format) {
    case F::bf16: return from_bf16(uint16_t(code));
    case F::f16: return from_f16(uint16_t(code));
    case F::fp8: case F::mxfp8: return from_e4m3(uint8_t(code));
    case F::int4: return double(code) - 8;
    default: return from_e2m1(uint8_t(code));
  }
}
inline uint32_t code_of_one(lk::Format format) {
  switch (format) {
    case F::bf16: return 0x3f80;
    case F::f16: return 0x3c00;
    case F::fp8: case F::mxfp8: return 0x38;
    case F::int4: return 9;
    default: return 2;
  }
}

constexpr int kScaleSize[] = {0, 1, 1, 2, 2, 4, 4};  // bytes, by lk::Scale
inline uint32_t scale_bits(lk::Scale type, double value) {
  const float single = float(value);
  uint32_t bits = 0;
  switch (type) {
    case S::e8m0: return uint32_t(127 + std::ilogb(value));
    case S::bf16: return to_bf16(value);
    case S::f16: return to_f16(value);
    case S::f32: case S::f32_shared: memcpy(&bits, &single, 4); return bits;
    default: return 0x38;  // e4m3: callers write the byte; this is 1
  }
}
inline double scale_value(lk::Scale type, uint32_t bits) {
  switch (type) {
    case S::none: return 1;
    case S::e8m0: return from_e8m0(uint8_t(bits));
    case S::e4m3: return from_e4m3(uint8_t(bits));
    case S::bf16: return from_bf16(uint16_t(bits));
    case S::f16: return from_f16(uint16_t(bits));
    default: return from_float_bits(bits);
  }
}

// One matrix as a checkpoint has it, all zeros at first. Its arrays end at guard pages.
struct Weights {
  lk::Coding coding;
  int rows, depth, groups, bits;
  Guarded<uint8_t> codes, scales, zeros;
  Guarded<float> columns;
  float global = 1;

  Weights(const Form& form, int n, int k)
      : coding(form.coding), rows(n), depth(k), groups(coding.group ? (k + coding.group - 1) / coding.group : 0),
        bits(lk::kCodeBits[int(coding.format)]), codes(size_t(n) * size_t(row_bytes()), coding.format == F::int4 ? 0x88 : 0),
        scales(size_t(n) * size_t(scale_row_bytes())), zeros(coding.zeros ? size_t(n) * size_t(groups) : 0, 8),
        columns(form.columns ? size_t(n) : 0) {
    for (size_t i = 0; i < columns.size(); ++i) columns[i] = 1;
  }

  int row_bytes() const { return (depth * bits + 7) / 8; }
  int scale_row_bytes() const { return groups * kScaleSize[int(coding.scale)]; }
  uint8_t* code_row(int r) { return codes.data() + size_t(r) * size_t(row_bytes()); }
  void set_code(int r, int k, uint32_t code) {
    uint8_t* byte = code_row(r) + size_t(k) * size_t(bits) / 8;
    if (bits == 4) *byte = uint8_t(k % 2 ? (*byte & 0x0f) | code << 4 : (*byte & 0xf0) | code);
    else memcpy(byte, &code, size_t(bits) / 8);
  }
  uint8_t* scale(int r, int g) { return scales.data() + size_t(r) * size_t(scale_row_bytes()) + size_t(g * kScaleSize[int(coding.scale)]); }
  void set_scale(int r, int g, uint32_t value) { memcpy(scale(r, g), &value, size_t(kScaleSize[int(coding.scale)])); }
  uint8_t& zero(int r, int g) { return zeros[size_t(r) * size_t(groups) + size_t(g)]; }

  // Row r in float64, decoded once.
  const double* values(int r) {
    if (values_.empty())
      for (int i = 0; i < rows; ++i)
        for (int k = 0; k < depth; ++k) values_.push_back(value(i, k));
    return values_.data() + size_t(r) * size_t(depth);
  }

 private:
  std::vector<double> values_;

  double value(int r, int k) {
    uint32_t code = 0, scale_code = 0;
    const uint8_t* byte = code_row(r) + size_t(k) * size_t(bits) / 8;
    if (bits == 4) code = *byte >> (k % 2 * 4) & 15;
    else memcpy(&code, byte, size_t(bits) / 8);
    double v = code_value(coding.format, code);
    if (coding.zeros) v += 8 - zero(r, k / coding.group);
    if (coding.group) {
      memcpy(&scale_code, scale(r, k / coding.group), size_t(kScaleSize[int(coding.scale)]));
      v *= scale_value(coding.scale, scale_code);
    }
    if (columns.size()) v *= double(columns[size_t(r)]);
    return v * double(global);
  }
};

inline uint32_t random_code(lk::Format format, double size, Random& random) {
  uint32_t code;
  switch (format) {
    case F::bf16: return to_bf16(random.normal() * size);
    case F::f16: return to_f16(random.normal() * size * std::pow(10.0, -random.below(6)));  // subnormal ones among them
    case F::fp8: case F::mxfp8:
      code = uint32_t(random.below(256));
      if ((code & 0x7f) == 0x7f) code = 8;                       // NaN
      return random.below(5) ? code & 0xbf : code;               // mostly below 2, as in real checkpoints
    default: return uint32_t(random.below(16));
  }
}

// About unit variance over the square root of the depth.
inline Weights random_weights(const Form& form, int rows, int depth, Random& random) {
  Weights w(form, rows, depth);
  const double size = 1 / std::sqrt(double(depth));
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < depth; ++k) w.set_code(r, k, random_code(form.coding.format, size, random));
    for (int g = 0; g < w.groups; ++g) {
      uint32_t scale = scale_bits(form.coding.scale, 0.002 + 0.018 * random.uniform());
      if (form.coding.scale == S::e8m0) scale = uint32_t(118 + random.below(6));
      if (form.coding.scale == S::e4m3) scale = uint32_t(random.below(0x7f));
      if (form.coding.scale == S::f32_shared && r % lk::kColumns) memcpy(&scale, w.scale(r - 1, g), 4);
      w.set_scale(r, g, scale);
      if (form.coding.zeros) w.zero(r, g) = uint8_t(random.below(17));
    }
    if (form.columns) w.columns[size_t(r)] = float(0.2 + 1.8 * random.uniform());
  }
  if (form.global) w.global = float(size / (form.coding.format == F::nvfp4 ? 300 : 3) * (0.2 + 4.8 * random.uniform()));
  return w;
}

struct Layer {
  const Form& form;
  int hidden, width;
  lk::Activation activation;
  struct Expert { Weights gate, up, down; std::vector<float> bias[3]; };
  std::vector<Expert> experts;
  bool bias = false;

  static Layer random(const Form& form, int experts, int hidden, int width, const lk::Activation& activation, bool bias, Random& random) {
    Layer layer{form, hidden, width, activation, {}, bias};
    for (int e = 0; e < experts; ++e) {
      layer.experts.push_back({random_weights(form, width, hidden, random), random_weights(form, width, hidden, random),
                               random_weights(form, hidden, width, random), {}});
      for (int part = 0; part < 3; ++part)
        for (int i = 0; bias && i < (part == 2 ? hidden : width); ++i) layer.experts.back().bias[part].push_back(float(random.normal()));
    }
    return layer;
  }
};

inline double gate_function(const lk::Activation& a, double g) {
  const double pi = 3.14159265358979323846;
  switch (a.gate) {
    case lk::Gate::gelu: return 0.5 * g * (1 + std::erf(g / std::sqrt(2.0)));
    case lk::Gate::gelu_tanh: return 0.5 * g * (1 + std::tanh(std::sqrt(2 / pi) * (g + 0.044715 * g * g * g)));
    case lk::Gate::relu2: return g > 0 ? g * g : 0;
    default: return g / (1 + std::exp(-double(a.alpha) * g));
  }
}

inline double activate(const lk::Activation& a, double g, double u) {
  const double limit = double(a.limit);
  if (limit > 0 && !a.limit_after) g = std::fmin(g, limit);
  g = gate_function(a, g);
  if (limit > 0 && a.limit_after) g = std::fmin(g, limit);
  if (limit > 0) u = std::fmax(-limit, std::fmin(u, limit));
  return g * (u + double(a.up_bias));
}

// A dot product and the sum of its terms' sizes.
struct Dot { double sum, reach; };
inline Dot dot(Weights& w, int row, const std::vector<double>& x) {
  Dot d{0, 0};
  const double* values = w.values(row);
  for (int k = 0; k < w.depth; ++k) {
    const double term = values[k] * x[size_t(k)];
    d.sum += term;
    d.reach += std::fabs(term);
  }
  return d;
}

struct Result { std::vector<double> value, bound; };

// One expert on one token. The bound: one rounding of the intermediate (half a step, taken twice for the roundings
// that follow) and f32 sums of 2^-24 a term, which reach the output through both factors of the activation.
inline Result expert_forward(Layer& layer, int e, const std::vector<double>& x, double input_weight, double step) {
  Layer::Expert& expert = layer.experts[size_t(e)];
  const double term = 4 * (layer.hidden + layer.width + 64) * 0x1p-24 + (step < 0x1p-8 ? step : 0);
  std::vector<double> act, error;
  for (int c = 0; c < layer.width; ++c) {
    const Dot gate = dot(expert.gate, c, x), up = dot(expert.up, c, x);
    const double gate_bias = layer.bias ? double(expert.bias[0][size_t(c)]) : 0, up_bias = layer.bias ? double(expert.bias[1][size_t(c)]) : 0;
    const double g = gate.sum * input_weight + gate_bias, u = up.sum * input_weight + up_bias;
    act.push_back(activate(layer.activation, g, u));
    const double reach = (gate.reach + up.reach) * std::fabs(input_weight) + std::fabs(gate_bias) + std::fabs(up_bias) + 1;
    const double factor = 1 + std::fabs(double(layer.activation.up_bias)) + std::fabs(g) + std::fabs(u);
    error.push_back(std::fabs(act.back()) * step + reach * factor * term);
  }
  Result result;
  for (int h = 0; h < layer.hidden; ++h) {
    double y = layer.bias ? double(expert.bias[2][size_t(h)]) : 0, allowed = std::fabs(y) * 0x1p-20;
    const double* down = expert.down.values(h);
    for (int c = 0; c < layer.width; ++c) {
      y += down[c] * act[size_t(c)];
      allowed += std::fabs(down[c]) * error[size_t(c)];
    }
    result.value.push_back(y);
    result.bound.push_back(allowed);
  }
  return result;
}

struct Tokens {
  int count, top_k;
  lk::Type type;  // of x
  std::vector<std::vector<double>> x;
  std::vector<int> ids;  // some outside the experts
  std::vector<float> weights;
  float scale = 1;
  bool weight_on_input = false;
};

// All tokens: value and bound, row by row. The relative step of an activation is 2^-8, or 2^-15 where activations are
// split in two.
inline Result forward(Layer& layer, const Tokens& tokens) {
  const double step = tokens.type == lk::Type::bf16 ? 0x1p-8 : 0x1p-15;
  Result all;
  for (int t = 0; t < tokens.count; ++t) {
    std::vector<double> sum(size_t(layer.hidden), 0.0), bound(size_t(layer.hidden), 1e-30);
    for (int k = 0; k < tokens.top_k; ++k) {
      const size_t slot = size_t(t) * size_t(tokens.top_k) + size_t(k);
      const int e = tokens.ids[slot];
      if (e < 0 || e >= int(layer.experts.size())) continue;
      const double w = double(tokens.weights[slot]), out = tokens.weight_on_input ? 1.0 : w;
      const Result one = expert_forward(layer, e, tokens.x[size_t(t)], tokens.weight_on_input ? w : 1.0, step);
      for (size_t h = 0; h < sum.size(); ++h) {
        sum[h] += out * one.value[h];
        bound[h] += std::fabs(out) * one.bound[h];
      }
    }
    for (size_t h = 0; h < sum.size(); ++h) {
      const double y = sum[h] * double(tokens.scale);
      all.value.push_back(y);
      all.bound.push_back(bound[h] * std::fabs(double(tokens.scale)) + std::fabs(y) * 0x1p-22);
    }
  }
  return all;
}

}  // namespace check
