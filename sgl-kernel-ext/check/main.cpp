// lk_selfcheck: every format on every instruction set of this machine against float64, and what results must not
// depend on. Needs no Python, no checkpoint and no GPU.
//
//   lk_selfcheck [--isa NAME]... [--format NAME]... [--expect NAME] [--list] [--no-half]
//   lk_selfcheck --isa NAME --format NAME --work ROWS PASSES
//
// --expect fails unless that instruction set is the one chosen; --list stops after the machine's facts; --no-half
// leaves out what converts binary16, which some emulators do wrongly while subnormals are flushed; --work
// checks nothing and multiplies one expert's weights PASSES times with ROWS rows, for a counter of instructions. Ends with "N passed, N failed" and 0 only if nothing failed; 2 for an instruction set that cannot run here.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <stdexcept>

#include "check/driver.h"
#include "check/pieces.h"
#include "check/pool.h"
#include "cpu.h"

namespace check {
namespace {

struct Shape { int experts, hidden, width, top_k, tokens; };
// One group, a cut group, odd sizes, every number of rows that a kernel treats apart, a depth of several blocks of tiles.
constexpr Shape kShapes[] = {{4, 32, 16, 2, 1}, {4, 64, 16, 1, 2},   {3, 33, 17, 2, 3},  {2, 127, 31, 2, 4},  {2, 128, 129, 1, 5}, {1, 96, 80, 1, 7},
                             {2, 160, 48, 1, 8}, {1, 64, 32, 1, 9},  {1, 256, 16, 1, 13}, {2, 288, 33, 2, 20}, {1, 264, 64, 1, 67}, {1, 1, 1, 1, 1},
                             {1, 2144, 40, 1, 75}};

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

Tokens random_tokens(const Shape& shape, lk::Type type, Random& random) {
  Tokens tokens{shape.tokens, shape.top_k, type, {}, {}, {}};
  for (int t = 0; t < shape.tokens; ++t) {
    std::vector<double> row;
    for (int k = 0; k < shape.hidden; ++k) {
      const double value = random.normal();
      const uint32_t bits = bits_of(type, value);
      row.push_back(type == lk::Type::f32 ? double(float(value)) : type == lk::Type::f16 ? from_f16(uint16_t(bits)) : from_bf16(uint16_t(bits)));
    }
    tokens.x.push_back(row);
    for (int k = 0; k < shape.top_k; ++k) {
      tokens.ids.push_back(random.below(shape.experts + 1) - 1);
      tokens.weights.push_back(float(random.uniform()));
    }
  }
  return tokens;
}

// What was compared on one instruction set with one format; the first failures are said at once.
class Report {
 public:
  explicit Report(std::string title) : title_(std::move(title)) {}
  Report(const Form& form, const lk::Kernels& kernels) : isa(&kernels), title_(std::string(form.name) + " " + kernels.name) {}
  void expect(bool good, const std::string& what) {
    ++(good ? passed : failed);
    if (good || failed > 5) return;
    std::printf("FAIL %s: %s\n", title_.c_str(), what.c_str());
  }
  void within(const std::vector<float>& out, const Result& truth, const std::string& what) {
    double share = 0;
    bool good = out.size() == truth.value.size();
    for (size_t i = 0; good && i < out.size(); ++i) {
      const double error = std::fabs(double(out[i]) - truth.value[i]);
      share = std::isnan(error) ? INFINITY : std::fmax(share, error / truth.bound[i]);
    }
    good &= share <= 1;
    worst = std::fmax(worst, share);
    expect(good, what + " differs from float64 by " + std::to_string(share) + " of what is allowed");
  }

  const lk::Kernels* isa = nullptr;  // of whom the report is, if of one
  int passed = 0, failed = 0;
  double worst = 0;  // error as a share of what is allowed

 private:
  std::string title_;
};

// Edge shapes, activations and types of activations against float64 and, on lane instruction sets, the scalar bits.
void check_shape(const Form& form, int turn, bool half, std::vector<Report>& reports) {
  const Shape& shape = kShapes[turn];
  Random random(uint64_t(1000 + turn));
  Layer layer = Layer::random(form, shape.experts, shape.hidden, shape.width, kActivations[size_t(turn) % std::size(kActivations)],
                              turn % 3 == 2, random);
  const lk::Type type = lk::Type(turn % 3);
  Tokens tokens = random_tokens(shape, half || type != lk::Type::f16 ? type : lk::Type::f32, random);
  tokens.scale = turn % 4 == 3 ? 2.5f : 1.0f;
  tokens.weight_on_input = turn % 5 == 4;
  const Result truth = forward(layer, tokens);
  const std::string name = "shape " + std::to_string(shape.hidden) + " x " + std::to_string(shape.width) + ", " + std::to_string(shape.tokens) + " tokens";
  lk::Experts plain = pack(layer, engine("scalar"));
  const std::vector<float> bits = run(plain, tokens, 0, tokens.count);
  for (Report& report : reports) {
    lk::Experts experts = pack(layer, engine(report.isa->name));
    const std::vector<float> out = run(experts, tokens, 0, tokens.count);
    report.within(out, truth, name);
    if (report.isa->lane) report.expect(same_bits(out, bits.data()), name + ": other bits than scalar");
    for (lk::Type narrow : {lk::Type::bf16, lk::Type::f16})
      if (half || narrow == lk::Type::bf16)
        report.expect(is_rounded(out, run_raw(experts, tokens, 0, tokens.count, narrow), narrow), name + ": a 16-bit output is not the float32 one rounded");
  }
}

// The same bits for any number of threads and NUMA nodes, and for a token alone, in small and in large batches: on lane
// instruction sets always, where tiles sum in an order of their own if the engine is asked for it.
void check_independence(const Form& form, Report& report) {
  const Shape shape{3, 96, 48, 2, 24};
  for (lk::Type type : {lk::Type::bf16, lk::Type::f32}) {
    Random random(17);
    Layer layer = Layer::random(form, shape.experts, shape.hidden, shape.width, kActivations[0], false, random);
    const Tokens tokens = random_tokens(shape, type, random);
    lk::Experts experts = pack(layer, engine(report.isa->name));
    const std::vector<float> whole = run(experts, tokens, 0, shape.tokens);
    for (int threads : {1, 3}) {
      lk::Experts other = pack(layer, engine(report.isa->name, threads));
      report.expect(same_bits(run(other, tokens, 0, shape.tokens), whole.data()), "other bits with " + std::to_string(threads) + " threads");
    }
    for (const std::vector<int>& nodes : {std::vector<int>{0, 1}, {0, 0, 1}, {0, 1, 2, 3}}) {
      lk::Experts other = pack(layer, engine(report.isa->name, int(nodes.size()), nodes));
      report.expect(same_bits(run(other, tokens, 0, shape.tokens), whole.data()), "other bits over " + std::to_string(other.shares().size()) + " nodes");
    }
    lk::Experts steady = pack(layer, engine(report.isa->name, 2, {}, !report.isa->lane));
    const std::vector<float> together = run(steady, tokens, 0, shape.tokens);
    for (int count : {1, 2, 3, 4, 7, 12})
      report.expect(same_bits(run(steady, tokens, 11, count), together.data() + 11 * shape.hidden), "other bits in a batch of " + std::to_string(count));
  }
}

// So much work that workers take turns, and in down one continues another's sums: the last pair of panels is a single one;
// and with fewer pairs than workers and one expert, so that most runs are empty.
void check_turns(const Form& form, const Shape& shape, Report& report) {
  Random random(19);
  Layer layer = Layer::random(form, shape.experts, shape.hidden, shape.width, kActivations[0], true, random);
  const Tokens tokens = random_tokens(shape, lk::Type::bf16, random);
  lk::Experts alone = pack(layer, engine(report.isa->name, 1));
  const std::vector<float> out = run(alone, tokens, 0, shape.tokens);
  report.within(out, forward(layer, tokens), "turns");
  for (int threads : {2, 3, 5}) {
    lk::Experts other = pack(layer, engine(report.isa->name, threads));
    report.expect(same_bits(run(other, tokens, 0, shape.tokens), out.data()), "other bits where " + std::to_string(threads) + " threads take turns");
  }
  lk::Experts apart = pack(layer, engine(report.isa->name, 5, {0, 0, 0, 1, 1}));
  report.expect(same_bits(run(apart, tokens, 0, shape.tokens), out.data()), "other bits where the threads of two nodes take turns");
}

// A matrix whose only entries are ones on the diagonal.
Weights identity(const Form& form, int rows, int depth) {
  Weights w(form, rows, depth);
  for (int r = 0; r < rows; ++r) {
    if (r < depth) w.set_code(r, r, code_of_one(form.coding.format));
    for (int g = 0; g < w.groups; ++g) w.set_scale(r, g, scale_bits(form.coding.scale, 1));
  }
  return w;
}

uint32_t any_code(lk::Format format, int r, int k) {
  const uint32_t next = uint32_t(r * 128 + k);
  switch (format) {
    case F::bf16: return code_of_one(format);
    case F::f16: return (next * 4 + uint32_t(r & 3)) & (k % 2 ? 0xbfffu : 0x8fffu);  // all but infinity and NaN; many subnormal
    case F::fp8: case F::mxfp8: return (next & 0x7f) == 0x7f ? 0 : next & 0xff;
    default: return uint32_t(k + r / 16) & 15;
  }
}
uint32_t any_scale(const lk::Coding& coding, int next) {
  switch (coding.scale) {
    case S::e8m0: return uint32_t(coding.format == F::mxfp8 ? 20 + next % 216 : 8 + next % 240);  // the rest overflows or vanishes
    case S::e4m3: return uint32_t(next % 0x7f);
    default: return scale_bits(coding.scale, std::ldexp(1.0, next % 11 - 5));
  }
}

// One expert whose gate is 1 (bias 1, relu2) and whose down matrix is the identity: a unit vector as the token makes
// the output a column of the up matrix.
Layer codes_layer(const Form& form, int size) {
  Layer layer{form, size, size, activation(lk::Gate::relu2), {}, true};
  Weights up(form, size, size);
  for (int r = 0; r < size; ++r) {
    for (int k = 0; k < size; ++k) up.set_code(r, k, any_code(form.coding.format, r, k));
    for (int g = 0; g < up.groups; ++g) {
      const int row = form.coding.scale == S::f32_shared ? r / lk::kColumns : r;
      up.set_scale(r, g, any_scale(form.coding, row * up.groups + g));
      if (form.coding.zeros) up.zero(r, g) = uint8_t((r + g) % 17);
    }
  }
  layer.experts.push_back({Weights(form, size, size), std::move(up), identity(form, size, size), {}});
  for (int part = 0; part < 3; ++part) layer.experts[0].bias[part].assign(size_t(size), part == 0 ? 1.0f : 0.0f);
  return layer;
}

// Every code under every scale comes out as it is: alone, and among other rows.
void check_codes(const Form& form, std::vector<Report>& reports) {
  const int size = 128;
  Layer layer = codes_layer(form, size);
  // f16 has more bits than a bf16 intermediate keeps; float32 activations split it in two.
  Tokens tokens{size, 1, form.coding.format == F::f16 ? lk::Type::f32 : lk::Type::bf16, {}, {}, {}};
  for (int t = 0; t < size; ++t) {
    tokens.x.push_back(std::vector<double>(size_t(size), 0.0));
    tokens.x.back()[size_t(t)] = 1;
    tokens.ids.push_back(0);
    tokens.weights.push_back(1);
  }
  for (Report& report : reports) {
    lk::Experts experts = pack(layer, engine(report.isa->name));
    int wrong = 0;
    auto compare = [&](int at, int count) {
      const std::vector<float> out = run(experts, tokens, at, count);
      for (int t = 0; t < count; ++t)
        for (int c = 0; c < size; ++c) wrong += double(out[size_t(t * size + c)]) != layer.experts[0].up.values(c)[at + t];
    };
    compare(0, size);
    for (int t = 0; t < 16; ++t) compare(t, 1);
    report.expect(wrong == 0, std::to_string(wrong) + " codes under some scale do not decode exactly");
  }
}

void check_nan(const Form& form, Report& report) {
  const Shape shape{2, 64, 32, 2, 3};
  Random random(13);
  Layer layer = Layer::random(form, shape.experts, shape.hidden, shape.width, kActivations[3], false, random);
  Tokens tokens = random_tokens(shape, lk::Type::bf16, random);
  std::fill(tokens.ids.begin(), tokens.ids.end(), 1);
  lk::Experts experts = pack(layer, engine(report.isa->name));
  const std::vector<float> clean = run(experts, tokens, 0, 3);
  tokens.x[1][5] = std::nan("");
  const std::vector<float> out = run(experts, tokens, 0, 3);
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
  bool list = false, half = true;
  int rows = 0, passes = 0;  // of --work
};

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const bool value = i + 1 < count;
    if (word == "--list") options.list = true;
    else if (word == "--no-half") options.half = false;
    else if (word == "--work" && i + 2 < count) {
      options.rows = std::stoi(words[++i]);
      options.passes = std::stoi(words[++i]);
    } else if (word == "--isa" && value) options.isas.push_back(words[++i]);
    else if (word == "--format" && value) options.formats.push_back(words[++i]);
    else if (word == "--expect" && value) options.expect = words[++i];
    else throw std::invalid_argument("unknown argument " + word + "; known are --isa NAME, --format NAME, --expect NAME, --list, --no-half, --work ROWS PASSES");
  }
  return options;
}

// "fp8" asks for all of fp8_channel, fp8_block128, ...
bool asked(const std::vector<std::string>& names, const std::string& name) {
  return names.empty() || std::any_of(names.begin(), names.end(), [&](const std::string& n) { return n == name || name.rfind(n + "_", 0) == 0; });
}

// What was asked for and cannot run here is an error, not a skip.
void refuse_unknown(const Options& options) {
  for (const auto& isa : options.isas) lk::select_isa(isa);
  for (const auto& name : options.formats)
    if (std::none_of(std::begin(kForms), std::end(kForms), [&](const Form& form) { return asked({name}, form.name); }))
      throw std::invalid_argument("unknown format " + name);
}

bool as_expected(const std::string& expected) {
  const std::string best = lk::select_isa("").name;
  if (expected.empty() || expected == best) return true;
  std::printf("FAIL: %s is chosen, %s was expected\n", best.c_str(), expected.c_str());
  return false;
}

std::vector<Report> check(const Form& form, const Options& options) {
  std::vector<Report> reports;
  for (const auto& isa : lk::isas()) {
    const std::string name = isa.kernels->name;
    const bool named = std::count(options.isas.begin(), options.isas.end(), name) > 0;
    if (isa.missing.empty() && (options.isas.empty() || named)) reports.emplace_back(form, *isa.kernels);
  }
  for (int turn = 0; turn < int(std::size(kShapes)); ++turn) check_shape(form, turn, options.half, reports);
  check_codes(form, reports);
  for (Report& report : reports) {
    check_independence(form, report);
    if (form.coding.format == F::bf16 || form.coding.format == F::mxfp4) {
      check_turns(form, {4, 368, 256, 2, 24}, report);
      check_turns(form, {1, 64, 640, 1, 64}, report);
    }
    check_nan(form, report);
    std::printf("%-20s %-12s %11d %7d  %.0f %%\n", form.name, report.isa->name, report.passed + report.failed, report.failed, report.worst * 100);
  }
  std::fflush(stdout);
  return reports;
}

// One thread: what a pass costs is the difference of two runs.
int work(const Options& options) {
  if (options.isas.size() != 1 || options.formats.size() != 1) throw std::invalid_argument("--work needs one --isa and one --format");
  for (const Form& form : kForms) {
    if (!asked(options.formats, form.name)) continue;
    Random random(1);
    Layer layer = Layer::random(form, 1, 512, 256, kActivations[0], false, random);
    Tokens tokens = random_tokens({1, 512, 256, 1, options.rows}, lk::Type::bf16, random);
    std::fill(tokens.ids.begin(), tokens.ids.end(), 0);
    lk::Experts experts = pack(layer, engine(options.isas[0], 1));
    for (int pass = 0; pass < options.passes; ++pass) run(experts, tokens, 0, options.rows);
    std::printf("%s %s: %zu bytes of weights a pass\n", form.name, options.isas[0].c_str(), experts.bytes());
    return 0;
  }
  return 1;
}

int check_all(const Options& options) {
  Report threads("threads");
  const auto verdict = [&](bool good, const std::string& what) { threads.expect(good, what); };
  check_pool(verdict);
  check_pieces(verdict);
  int passed = threads.passed, failed = threads.failed;
  std::printf("\n%-20s %-12s %11s %7s  %s\n", "format", "isa", "comparisons", "failed", "worst error, of what is allowed");
  for (const Form& form : kForms) {
    const bool converts = form.coding.format == F::f16 || form.coding.scale == S::f16 || form.coding.scale == S::e4m3;
    if (!asked(options.formats, form.name) || (converts && !options.half)) continue;
    for (const Report& report : check(form, options)) {
      passed += report.passed;
      failed += report.failed;
    }
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
    if (options.passes > 0) return check::work(options);
    const int failed = options.list ? 0 : check::check_all(options);
    return expected ? failed : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lk_selfcheck: %s\n", error.what());
    return 2;
  }
}
