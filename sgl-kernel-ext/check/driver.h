// The engine driven with a reference layer: packs it, and runs it from guarded arrays into poisoned ones.
#pragma once

#include <sched.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check/reference.h"
#include "dispatch.h"

namespace check {

// One engine per combination of arguments; the machine need not have the NUMA nodes, and more threads than
// processors share them.
inline std::shared_ptr<lk::Engine> engine(const std::string& isa, int threads = 2, const std::vector<int>& nodes = {}, bool batch_invariant = false) {
  static std::map<std::tuple<std::string, int, std::vector<int>, bool>, std::shared_ptr<lk::Engine>> made;
  auto& found = made[{isa, threads, nodes, batch_invariant}];
  if (found) return found;
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cpus, all;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &set)) all.push_back(i);
  for (int i = 0; i < threads; ++i) cpus.push_back(all.empty() ? 0 : all[size_t(i) % all.size()]);
  return found = std::make_shared<lk::Engine>(cpus, isa, true, 50, false, nodes, false, batch_invariant);
}

inline void pack_part(lk::Experts& experts, int e, lk::Part part, const Weights& w) {
  int64_t refused = experts.pack_codes(e, part, {w.codes.data(), w.row_bytes(), 4});
  if (w.groups) refused += experts.pack_scales(e, part, {w.scales.data(), w.scale_row_bytes(), 4});
  if (w.coding.zeros) refused += experts.pack_zeros(e, part, {w.zeros.data(), w.groups, 4});
  if (w.columns.size()) experts.set_column_scales(e, part, w.columns.data());
  experts.set_global_scale(e, part, w.global);
  if (refused) throw std::runtime_error("packing refuses values of a clean matrix");
}

inline lk::Experts pack(const Layer& layer, std::shared_ptr<lk::Engine> engine) {
  lk::Experts experts(std::move(engine), layer.form.coding, {int(layer.experts.size()), layer.hidden, layer.width}, layer.activation,
                      layer.bias, layer.form.columns);
  for (int e = 0; e < int(layer.experts.size()); ++e) {
    const Layer::Expert& from = layer.experts[size_t(e)];
    pack_part(experts, e, lk::Part::gate, from.gate);
    pack_part(experts, e, lk::Part::up, from.up);
    pack_part(experts, e, lk::Part::down, from.down);
    for (int part = 0; layer.bias && part < 3; ++part) experts.set_bias(e, lk::Part(part), from.bias[part].data());
  }
  return experts;
}

inline uint32_t bits_of(lk::Type type, double value) {
  if (type == lk::Type::f32) return scale_bits(S::f32, value);
  if (std::isnan(value)) return type == lk::Type::bf16 ? 0x7fc0 : 0x7e00;
  return type == lk::Type::bf16 ? to_bf16(value) : to_f16(value);
}
inline size_t size_of(lk::Type type) { return type == lk::Type::f32 ? 4 : 2; }

// Tokens first..first + count of a batch through the experts, as bytes of type `out_type`.
inline Guarded<uint8_t> run_raw(lk::Experts& experts, const Tokens& tokens, int first, int count, lk::Type out_type) {
  const size_t hidden = size_t(experts.shape().hidden), top_k = size_t(tokens.top_k), element = size_of(tokens.type);
  Guarded<uint8_t> x(size_t(count) * hidden * element);
  for (size_t i = 0; i < size_t(count) * hidden; ++i) {
    const uint32_t bits = bits_of(tokens.type, tokens.x[size_t(first) + i / hidden][i % hidden]);
    memcpy(x.data() + i * element, &bits, element);
  }
  Guarded<int32_t> ids(size_t(count) * top_k);
  Guarded<float> weights(size_t(count) * top_k);
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = tokens.ids[size_t(first) * top_k + i];
    weights[i] = tokens.weights[size_t(first) * top_k + i];
  }
  Guarded<uint8_t> out(size_t(count) * hidden * size_of(out_type), 0xff);  // NaN in every type
  lk::Forward call{};
  call.x = x.data();
  call.x_stride = ptrdiff_t(hidden * element);
  call.x_type = tokens.type;
  call.tokens = count;
  call.routing = {ids.data(), ptrdiff_t(top_k) * 4, false, weights.data(), ptrdiff_t(top_k) * 4, tokens.top_k};
  call.out = out.data();
  call.out_stride = ptrdiff_t(hidden * size_of(out_type));
  call.out_type = out_type;
  call.scale = tokens.scale;
  call.weight_on_input = tokens.weight_on_input;
  experts.forward(call);
  return out;
}

inline std::vector<float> run(lk::Experts& experts, const Tokens& tokens, int first, int count) {
  const Guarded<uint8_t> raw = run_raw(experts, tokens, first, count, lk::Type::f32);
  std::vector<float> out(raw.size() / 4);
  memcpy(out.data(), raw.data(), raw.size());
  return out;
}

// Whether an output in a narrow type is the float32 output rounded once.
inline bool is_rounded(const std::vector<float>& full, const Guarded<uint8_t>& narrow, lk::Type type) {
  bool same = narrow.size() == full.size() * 2;
  for (size_t i = 0; same && i < full.size(); ++i) {
    uint16_t bits;
    memcpy(&bits, narrow.data() + i * 2, 2);
    same = bits == bits_of(type, double(full[i]));
  }
  return same;
}

inline bool same_bits(const std::vector<float>& a, const float* b) { return memcmp(a.data(), b, a.size() * sizeof(float)) == 0; }

}  // namespace check
