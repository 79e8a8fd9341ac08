// lk_selfcheck: every format on every instruction set of this machine against float64, and what results must not
// depend on. Needs no Python, no checkpoint and no GPU.
//
//   lk_selfcheck [--isa NAME]... [--format NAME]... [--expect NAME] [--list]
//
// --expect fails unless that instruction set is the one chosen; --list stops after the machine's facts. Ends with "N passed, N failed" and 0 only if nothing failed; 2 for an instruction set that cannot run here.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <stdexcept>

#include "check/driver.h"
#include "cpu.h"

namespace check {
namespace {

struct Shape { int experts, hidden, width, top_k, tokens; };
// One group, a cut group, odd sizes, every number of rows that a kernel treats apart.
constexpr Shape kShapes[] = {{4, 32, 16, 2, 1}, {4, 64, 16, 1, 2},   {3, 33, 17, 2, 3},  {2, 127, 31, 2, 4},  {2, 128, 129, 1, 5}, {1, 96, 80, 1, 7},
                             {2, 160, 48, 1, 8}, {1, 64, 32, 1, 9},  {1, 256, 16, 1, 13}, {2, 288, 33, 2, 20}, {1, 264, 64, 1, 67}, {1, 1, 1, 1, 1}};

lk::Activation activation(lk::Gate gate, float alpha = 1, float limit = 0, bool after = false, float up_bias = 0) {
  lk::Activation a;
  a.gate = gate;
  a.alpha = alpha;
  a.limit = limit;
  a.limit_after = after;
  a.up_bias = up_bias;
  return a;
}
const lk::Activation kActivations[] = {activation(lk::Gate::silu), activation(lk::Gate::silu, 1, 0.4f), activation(lk::Gate::silu, 1, 0.3f, true),
                                       activation(lk::Gate::silu, 1.702f, 7, false, 1), activation(lk::Gate::gelu),
                                       activation(lk::Gate::gelu_tanh), activation(lk::Gate::relu2)};

Tokens random_tokens(const Shape& shape, bool float_x, Random& random) {
  Tokens tokens;
  tokens.count = shape.tokens;
  tokens.top_k = shape.top_k;
  for (int t = 0; t < shape.tokens; ++t) {
    std::vector<double> row;
    for (int k = 0; k < shape.hidden; ++k) {
      const double value = random.normal();
      row.push_back(float_x ? double(float(value)) : from_bf16(to_bf16(value)));
    }
    tokens.x.push_back(row);
    for (int k = 0; k < shape.top_k; ++k) {
      tokens.ids.push_back(random.below(shape.experts + 1) - 1);
      tokens.weights.push_back(float(random.uniform()));
    }
  }
  return tokens;
}

// What was compared on one instruction set and format; the first failure of each kind is said at once.
class Report {
 public:
  explicit Report(std::string title) : title_(std::move(title)) {}
  void expect(bool good, const std::string& what) {
    ++(good ? passed : failed);
    if (good || failed > 5) return;
    std::printf("FAIL %s: %s\n", title_.c_str(), what.c_str());
  }
  void within(const Guarded<float>& out, const Result& truth, const std::string& what) {
    double share = 0;
    bool good = true;
    for (size_t i = 0; i < out.size(); ++i) {
      const double error = std::fabs(double(out[i]) - truth.value[i]);
      if (!(error <= truth.bound[i])) good = false;  // NaN fails
      share = std::fmax(share, error / truth.bound[i]);
    }
    worst = std::fmax(worst, share);
    expect(good, what + " differs from float64 by " + std::to_string(share) + " of what is allowed");
  }

  int passed = 0, failed = 0;
  double worst = 0;  // error as a share of what is allowed

 private:
  std::string title_;
};

// Edge shapes and activations, bf16 and float32 activations, against float64 and, on lane instruction sets, the scalar bits.
void check_shapes(const Form& form, const lk::Kernels& isa, Report& report) {
  int turn = 0;
  for (const Shape& shape : kShapes) {
    const bool float_x = turn % 2 == 1, bias = turn % 3 == 2;
    Random random(uint64_t(1000 + turn));
    Layer layer = Layer::random(form, shape.experts, shape.hidden, shape.width, kActivations[size_t(turn) % std::size(kActivations)], bias, random);
    Tokens tokens = random_tokens(shape, float_x, random);
    tokens.scale = turn % 4 == 3 ? 2.5f : 1.0f;
    tokens.weight_on_input = turn % 5 == 4;
    const std::string name = "shape " + std::to_string(shape.hidden) + " x " + std::to_string(shape.width) + ", " + std::to_string(shape.tokens) + " tokens";
    lk::Experts experts = pack(layer, engine(isa.name));
    const Guarded<float> out = run<float>(experts, tokens, float_x, 0, tokens.count);
    report.within(out, forward(layer, tokens, float_x ? 0x1p-15 : 0x1p-8), name);
    if (isa.lane) {
      lk::Experts plain = pack(layer, engine("scalar"));
      report.expect(same_bits(out, run<float>(plain, tokens, float_x, 0, tokens.count).data()), name + ": other bits than scalar");
    }
    const Guarded<uint16_t> narrow = run<uint16_t>(experts, tokens, float_x, 0, tokens.count);
    bool rounded = true;
    for (size_t i = 0; i < out.size(); ++i) rounded &= narrow[i] == to_bf16(double(out[i]));
    report.expect(rounded, name + ": bf16 output is not the rounded float32 output");
    ++turn;
  }
}

// The same bits for any number of threads, and for a token alone, in small and in large batches.
void check_independence(const Form& form, const lk::Kernels& isa, Report& report) {
  const Shape shape{3, 160, 112, 2, 40};
  for (bool float_x : {false, true}) {
    Random random(17);
    Layer layer = Layer::random(form, shape.experts, shape.hidden, shape.width, kActivations[0], false, random);
    const Tokens tokens = random_tokens(shape, float_x, random);
    lk::Experts experts = pack(layer, engine(isa.name));
    const Guarded<float> whole = run<float>(experts, tokens, float_x, 0, shape.tokens);
    for (int threads : {1, 3}) {
      lk::Experts other = pack(layer, engine(isa.name, threads));
      report.expect(same_bits(run<float>(other, tokens, float_x, 0, shape.tokens), whole.data()), "other bits with " + std::to_string(threads) + " threads");
    }
    for (int count : {1, 2, 3, 4, 7, 25})
      report.expect(same_bits(run<float>(experts, tokens, float_x, 11, count), whole.data() + 11 * shape.hidden),
                    "other bits in a batch of " + std::to_string(count));
  }
}

// A matrix whose only entries are ones on the diagonal.
Weights identity(const Form& form, int rows, int depth) {
  Weights w(form, rows, depth);
  const uint32_t one = form.bits == 16 ? 0x3f80 : 2;
  for (int r = 0; r < rows; ++r) {
    if (r < depth) w.set_code(r, r, one);
    for (int g = 0; g < w.groups; ++g) w.scale(r, g) = form.format == lk::Format::mxfp4 ? 127 : 0x38;
  }
  return w;
}

// Every code under every scale comes out as it is. The gate is 1 (bias 1, relu2), the tokens are unit vectors and the
// down matrix is the identity, so an output is one weight of the up matrix.
void check_codes(const Form& form, const lk::Kernels& isa, Report& report) {
  if (form.bits == 16) return;
  const int hidden = 128, width = 128, scales = form.format == lk::Format::mxfp4 ? 240 : 0x7f, first = form.format == lk::Format::mxfp4 ? 8 : 0;
  Layer layer{form, hidden, width, activation(lk::Gate::relu2), {}, true};
  Weights up(form, width, hidden);
  for (int r = 0, next = 0; r < width; ++r) {
    for (int k = 0; k < hidden; ++k) up.set_code(r, k, uint32_t(k + r / 16) & 15);
    for (int g = 0; g < up.groups; ++g) up.scale(r, g) = uint8_t(first + next++ % scales);
  }
  layer.experts.push_back({Weights(form, width, hidden), std::move(up), identity(form, hidden, width), {}});
  Layer::Expert& expert = layer.experts[0];
  expert.bias[0].assign(size_t(width), 1.0f);
  expert.bias[1].assign(size_t(width), 0.0f);
  expert.bias[2].assign(size_t(hidden), 0.0f);
  Tokens tokens;
  tokens.count = hidden;
  tokens.top_k = 1;
  for (int t = 0; t < hidden; ++t) {
    tokens.x.push_back(std::vector<double>(size_t(hidden), 0.0));
    tokens.x.back()[size_t(t)] = 1;
    tokens.ids.push_back(0);
    tokens.weights.push_back(1);
  }
  lk::Experts experts = pack(layer, engine(isa.name));
  bool good = true;
  auto compare = [&](int at, int count) {
    const Guarded<float> out = run<float>(experts, tokens, false, at, count);
    for (int t = 0; t < count; ++t)
      for (int c = 0; c < width; ++c) good &= double(out[size_t(t) * size_t(hidden) + size_t(c)]) == expert.up.values(c)[at + t];
  };
  compare(0, hidden);
  for (int t = 0; t < 16; ++t) compare(t, 1);
  report.expect(good, "a code under some scale does not decode exactly");
}

void check_nan(const Form& form, const lk::Kernels& isa, Report& report) {
  const Shape shape{2, 64, 32, 2, 3};
  Random random(13);
  Layer layer = Layer::random(form, shape.experts, shape.hidden, shape.width, kActivations[3], false, random);
  Tokens tokens = random_tokens(shape, false, random);
  std::fill(tokens.ids.begin(), tokens.ids.end(), 1);
  lk::Experts experts = pack(layer, engine(isa.name));
  const Guarded<float> clean = run<float>(experts, tokens, false, 0, 3);
  tokens.x[1][5] = std::nan("");
  const Guarded<float> out = run<float>(experts, tokens, false, 0, 3);
  bool shown = true, others = true;
  for (size_t h = 0; h < 64; ++h) {
    shown &= std::isnan(out[64 + h]);
    others &= out[h] == clean[h] && out[128 + h] == clean[128 + h];
  }
  report.expect(shown, "NaN in a token is lost");
  report.expect(others, "NaN in a token reaches another");
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : " ") + word;
  return text.empty() ? "none" : text;
}

void print_machine() {
  std::printf("processor: %s\nfeatures: %s\n", lk::cpu_brand().c_str(), joined(lk::cpu_features()).c_str());
  const std::string best = lk::select_isa("").name;
  for (const auto& isa : lk::isas()) {
    const std::string state = isa.missing.empty() ? isa.kernels->name == best ? "chosen" : "supported" : "lacks " + joined(isa.missing);
    std::printf("  %-12s %s\n", isa.kernels->name, state.c_str());
  }
}

struct Options {
  std::vector<std::string> isas, formats;  // empty: all
  std::string expect;
  bool list = false;
};

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const bool value = i + 1 < count;
    if (word == "--list") options.list = true;
    else if (word == "--isa" && value) options.isas.push_back(words[++i]);
    else if (word == "--format" && value) options.formats.push_back(words[++i]);
    else if (word == "--expect" && value) options.expect = words[++i];
    else throw std::invalid_argument("unknown argument " + word + "; known are --isa NAME, --format NAME, --expect NAME, --list");
  }
  return options;
}

bool asked(const std::vector<std::string>& names, const std::string& name) {
  return names.empty() || std::count(names.begin(), names.end(), name) > 0;
}

// What was asked for and cannot run here is an error, not a skip.
void refuse_unknown(const Options& options) {
  for (const auto& isa : options.isas) lk::select_isa(isa);
  for (const auto& name : options.formats)
    if (std::none_of(std::begin(kForms), std::end(kForms), [&](const Form& form) { return name == form.name; }))
      throw std::invalid_argument("unknown format " + name);
}

bool as_expected(const std::string& expected) {
  const std::string best = lk::select_isa("").name;
  if (expected.empty() || expected == best) return true;
  std::printf("FAIL: %s is chosen, %s was expected\n", best.c_str(), expected.c_str());
  return false;
}

Report check(const Form& form, const lk::Kernels& isa) {
  Report report(std::string(form.name) + " " + isa.name);
  check_shapes(form, isa, report);
  check_independence(form, isa, report);
  check_codes(form, isa, report);
  check_nan(form, isa, report);
  std::printf("%-8s %-12s %11d %7d  %.0f %%\n", form.name, isa.name, report.passed + report.failed, report.failed, report.worst * 100);
  std::fflush(stdout);
  return report;
}

int check_all(const Options& options) {
  int passed = 0, failed = 0;
  std::printf("\n%-8s %-12s %11s %7s  %s\n", "format", "isa", "comparisons", "failed", "worst error, of what is allowed");
  for (const Form& form : kForms)
    for (const auto& isa : lk::isas()) {
      if (!isa.missing.empty() || !asked(options.isas, isa.kernels->name) || !asked(options.formats, form.name)) continue;
      const Report report = check(form, *isa.kernels);
      passed += report.passed;
      failed += report.failed;
    }
  std::printf("\n%d passed, %d failed\n", passed, failed);
  return failed || passed == 0 ? 1 : 0;
}

}  // namespace
}  // namespace check

int main(int count, char** words) {
  try {
    const check::Options options = check::parse(count, words);
    check::refuse_unknown(options);
    check::print_machine();
    const bool expected = check::as_expected(options.expect);
    const int failed = options.list ? 0 : check::check_all(options);
    return expected ? failed : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lk_selfcheck: %s\n", error.what());
    return 2;
  }
}
