#include "bind_handover.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sched.h>

#include <cmath>
#include <tuple>

#include "moe/handover.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lk {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw nb::value_error(what.c_str()); }

Type type_of(const std::string& name) {
  if (name == "bf16") return Type::bf16;
  if (name == "f16") return Type::f16;
  if (name == "f32") return Type::f32;
  refuse("unknown dtype " + name + "; known are bf16, f16, f32");
}

// The threads hold plain references, so the Python side of what they refer to is kept here.
struct PyHandover {
  Handover native;
  nb::object buffers;
  std::vector<nb::object> experts_of;  // by layer

  PyHandover(std::vector<int> cpus, int cpu, int spin_us, int patience_ms) : native(std::move(cpus), cpu, spin_us, patience_ms) {}

  void bind(uintptr_t control, uintptr_t x, uintptr_t ids, uintptr_t weights, uintptr_t out, int64_t x_bytes, int64_t out_bytes,
            int64_t routes, nb::object owner) {
    for (uintptr_t address : {control, x, ids, weights, out})
      if (address == 0 || address % 64) refuse("control, x, ids, weights and out must be addresses on multiples of 64");
    if (x_bytes < 1 || out_bytes < 1 || routes < 1) refuse("x_bytes, out_bytes and routes must be positive");
    native.bind({reinterpret_cast<Control*>(control), reinterpret_cast<const void*>(x), reinterpret_cast<const int32_t*>(ids),
                 reinterpret_cast<const float*>(weights), reinterpret_cast<void*>(out), x_bytes, out_bytes, routes});
    buffers = std::move(owner);
  }
  int add(const std::string& name, nb::object experts, int top_k, const std::string& dtype, float scale, bool weight_on_input,
          int64_t ns_per_row) {
    if (top_k < 1) refuse("top_k must be at least 1");
    if (!std::isfinite(scale)) refuse("scale is not finite");
    if (ns_per_row < 0) refuse("ns_per_row is negative");
    const Type type = type_of(dtype);
    auto* native_experts = reinterpret_cast<Experts*>(nb::cast<uintptr_t>(experts.attr("address")));
    experts_of.push_back(std::move(experts));
    return native.add({name, native_experts, top_k, type, scale, weight_on_input, ns_per_row});
  }
  uintptr_t ticket(int layer, int64_t rows) {
    if (rows < 1 || rows > native.capacity(layer)) refuse(std::to_string(rows) + " rows do not fit the buffers");
    return reinterpret_cast<uintptr_t>(native.ticket(layer, uint32_t(rows)));
  }
  nb::dict stats() const {
    const Handover::Stats s = native.stats();
    nb::dict d;
    d["calls"] = s.calls;
    d["steps"] = s.steps;
    d["rows"] = s.rows;
    d["busy_us"] = double(s.busy_ns) / 1e3;
    d["wait_us"] = double(s.wait_ns) / 1e3;
    return d;
  }
};

}  // namespace

void bind_handover(nb::module_& m) {
  nb::class_<PyHandover>(m, "Handover", "Answers requests for experts that arrive in pinned memory; see moe/handover.h.")
      .def("__init__", [](PyHandover* self, std::vector<int> cpus, int cpu, int spin_us, int patience_ms) {
             for (int each : cpus) if (each < 0 || each >= CPU_SETSIZE) refuse("cpu " + std::to_string(each) + " is out of range");
             if (cpu < -1 || cpu >= CPU_SETSIZE) refuse("cpu " + std::to_string(cpu) + " is out of range");
             if (spin_us < 0 || patience_ms < 1) refuse("spin_us must not be negative and patience_ms positive");
             new (self) PyHandover(std::move(cpus), cpu, spin_us, patience_ms);
           }, "cpus"_a, "cpu"_a = -1, "spin_us"_a = 2000, "patience_ms"_a = 4000)
      .def_prop_ro_static("control_bytes", [](nb::handle) { return sizeof(Control); })
      .def("bind", &PyHandover::bind, "control"_a, "x"_a, "ids"_a, "weights"_a, "out"_a, "x_bytes"_a, "out_bytes"_a, "routes"_a,
           "owner"_a, "Where requests lie; `owner` is kept alive. Again, while no request is open, moves to other buffers.")
      .def("add", &PyHandover::add, "name"_a, "experts"_a, "top_k"_a, "dtype"_a, "scale"_a = 1.0f, "weight_on_input"_a = false,
           "ns_per_row"_a = 0, "The number by which requests name this layer.")
      .def("capacity", [](PyHandover& h, int layer) { return h.native.capacity(layer); }, "layer"_a, "Rows of one request at most.")
      .def("ticket", &PyHandover::ticket, "layer"_a, "rows"_a, "What to pass to the host functions for this request.")
      .def_prop_ro_static("host_functions", [](nb::handle) {
        return std::make_tuple(reinterpret_cast<uintptr_t>(&Handover::submit), reinterpret_cast<uintptr_t>(&Handover::join));
      }, "Addresses of two functions for cudaLaunchHostFunc: ask, and wait for the answer.")
      .def("failure", [](PyHandover& h, int ms) { return h.native.failure(ms); }, "ms"_a = 0, nb::call_guard<WithoutGil>(),
           "Waits up to `ms` and says which layer failed and why, or nothing.")
      .def("abort", [](PyHandover& h) { h.native.abort(); }, "Lets the GPU go at once; what it then has is no result.")
      .def("close", [](PyHandover& h) { h.native.close(); }, nb::call_guard<WithoutGil>(), "Ends the threads.")
      .def("stats", &PyHandover::stats, "Sums since the start: calls, steps, rows, and microseconds busy and waited (0 with host functions).");
}

}  // namespace lk
