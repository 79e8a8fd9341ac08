// The slow truth: checkpoint matrices of every format, and one layer's experts in float64, with the error that a
// kernel is allowed. A new format is a row of kForms and a case in code_value (and scale_value).
#pragma once

#include <vector>

#include "check/guarded.h"
#include "check/numbers.h"
#include "moe/experts.h"

namespace check {

struct Form {
  const char* name;
  lk::Format format;
  int bits;         // of a code
  int group;        // k per scale, 0: no group scales
  int scale_bytes;  // of one group scale
  int low, high;    // first and last scale byte that random matrices use
  bool global;      // a second scale per matrix
};
constexpr Form kForms[] = {
    {"bf16", lk::Format::bf16, 16, 0, 0, 0, 0, false},
    {"mxfp4", lk::Format::mxfp4, 4, 32, 1, 118, 123, false},
    {"nvfp4", lk::Format::nvfp4, 4, 16, 1, 0, 0x7e, true},
};

inline double code_value(const Form& form, uint32_t code) { return form.bits == 16 ? from_bf16(uint16_t(code)) : from_e2m1(uint8_t(code)); }
inline double scale_value(const Form& form, uint8_t scale) {
  return form.format == lk::Format::mxfp4 ? from_e8m0(scale) : from_e4m3(scale);
}

// One matrix as a checkpoint has it. Its arrays end at guard pages.
struct Weights {
  const Form& form;
  int rows, depth, groups;
  Guarded<uint8_t> codes, scales;
  float global = 1;

  Weights(const Form& f, int n, int k)
      : form(f), rows(n), depth(k), groups(f.group ? (k + f.group - 1) / f.group : 0),
        codes(size_t(n) * size_t(row_bytes())), scales(size_t(n) * size_t(groups) * size_t(f.scale_bytes)) {}

  int row_bytes() const { return (depth * form.bits + 7) / 8; }
  uint8_t* code_row(int r) { return codes.data() + size_t(r) * size_t(row_bytes()); }
  void set_code(int r, int k, uint32_t code) {
    if (form.bits == 4) {
      uint8_t& byte = code_row(r)[k / 2];
      byte = uint8_t(k % 2 ? (byte & 0x0f) | code << 4 : (byte & 0xf0) | code);
    } else {
      memcpy(code_row(r) + size_t(k) * 2, &code, 2);
    }
  }
  uint8_t& scale(int r, int g) { return scales[size_t(r) * size_t(groups) + size_t(g)]; }

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
    const uint8_t* row = code_row(r);
    uint32_t code = 0;
    if (form.bits == 4) code = row[k / 2] >> (k % 2 * 4) & 15;
    else memcpy(&code, row + size_t(k) * 2, 2);
    const double factor = form.group ? scale_value(form, scale(r, k / form.group)) : 1.0;
    return code_value(form, code) * factor * double(global);
  }
};

// About unit variance over the square root of the depth.
inline Weights random_weights(const Form& form, int rows, int depth, Random& random) {
  Weights w(form, rows, depth);
  const double size = 1 / std::sqrt(double(depth));
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < depth; ++k)
      w.set_code(r, k, form.bits == 16 ? to_bf16(random.normal() * size) : uint32_t(random.below(16)));
    for (int g = 0; g < w.groups; ++g) w.scale(r, g) = uint8_t(form.low + random.below(form.high - form.low + 1));
  }
  if (form.global) w.global = float(size / 300 * (0.2 + 4.8 * random.uniform()));
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
  std::vector<std::vector<double>> x;
  std::vector<int> ids;  // some outside the experts
  std::vector<float> weights;
  float scale = 1;
  bool weight_on_input = false;
};

// All tokens: value and bound, row by row. `step` is the relative step of an activation: 2^-8, or 2^-15 where
// float32 activations are split in two.
inline Result forward(Layer& layer, const Tokens& tokens, double step) {
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
