// Kernels of several source trees in one program, by turns on one thread. __main__.py compiles each tree's kernels under
// a name of its own and lists the names in VARIANTS.
//
//   turns FORMAT ROWS SECONDS HIDDEN WIDTH
//
// Prints one line per phase and variant: phase, name, median seconds, share of the dot-product peak measured around each
// call, median and quartile distance of the time relative to the first variant's in the same round, and whether the
// results have the first variant's bits.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "check/numbers.h"
#include "cpu.h"
#include "kernels.h"
#include "memory.h"

#define X(name) extern const lk::Kernels lk_kernels_##name;
VARIANTS
#undef X

namespace {

struct Variant {
  const char* name;
  const lk::Kernels* kernels;
};
#define X(name) {#name, &lk_kernels_##name},
const std::vector<Variant> kVariants = {VARIANTS};
#undef X

using lk::Format;
using lk::Scale;
const std::map<std::string, lk::Coding> kCodings = {
    {"bf16", {Format::bf16, 0, Scale::none, false}},       {"f16", {Format::f16, 0, Scale::none, false}},
    {"fp8", {Format::fp8, 0, Scale::none, false}},         {"fp8_block", {Format::fp8, 128, Scale::f32_shared, false}},
    {"mxfp8", {Format::mxfp8, 32, Scale::e8m0, false}},    {"mxfp4", {Format::mxfp4, 32, Scale::e8m0, false}},
    {"nvfp4", {Format::nvfp4, 16, Scale::e4m3, false}},    {"int4", {Format::int4, 128, Scale::bf16, false}},
    {"int4_zeros", {Format::int4, 128, Scale::f16, true}}};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double at_share(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[size_t(share * double(values.size() - 1) + 0.5)];
}

size_t last_level_cache() {
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? size_t(bytes) : size_t(32) << 20;  // Arm's C library does not know
}

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Random codes without NaN and of moderate size, scales of about 1/100, zero points of 7.
void fill(const lk::Coding& coding, const lk::PanelLayout& layout, size_t panels, uint8_t* to, check::Random& random) {
  const lk::Panels p = lk::panels_at(to, layout, panels);
  for (size_t i = 0; i < panels * layout.codes; ++i) p.codes[i] = uint8_t(random.bits());
  for (size_t i = 0; i < panels * layout.codes; i += 2) {
    const double value = random.normal() * 0.02;
    const uint16_t bits = coding.format == Format::bf16 ? check::to_bf16(value) : check::to_f16(value);
    if (lk::kCodeBits[int(coding.format)] == 16) memcpy(p.codes + i, &bits, 2);
  }
  if (lk::kCodeBits[int(coding.format)] == 8)
    for (size_t i = 0; i < panels * layout.codes; ++i) p.codes[i] &= 0xbf;  // below 2, so no NaN
  const std::map<Scale, uint32_t> scales = {{Scale::none, 0}, {Scale::e8m0, 0x78787878}, {Scale::e4m3, 0x08080808}, {Scale::bf16, 0x3c243c24},
                                            {Scale::f16, 0x211f211f}, {Scale::f32, 0x3c23d70a}, {Scale::f32_shared, 0x3c23d70a}};
  const uint32_t scale = scales.at(coding.scale);
  for (size_t i = 0; i < panels * layout.scales; i += 4) memcpy(p.scales + i, &scale, 4);
  memset(p.zeros, 7, panels * layout.zeros);
}

struct Case {
  lk::Coding coding;
  int rows, hidden, width;
  double seconds;
};

// One phase of one expert with `rows` rows; `down` has the other shape.
void measure(const Case& c, bool down) {
  const int depth = down ? c.width : c.hidden, columns = down ? c.hidden : c.width;
  const lk::PanelLayout layout = lk::panel_layout(c.coding, depth);
  const int tiles = (columns + lk::kColumns - 1) / lk::kColumns;
  const size_t panels = size_t(tiles) * (down ? 1 : 2), bytes = round_up(layout.bytes(panels), 4096), variants = kVariants.size();
  // No variant may find in a cache what another has just read: an expert comes round again after four caches' worth,
  // and to every variant in turn.
  size_t experts = last_level_cache() * 4 / bytes + 1;
  experts += experts % variants == 0;
  check::Random random(1);
  const lk::Buffer weights(experts * bytes, true);
  fill(c.coding, layout, panels, weights.data(), random);
  for (size_t e = 1; e < experts; ++e) memcpy(weights.data() + e * bytes, weights.data(), bytes);

  // Rows an odd number of cache lines apart, as the engine has them.
  const size_t values = size_t(layout.depth) + (layout.zeros ? size_t(layout.depth / lk::kSumOf * 2) : 0), stride = (values + 31) / 32 * 32 | 32;
  const size_t out_stride = size_t(tiles) * lk::kColumns | 32;
  std::vector<uint16_t> x(stride * size_t(c.rows)), act(out_stride * size_t(c.rows));
  std::vector<float> out(out_stride * size_t(c.rows)), weight(size_t(c.rows), 0.125f);
  std::vector<const uint16_t*> x_rows;
  std::vector<uint16_t*> act_rows;
  std::vector<float*> out_rows;
  for (size_t r = 0; r < size_t(c.rows); ++r) {
    uint16_t* const row = &x[r * stride];
    for (int k = 0; k < depth; ++k) row[k] = check::to_bf16(random.normal());
    if (layout.zeros) kVariants[0].kernels->sums(row, reinterpret_cast<float*>(row + layout.depth), layout.depth);
    x_rows.push_back(row);
    act_rows.push_back(&act[r * out_stride]);
    out_rows.push_back(&out[r * out_stride]);
  }
  size_t scratch_bytes = 0;
  for (const Variant& v : kVariants) scratch_bytes = std::max(scratch_bytes, v.kernels->scratch);
  const lk::Buffer scratch(scratch_bytes + 64, true);

  const auto call = [&](const lk::Kernels& kernels, size_t expert) {
    lk::Product product{lk::panels_at(weights.data() + expert * bytes, layout, panels), &layout, 0, tiles, x_rows.data(), c.rows, 1, scratch.data(), false, false};
    const lk::FormatKernels& format = kernels.format[int(c.coding.format)];
    if (down) return format.down({product, 1, nullptr, nullptr, weight.data(), out_rows.data()});
    format.gate_up({product, 1, 1, nullptr, nullptr, nullptr, nullptr, nullptr, {}, act_rows.data(), false, columns, 0});
  };
  std::vector<std::vector<uint8_t>> results;
  for (const Variant& v : kVariants) {
    std::fill(out.begin(), out.end(), 0.0f);
    memset(act.data(), 0xff, act.size() * 2);
    call(*v.kernels, 0);
    const uint8_t* const from = down ? reinterpret_cast<uint8_t*>(out.data()) : reinterpret_cast<uint8_t*>(act.data());
    results.emplace_back(from, from + (down ? out.size() * 4 : act.size() * 2));
  }

  std::vector<std::vector<double>> seconds(variants), shares(variants), ratios(variants);
  float sink[16] = {};
  const double flop = 2.0 * c.rows * layout.depth * double(panels) * lk::kColumns, end = now() + c.seconds;
  size_t visit = 0;
  for (size_t round = 0; now() < end || round < 5; ++round) {
    std::vector<double> took(variants);
    for (size_t i = 0; i < variants; ++i, ++visit) {
      const size_t v = round & 1 ? variants - 1 - i : i;
      const lk::Kernels& kernels = *kVariants[v].kernels;
      const auto peak = [&] {
        const double start = now(), done = kernels.peak(20000, sink);
        return done / (now() - start);
      };
      const double before = peak(), start = now();
      call(kernels, visit % experts);
      took[v] = now() - start;
      shares[v].push_back(flop / took[v] / std::max(before, peak()));
    }
    for (size_t v = 0; v < variants; ++v) {
      seconds[v].push_back(took[v]);
      ratios[v].push_back(took[v] / took[0]);
    }
  }
  for (size_t v = 0; v < variants; ++v)
    std::printf("%s %s %.6g %.4f %.4f %.4f %d\n", down ? "down" : "gate_up", kVariants[v].name, at_share(seconds[v], 0.5), at_share(shares[v], 0.5),
                at_share(ratios[v], 0.5), at_share(ratios[v], 0.75) - at_share(ratios[v], 0.25), int(results[v] == results[0]));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  lk::cpu_features();  // asks the system for the tile registers, without which a tile's instruction is an illegal one
  const lk::FlushSubnormals flush;
  const Case c{kCodings.at(argv[1]), std::atoi(argv[2]), std::atoi(argv[4]), std::atoi(argv[5]), std::atof(argv[3])};
  measure(c, false);
  measure(c, true);
}
