// The engine driven with a reference layer: packs it, and runs it from guarded arrays into poisoned ones.
#pragma once

#include <sched.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "check/reference.h"
#include "dispatch.h"

namespace check {

// One engine per instruction set and thread count; more threads than processors share them.
inline std::shared_ptr<lk::Engine> engine(const std::string& isa, int threads = 2) {
  static std::map<std::pair<std::string, int>, std::shared_ptr<lk::Engine>> made;
  auto& found = made[{isa, threads}];
  if (found) return found;
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cpus, all;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &set)) all.push_back(i);
  for (int i = 0; i < threads; ++i) cpus.push_back(all.empty() ? 0 : all[size_t(i) % all.size()]);
  return found = std::make_shared<lk::Engine>(cpus, isa, true, 50, false);
}

inline void pack_part(lk::Experts& experts, int e, lk::Part part, const Weights& w) {
  experts.pack_codes(e, part, w.codes.data(), w.row_bytes());
  if (w.form.group) experts.pack_scales(e, part, w.scales.data(), ptrdiff_t(w.groups) * w.form.scale_bytes);
  if (w.form.global) experts.set_global_scale(e, part, w.global);
}

inline lk::Experts pack(const Layer& layer, std::shared_ptr<lk::Engine> engine) {
  lk::Experts experts(std::move(engine), layer.form.format, {int(layer.experts.size()), layer.hidden, layer.width}, layer.activation, layer.bias);
  for (int e = 0; e < int(layer.experts.size()); ++e) {
    const Layer::Expert& from = layer.experts[size_t(e)];
    pack_part(experts, e, lk::Part::gate, from.gate);
    pack_part(experts, e, lk::Part::up, from.up);
    pack_part(experts, e, lk::Part::down, from.down);
    for (int part = 0; layer.bias && part < 3; ++part) experts.set_bias(e, lk::Part(part), from.bias[part].data());
  }
  return experts;
}

// Tokens first..first + count of a batch through the experts. `Out` is float, or uint16_t for bf16.
template <class Out> Guarded<Out> run(lk::Experts& experts, const Tokens& tokens, bool float_x, int first, int count) {
  const size_t hidden = size_t(experts.shape().hidden), top_k = size_t(tokens.top_k);
  Guarded<uint16_t> narrow(float_x ? 0 : size_t(count) * hidden);
  Guarded<float> wide(float_x ? size_t(count) * hidden : 0);
  for (size_t i = 0; i < size_t(count) * hidden; ++i) {
    const double value = tokens.x[size_t(first) + i / hidden][i % hidden];
    if (float_x) wide[i] = float(value);
    else narrow[i] = std::isnan(value) ? 0x7fc0 : to_bf16(value);
  }
  Guarded<int32_t> ids(size_t(count) * top_k);
  Guarded<float> weights(size_t(count) * top_k);
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = tokens.ids[size_t(first) * top_k + i];
    weights[i] = tokens.weights[size_t(first) * top_k + i];
  }
  Guarded<Out> out(size_t(count) * hidden, 0xff);  // NaN
  const ptrdiff_t row = ptrdiff_t(hidden) * (float_x ? 4 : 2), picks = ptrdiff_t(top_k) * 4;
  lk::Forward call{};
  call.x = float_x ? static_cast<const void*>(wide.data()) : narrow.data();
  call.x_stride = row;
  call.x_type = float_x ? lk::Type::f32 : lk::Type::bf16;
  call.tokens = count;
  call.routing = {ids.data(), picks, false, weights.data(), picks, tokens.top_k};
  call.out = out.data();
  call.out_stride = ptrdiff_t(hidden * sizeof(Out));
  call.out_type = sizeof(Out) == 4 ? lk::Type::f32 : lk::Type::bf16;
  call.scale = tokens.scale;
  call.weight_on_input = tokens.weight_on_input;
  experts.forward(call);
  return out;
}

template <class T> bool same_bits(const Guarded<T>& a, const T* b) { return memcmp(a.data(), b, a.size() * sizeof(T)) == 0; }

}  // namespace check
