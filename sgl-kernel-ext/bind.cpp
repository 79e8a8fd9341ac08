// Python's view of the engine, and where its arguments are checked (bind_handover.cpp: the hand-over's): behind it
// everything is plain pointers. Addresses come as integers, so neither torch nor numpy is needed or linked.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sched.h>

#include <algorithm>
#include <cmath>

#include "bind_handover.h"
#include "cpu.h"
#include "dispatch.h"
#include "moe/experts.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr int kMost = 1 << 20;  // experts, columns and k of a group: sums of two stay far inside an int
constexpr int kAbi = 4;  // raised when a signature below changes; the Python side compares it
constexpr const char* kFormatNames[] = {"bf16", "f16", "fp8", "mxfp8", "mxfp4", "nvfp4", "int4"};

[[noreturn]] void refuse(const std::string& what) { throw nb::value_error(what.c_str()); }

template <class Value> Value one_of(const std::string& what, const std::string& name, std::initializer_list<std::pair<const char*, Value>> all) {
  std::string names;
  for (const auto& [key, value] : all) {
    if (name == key) return value;
    names += (names.empty() ? "" : ", ") + std::string(key);
  }
  refuse("unknown " + what + " " + name + "; known are " + names);
}

lk::Format format_of(const std::string& name) {
  std::string names;
  for (int i = 0; i < lk::kFormats; ++i) {
    if (name == kFormatNames[i]) return lk::Format(i);
    names += (i ? ", " : "") + std::string(kFormatNames[i]);
  }
  refuse("unknown format " + name + "; known are " + names);
}

// What the checkpoint may choose per format; everything else is refused.
lk::Coding coding_of(const std::string& name, int group, const std::string& scales, bool zeros) {
  using lk::Format, lk::Scale;
  const Format format = format_of(name);
  const auto fixed = [&](int k, Scale scale) {
    if (group != 0 || !scales.empty()) refuse(name + " has its own groups and scales; leave group 0 and scales empty");
    return lk::Coding{format, k, scale, false};
  };
  if (zeros && format != Format::int4) refuse(name + " has no zero points");
  switch (format) {
    case Format::bf16: case Format::f16: return fixed(0, Scale::none);
    case Format::mxfp8: case Format::mxfp4: return fixed(32, Scale::e8m0);
    case Format::nvfp4: return fixed(16, Scale::e4m3);
    default: break;
  }
  if (group < 0 || group % lk::kUnit || group > kMost)
    refuse("group must be 0 (none) or a multiple of " + std::to_string(lk::kUnit) + " up to " + std::to_string(kMost) + ", not " + std::to_string(group));
  if ((group == 0) != scales.empty()) refuse("group and scales go together: both, or neither");
  if (group == 0 && zeros) refuse("zero points need a group; for one per column use a group of the whole depth");
  if (group == 0) return {format, 0, Scale::none, false};
  if (format == Format::fp8)
    return {format, group, one_of<Scale>("scales", scales, {{"f32", Scale::f32}, {"f32_shared", Scale::f32_shared}}), false};
  return {format, group, one_of<Scale>("scales", scales, {{"bf16", Scale::bf16}, {"f16", Scale::f16}, {"f32", Scale::f32}}), zeros};
}
lk::Part part_of(const std::string& name) {
  return one_of<lk::Part>("part", name, {{"gate", lk::Part::gate}, {"up", lk::Part::up}, {"down", lk::Part::down}});
}
lk::Type type_of(const std::string& name) {
  return one_of<lk::Type>("dtype", name, {{"bf16", lk::Type::bf16}, {"f16", lk::Type::f16}, {"f32", lk::Type::f32}});
}
template <class T> T* address(uintptr_t value, const char* what) {
  if (value == 0) refuse(std::string(what) + " is a null address");
  return reinterpret_cast<T*>(value);
}

void check_shape(int64_t experts, int64_t hidden, int64_t width) {
  if (experts < 1 || hidden < 1 || width < 1 || experts > kMost || hidden > kMost || width > kMost)
    refuse("experts, hidden and width must be in 1.." + std::to_string(kMost));
}

void check_nodes(const std::vector<int>& nodes, size_t workers) {
  if (!nodes.empty() && nodes.size() != workers)
    refuse("nodes has " + std::to_string(nodes.size()) + " entries for " + std::to_string(workers) + " cpus; give one each, or none");
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i] < 0 || nodes[i] >= lk::kMaxNodes) refuse("node " + std::to_string(nodes[i]) + " is out of range");
    if (i > 0 && nodes[i] != nodes[i - 1] && std::find(nodes.begin(), nodes.begin() + ptrdiff_t(i), nodes[i]) != nodes.begin() + ptrdiff_t(i))
      refuse("the workers of node " + std::to_string(nodes[i]) + " are not neighbours; order cpus by node");
  }
}

std::shared_ptr<lk::Engine> make_engine(std::vector<int> cpus, const std::string& isa, const std::string& bind, int spin_us, bool huge,
                                        const std::vector<int>& nodes, bool place, bool batch_invariant, bool split) {
  if (cpus.empty()) refuse("cpus is empty: an engine needs at least one");
  if (spin_us < 0) refuse("spin_us is negative");
  for (int cpu : cpus)
    if (cpu < 0 || cpu >= CPU_SETSIZE) refuse("cpu " + std::to_string(cpu) + " is out of range");
  if (bind != "core" && bind != "node") refuse("unknown bind " + bind + "; known are core, node");
  check_nodes(nodes, cpus.size());
  if (place && nodes.empty()) refuse("place needs the nodes to place on");
  if (place && !split) refuse("place needs a split over the nodes");
  return std::make_shared<lk::Engine>(std::move(cpus), isa, bind == "core", spin_us, huge, nodes, place, batch_invariant, split);
}

struct PyExperts {
  lk::Experts experts;
  bool has_bias, has_columns;

  void check(int expert) const {
    if (expert < 0 || expert >= experts.shape().experts)
      refuse("expert " + std::to_string(expert) + " is outside 0.." + std::to_string(experts.shape().experts - 1));
  }
  using Pack = int64_t (lk::Experts::*)(int, lk::Part, const lk::Rows&);
  int64_t pack(Pack which, int expert, const std::string& part, uintptr_t ptr, int64_t row_bytes, int64_t word_bytes = 4) {
    check(expert);
    const lk::Part where = part_of(part);
    const lk::Rows rows{address<const uint8_t>(ptr, "the weight"), row_bytes, word_bytes};
    const lk::WithoutGil released;
    return (experts.*which)(expert, where, rows);
  }
  int64_t pack_codes(int expert, const std::string& part, uintptr_t ptr, int64_t row_bytes, int64_t word_bytes) {
    if (word_bytes != 4 && lk::kCodeBits[int(experts.coding().format)] != 4) refuse("word_bytes is for 4-bit codes");
    return pack(&lk::Experts::pack_codes, expert, part, ptr, row_bytes, word_bytes);
  }
  int64_t pack_scales(int expert, const std::string& part, uintptr_t ptr, int64_t row_bytes) {
    if (experts.coding().scale == lk::Scale::none) refuse("this layer has no group scales");
    return pack(&lk::Experts::pack_scales, expert, part, ptr, row_bytes);
  }
  int64_t pack_zeros(int expert, const std::string& part, uintptr_t ptr, int64_t row_bytes) {
    if (!experts.coding().zeros) refuse("this layer was made without zero points");
    return pack(&lk::Experts::pack_zeros, expert, part, ptr, row_bytes);
  }
  void column_scales(int expert, const std::string& part, uintptr_t values) {
    check(expert);
    if (!has_columns) refuse("this layer was made without column scales");
    experts.set_column_scales(expert, part_of(part), address<const float>(values, "the column scales"));
  }
  void global_scale(int expert, const std::string& part, float value) {
    check(expert);
    if (!std::isfinite(value)) refuse("the global scale of expert " + std::to_string(expert) + " is not finite");
    experts.set_global_scale(expert, part_of(part), value);
  }
  void bias(int expert, const std::string& part, uintptr_t values) {
    check(expert);
    if (!has_bias) refuse("this layer was made without bias");
    experts.set_bias(expert, part_of(part), address<const float>(values, "the bias"));
  }
  void forward(uintptr_t x, int64_t x_row_bytes, const std::string& x_dtype, int64_t tokens, uintptr_t ids, int64_t ids_row_bytes,
               const std::string& ids_dtype, uintptr_t w, int64_t w_row_bytes, int top_k, uintptr_t out, int64_t out_row_bytes,
               const std::string& out_dtype, float scale, bool weight_on_input) {
    if (tokens < 0) refuse("tokens is negative");
    if (top_k < 1) refuse("top_k must be at least 1");
    const bool wide = one_of<bool>("id dtype", ids_dtype, {{"i32", false}, {"i64", true}});
    const lk::Type x_type = type_of(x_dtype), out_type = type_of(out_dtype);
    if (tokens == 0) return;
    const lk::Forward call{address<const void>(x, "x"), x_row_bytes, x_type, tokens,
                           {address<const void>(ids, "ids"), ids_row_bytes, wide, address<const void>(w, "w"), w_row_bytes, top_k},
                           address<void>(out, "out"), out_row_bytes, out_type, scale, weight_on_input};
    const lk::WithoutGil released;
    experts.forward(call);
  }
};

lk::Activation activation_of(const std::string& name, float alpha, float limit, bool limit_after, float up_bias) {
  lk::Activation a;
  a.gate = one_of<lk::Gate>("activation", name, {{"silu", lk::Gate::silu}, {"gelu", lk::Gate::gelu},
                                                 {"gelu_tanh", lk::Gate::gelu_tanh}, {"relu2", lk::Gate::relu2}});
  if (!std::isfinite(alpha) || !std::isfinite(limit) || limit < 0 || !std::isfinite(up_bias))
    refuse("alpha, limit and up_bias must be finite, limit not negative");
  a.alpha = alpha;
  a.limit = limit;
  a.limit_after = limit_after;
  a.up_bias = up_bias;
  return a;
}

nb::list list_isas() {
  nb::list all;
  for (const auto& isa : lk::isas()) {
    nb::dict row;
    row["name"] = isa.kernels->name;
    row["supported"] = isa.missing.empty();
    row["missing"] = isa.missing;
    row["lane"] = isa.kernels->lane;
    all.append(row);
  }
  return all;
}

}  // namespace

NB_MODULE(sgl_kernel_ext, m) {
  nb::set_leak_warnings(false);  // an engine lives until the process ends
  lk::WithoutGil::watch();
  m.doc() = "CPU kernels and engine of sglang-lk: mixture-of-experts layers from packed host memory.";
  m.attr("ABI") = kAbi;
  m.def("isas", &list_isas, "Instruction sets of this build, ascending preference: name, supported, missing, lane.");
  m.def("formats", [] { return std::vector<std::string>(std::begin(kFormatNames), std::end(kFormatNames)); });
  m.def("cpu", [] {
    nb::dict d;
    d["brand"] = lk::cpu_brand();
    d["features"] = lk::cpu_features();
    return d;
  }, "Processor name and the features that kernels ask for, as far as the system enables them.");
  m.def("packed_bytes", [](const std::string& format, int hidden, int width, int group, const std::string& scales, bool zeros) {
    check_shape(1, hidden, width);
    return lk::Experts::packed_bytes(coding_of(format, group, scales, zeros), hidden, width);
  }, "format"_a, "hidden"_a, "width"_a, "group"_a = 0, "scales"_a = "", "zeros"_a = false, "Bytes of one packed expert, padding included.");

  nb::class_<lk::Engine>(m, "Engine", "Worker threads, kernel table and workspace that the layers of one process share.")
      .def(nb::new_(&make_engine), "cpus"_a, "isa"_a = "", "bind"_a = "core", "spin_us"_a = 200, "huge"_a = true,
           "nodes"_a = std::vector<int>(), "place"_a = false, "batch_invariant"_a = false, "split"_a = true,
           "nodes: the NUMA node of each worker, neighbours together. split: every expert is split over them. place: the numbers "
           "are the machine's, and memory is taken from them. batch_invariant: no row's bits depend on the other rows of a call, also "
           "with matrix multipliers.")
      .def_prop_ro("isa", [](lk::Engine& e) { return e.kernels().name; })
      .def_prop_ro("threads", [](lk::Engine& e) { return e.pool().size(); })
      .def_prop_ro("cpus", [](lk::Engine& e) { return e.pool().cpus(); })
      .def_prop_ro("unbound", [](lk::Engine& e) { return e.pool().unbound(); })
      .def_prop_ro("nodes", [](lk::Engine& e) { return e.pool().homes(); }, "The NUMA node of each worker.")
      .def_prop_ro("unplaced", [](lk::Engine& e) { return e.unplaced(); }, "Why memory cannot be taken from a node by name; empty: it can.")
      .def("stats", [](lk::Engine& e) {
        nb::dict d;
        d["calls"] = e.stats.calls;
        d["tokens"] = e.stats.tokens;
        d["busy_us"] = double(e.stats.busy_ns) / 1e3;
        return d;
      })
      .def("read_gb_per_s", &lk::Engine::read_gb_per_s, "megabytes"_a = 512.0, "seconds"_a = 0.2, nb::call_guard<lk::WithoutGil>(),
           "GB/s of a plain reader with all threads over 2 MB pages.")
      .def("dot_gflop_per_s", &lk::Engine::dot_gflop_per_s, "seconds"_a = 0.2, nb::call_guard<lk::WithoutGil>(),
           "GFLOP/s of this instruction set's dot product on registers with all threads.")
      .def("call_us", [](std::shared_ptr<lk::Engine> e, double seconds) { return lk::call_us(std::move(e), seconds); }, "seconds"_a = 0.05,
           nb::call_guard<lk::WithoutGil>(), "Microseconds of a forward call with almost no work, the best of many rounds.");

  nb::class_<PyExperts>(m, "Experts", "The routed experts of one layer, packed, and their forward pass.")
      .def("__init__",
           [](PyExperts* self, std::shared_ptr<lk::Engine> engine, const std::string& format, int experts, int hidden, int width,
              const std::string& activation, float alpha, float limit, bool limit_after, float up_bias, bool bias, int group,
              const std::string& scales, bool zeros, bool column_scales) {
             check_shape(experts, hidden, width);
             const lk::Coding coding = coding_of(format, group, scales, zeros);
             const lk::Activation a = activation_of(activation, alpha, limit, limit_after, up_bias);
             new (self) PyExperts{lk::Experts(std::move(engine), coding, {experts, hidden, width}, a, bias, column_scales), bias, column_scales};
           },
           "engine"_a, "format"_a, "experts"_a, "hidden"_a, "width"_a, "activation"_a = "silu", "alpha"_a = 1.0f, "limit"_a = 0.0f,
           "limit_after"_a = false, "up_bias"_a = 0.0f, "bias"_a = false, "group"_a = 0,
           "scales"_a = "", "zeros"_a = false, "column_scales"_a = false)
      .def_prop_ro("address", [](PyExperts& e) { return reinterpret_cast<uintptr_t>(&e.experts); }, "For Handover.add.")
      .def_prop_ro("bytes", [](PyExperts& e) { return e.experts.bytes(); })
      .def_prop_ro("experts", [](PyExperts& e) { return e.experts.shape().experts; })
      .def_prop_ro("hidden", [](PyExperts& e) { return e.experts.shape().hidden; })
      .def_prop_ro("width", [](PyExperts& e) { return e.experts.shape().width; })
      .def_prop_ro("format", [](PyExperts& e) { return kFormatNames[int(e.experts.coding().format)]; })
      .def_prop_ro("shares", [](PyExperts& e) {
        nb::list all;
        for (const lk::Share& s : e.experts.shares()) all.append(nb::make_tuple(s.first_tile, s.tiles, s.first_panel, s.panels));
        return all;
      }, "What each node holds of every expert: its first tile of gate and up and how many, its first panel of down and how many.")
      .def("packed", [](PyExperts& e, int expert, int share) {
        e.check(expert);
        const auto& all = e.experts.shares();
        if (share < 0 || size_t(share) >= all.size()) refuse("share " + std::to_string(share) + " is outside 0.." + std::to_string(all.size() - 1));
        const lk::Share& s = all[size_t(share)];
        return nb::bytes(reinterpret_cast<const char*>(s.weights.data()) + size_t(expert) * s.expert_bytes, s.expert_bytes);
      }, "expert"_a, "share"_a = 0, "A copy of one expert's packed bytes on one node (docs/reference/packed-layout.md).")
      .def("take", [](PyExperts& e) { e.experts.take(); }, nb::call_guard<lk::WithoutGil>(),
           "Touches the packed memory with all threads, so that packing does not wait for the system to clear pages.")
      .def("pack_codes", &PyExperts::pack_codes, "expert"_a, "part"_a, "ptr"_a, "row_bytes"_a, "word_bytes"_a = 4,
           "Packs one matrix from checkpoint rows; returns how many values are not finite. word_bytes: 4-bit codes, from one "
           "run of eight k to the next.")
      .def("pack_scales", &PyExperts::pack_scales, "expert"_a, "part"_a, "ptr"_a, "row_bytes"_a,
           "Packs one matrix's group scales; returns how many are refused (NaN, infinite, negative E4M3).")
      .def("pack_zeros", &PyExperts::pack_zeros, "expert"_a, "part"_a, "ptr"_a, "row_bytes"_a,
           "Packs one matrix's zero points, a byte per column and group; returns how many are above 16.")
      .def("set_column_scales", &PyExperts::column_scales, "expert"_a, "part"_a, "ptr"_a, "One float32 factor per output column.")
      .def("repeat_first", [](PyExperts& e) { e.experts.repeat_first(); }, nb::call_guard<lk::WithoutGil>(),
           "Makes every other expert a copy of expert 0, for layers of random weights.")
      .def("set_global_scale", &PyExperts::global_scale, "expert"_a, "part"_a, "value"_a)
      .def("set_bias", &PyExperts::bias, "expert"_a, "part"_a, "ptr"_a)
      .def("forward", &PyExperts::forward, "x_ptr"_a, "x_row_bytes"_a, "x_dtype"_a, "tokens"_a, "ids_ptr"_a, "ids_row_bytes"_a,
           "ids_dtype"_a, "w_ptr"_a, "w_row_bytes"_a, "top_k"_a, "out_ptr"_a, "out_row_bytes"_a, "out_dtype"_a, "scale"_a = 1.0f,
           "weight_on_input"_a = false,
           "out[t] = scale * sum over k of w[t, k] * expert[ids[t, k]](x[t]). Ids outside the experts add nothing.");
  lk::bind_handover(m);
}
