#include "moe/experts.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "cpu.h"
#include "dispatch.h"

namespace lk {
namespace {

// Parts per worker of a phase: while weights are read, and where there are so many rows that a part's own reading of
// them counts. Tiles read rows the fastest.
constexpr int kFewRowsTurns = 8, kManyRowsTurns = 4, kTileTurns = 8;
constexpr double kTurnBytes = 65536;  // the least of a part: taking one costs up to a microsecond
constexpr size_t kFetchFirst = 1024;  // bytes fetched of what comes after the barrier: what a core has on its way at once
constexpr int kMaxTokens = 4096;  // per pass: bounds the workspace, longer batches take several
constexpr int kAwakeUs = 2000;    // between two tensors of a load; Python needs about a tenth of it

int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Rows an odd number of cache lines apart never fall into the same few sets of L1.
int row_stride(int elements, int element_bytes) {
  const int lines = (elements * element_bytes + 63) / 64;
  return (lines | 1) * 64 / element_bytes;
}

size_t up_panels(int width) { return size_t(2 * panel_count(width)); }

// bf16 values of a row, and the sums behind them.
int row_elements(const PanelLayout& layout) { return layout.depth + (layout.zeros ? layout.depth / kSumOf * 2 : 0); }

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class T> T* at(void* base, ptrdiff_t bytes) { return reinterpret_cast<T*>(static_cast<char*>(base) + bytes); }
template <class T> const T* at(const void* base, ptrdiff_t bytes) {
  return reinterpret_cast<const T*>(static_cast<const char*>(base) + bytes);
}

}  // namespace

Engine::Engine(std::vector<int> cpus, const std::string& isa, bool bind_each, int spin_us, bool huge,
               const std::vector<int>& nodes, bool place, bool batch_invariant, bool split)
    : kernels_(select_isa(isa)), huge_(huge), place_(place), batch_invariant_(batch_invariant),
      pool_(std::move(cpus), nodes, split, bind_each, spin_us), scratch_(kernels_.scratch * size_t(pool_.size()), huge) {
  turns = std::make_unique<Turn[]>(2 * pool_.nodes().size());
  if (!place) return;
  const Buffer page(1, false);
  for (const Node& node : pool_.nodes())
    if (const int error = prefer_node(page, node.id)) unplaced_ = std::generic_category().message(error) + " for node " + std::to_string(node.id);
}

void Engine::reset_turns(int panels) {
  if (panels > most_panels_) {
    runs = std::make_unique<std::atomic<int>[]>(size_t(panels));
    most_panels_ = panels;
  }
  for (int i = 0; i < panels; ++i) runs[size_t(i)].store(0, std::memory_order_relaxed);
  const size_t nodes = pool_.nodes().size();
  for (size_t i = 0; i < 2 * nodes; ++i) turns[i].next.store(pool_.nodes()[i % nodes].count, std::memory_order_relaxed);
}

std::unique_lock<std::mutex> Engine::lock() {
  pool_.refuse_fork();
  return std::unique_lock(mutex_);
}

double Engine::read_gb_per_s(double megabytes, double seconds) {
  const auto held = lock();
  const size_t share = std::max<size_t>(size_t(megabytes * 1e6) / size_t(pool_.size()) / 512 * 512, 512);
  const size_t bytes = share * size_t(pool_.size());
  if (probe_.size() < bytes) {
    probe_ = Buffer(bytes, true);
    pool_.run([&](int w) { memset(probe_.data() + size_t(w) * share, 1, share); });
  }
  std::vector<double> sums(size_t(pool_.size()));
  auto round = [&](int w) { sums[size_t(w)] = kernels_.read(probe_.data() + size_t(w) * share, share); };
  pool_.run(round);
  const int64_t start = now_ns();
  int64_t rounds = 0, elapsed = 0;
  do {
    pool_.run(round);
    ++rounds;
    elapsed = now_ns() - start;
  } while (double(elapsed) < seconds * 1e9);
  return double(rounds) * double(bytes) / double(elapsed);
}

double Engine::dot_gflop_per_s(double seconds) {
  const auto held = lock();
  std::vector<double> flop(size_t(pool_.size()));
  std::vector<float> sink(size_t(pool_.size()) * 16);
  auto round = [&](int w) { flop[size_t(w)] += kernels_.peak(20000, &sink[size_t(w) * 16]); };
  pool_.run(round);
  std::fill(flop.begin(), flop.end(), 0.0);
  const int64_t start = now_ns();
  int64_t elapsed = 0;
  do {
    pool_.run(round);
    elapsed = now_ns() - start;
  } while (double(elapsed) < seconds * 1e9);
  double total = 0;
  for (double f : flop) total += f;
  return total / double(elapsed);
}

double call_us(std::shared_ptr<Engine> engine, double seconds) {
  Experts experts(std::move(engine), {Format::bf16, 0, Scale::none, false}, {1, 32, 16}, {}, false, false);
  const uint16_t x[32] = {};
  const int32_t id = 0;
  const float weight = 1.0f;
  uint16_t out[32];
  const Forward call{x, sizeof x, Type::bf16, 1, {&id, sizeof id, false, &weight, sizeof weight, 1}, out, sizeof out, Type::bf16, 1.0f, false};
  constexpr int kRound = 100;
  double best = 1e30;
  const int64_t begin = now_ns();
  do {
    const int64_t start = now_ns();
    for (int i = 0; i < kRound; ++i) experts.forward(call);
    best = std::min(best, double(now_ns() - start) / (kRound * 1e3));
  } while (double(now_ns() - begin) < seconds * 1e9);
  return best;
}

Experts::Experts(std::shared_ptr<Engine> engine, Coding coding, Shape shape, Activation activation, bool bias, bool column_scales)
    : engine_(std::move(engine)), coding_(coding), shape_(shape), activation_(activation),
      kernels_(engine_->kernels().format[int(coding.format)]),
      up_(panel_layout(coding, shape.hidden)), down_(panel_layout(coding, shape.width)),
      x_stride_(row_stride(row_elements(up_), 2)), act_stride_(row_stride(row_elements(down_), 2)),
      out_stride_(row_stride(round_up(shape.hidden, kColumns), 4)), global_(size_t(shape.experts) * 3, 1.0f) {
  const int tiles = panel_count(shape.width), panels = panel_count(shape.hidden), workers = engine_->pool().size();
  for (const Node& node : engine_->pool().nodes()) {
    // Cut where the workers' own shares are cut: see down() and each_panel().
    const int end = node.first + node.count, tile = tiles * node.first / workers, panel = panels * node.first / workers;
    Share share{tile, tiles * end / workers - tile, panel, panels * end / workers - panel, 0, {}};
    share.expert_bytes = up_.bytes(size_t(2 * share.tiles)) + down_.bytes(size_t(share.panels));
    share.weights = Buffer(size_t(shape.experts) * share.expert_bytes, engine_->huge());
    shares_.push_back(std::move(share));
  }
  if (engine_->places()) place();
  const size_t vectors = size_t(shape.experts) * size_t(2 * round_up(shape.width, kColumns) + round_up(shape.hidden, kColumns));
  if (bias) bias_.assign(vectors, 0.0f);
  if (column_scales) columns_.assign(vectors, 1.0f);
}

size_t Experts::packed_bytes(const Coding& coding, int hidden, int width) {
  return panel_layout(coding, hidden).bytes(up_panels(width)) + panel_layout(coding, width).bytes(size_t(panel_count(hidden)));
}

size_t Experts::bytes() const {
  size_t all = 0;
  for (const Share& share : shares_) all += size_t(shape_.experts) * share.expert_bytes;
  return all;
}

// Every node's memory from that node. Where the system does not let it be named, it is where it is first touched: now,
// before somebody else does.
void Experts::place() {
  const auto& nodes = engine_->pool().nodes();
  bool placed = true;
  for (size_t i = 0; i < nodes.size(); ++i) placed &= prefer_node(shares_[i].weights, nodes[i].id) == 0;
  if (!placed) take();
}

// The caller, who may run anywhere, touches only where a node has nobody else.
void Experts::take() {
  const auto held = engine_->lock();
  Pool& pool = engine_->pool();
  pool.run([&](int w) {
    const Node& node = pool.nodes()[size_t(pool.node_of(w))];
    const int idle = engine_->places() && node.first == 0 && node.count > 1;
    if (w >= node.first + idle) touch(share_of(w).weights, w - node.first - idle, node.count - idle);
  });
}

// Gate and up are one matrix, down another behind it.
Panels Experts::packed(const Share& share, int expert, bool down) const {
  uint8_t* base = share.weights.data() + size_t(expert) * share.expert_bytes;
  const size_t up_panels = size_t(2 * share.tiles);
  if (down) return panels_at(base + up_.bytes(up_panels), down_, size_t(share.panels), size_t(share.first_panel));
  return panels_at(base, up_, up_panels, size_t(2 * share.first_tile));
}

Matrix Experts::matrix(const Share& share, int expert, Part part) const {
  if (part == Part::down) return {packed(share, expert, true), 0, 1, shape_.hidden, shape_.width, down_};
  return {packed(share, expert, false), part == Part::up, 2, shape_.width, shape_.hidden, up_};
}

template <class Pack> int64_t Experts::each_panel(int expert, Part part, const Pack& pack) {
  const int panels = panel_count(columns(part)), workers = engine_->pool().size();
  std::vector<int64_t> bad(size_t(workers), 0);
  const auto held = engine_->lock();
  engine_->pool().stay_awake(kAwakeUs);
  engine_->pool().run([&](int w) {
    const Matrix m = matrix(share_of(w), expert, part);
    for (int p = panels * w / workers; p < panels * (w + 1) / workers; ++p) bad[size_t(w)] += pack(m, p);
  });
  int64_t total = 0;
  for (int64_t b : bad) total += b;
  return total;
}

int64_t Experts::pack_codes(int expert, Part part, const Rows& rows) {
  return each_panel(expert, part, [&](const Matrix& m, int p) { return lk::pack_codes(coding_.format, m, p, rows); });
}
int64_t Experts::pack_scales(int expert, Part part, const Rows& rows) {
  return each_panel(expert, part, [&](const Matrix& m, int p) { return lk::pack_scales(m, p, rows); });
}
int64_t Experts::pack_zeros(int expert, Part part, const Rows& rows) {
  return each_panel(expert, part, [&](const Matrix& m, int p) { return lk::pack_zeros(m, p, rows); });
}

void Experts::set_global_scale(int expert, Part part, float value) { global_[size_t(expert) * 3 + size_t(part)] = value; }

// Where the bias or the column scales of a part begin.
size_t Experts::vector_at(int expert, Part part) const {
  const size_t width = size_t(round_up(shape_.width, kColumns)), hidden = size_t(round_up(shape_.hidden, kColumns));
  return size_t(expert) * (2 * width + hidden) + size_t(part) * width;
}
void Experts::set_bias(int expert, Part part, const float* values) {
  std::copy_n(values, columns(part), bias_.begin() + ptrdiff_t(vector_at(expert, part)));
}
void Experts::set_column_scales(int expert, Part part, const float* values) {
  std::copy_n(values, columns(part), columns_.begin() + ptrdiff_t(vector_at(expert, part)));
}

void Experts::repeat_first() {
  const auto held = engine_->lock();
  Pool& pool = engine_->pool();
  pool.run([&](int w) {
    const Node& node = pool.nodes()[size_t(pool.node_of(w))];
    const Share& share = share_of(w);
    for (int e = 1 + w - node.first; e < shape_.experts; e += node.count)
      memcpy(share.weights.data() + size_t(e) * share.expert_bytes, share.weights.data(), share.expert_bytes);
  });
  for (auto* all : {&global_, &bias_, &columns_}) {
    const size_t each = all->size() / size_t(shape_.experts);
    for (size_t i = each; i < all->size(); ++i) (*all)[i] = (*all)[i % each];
  }
}

// Activations of more than bf16's precision are split into two bf16 rows, high part and rest.
int split_of(const Forward& call) { return call.x_type == Type::bf16 ? 1 : 2; }

// Rows begin..end of the pass into the workspace as bf16, zero beyond the true width.
void Experts::load_rows(const Forward& call, int64_t first, int begin, int end) {
  const Kernels& kernels = engine_->kernels();
  const int split = split_of(call);
  for (int t = begin; t < end; ++t) {
    uint16_t* to = at<uint16_t>(engine_->work.x.data(), ptrdiff_t(t) * split * x_stride_ * 2);
    const void* from = at<char>(call.x, (first + t) * call.x_stride);
    if (call.x_type == Type::bf16) memcpy(to, from, size_t(shape_.hidden) * 2);
    else if (call.x_type == Type::f16) kernels.split_half(at<uint16_t>(from, 0), to, to + x_stride_, shape_.hidden);
    else kernels.split(at<float>(from, 0), to, to + x_stride_, shape_.hidden);
    for (int part = 0; part < split; ++part, to += x_stride_) {
      memset(to + shape_.hidden, 0, size_t(up_.depth - shape_.hidden) * 2);
      if (coding_.zeros) kernels.sums(to, reinterpret_cast<float*>(to + up_.depth), up_.depth);
    }
  }
}

// Panel `panel` is what comes after the product's last.
void Experts::read_next(Product& product, const Panels& panels, int panel) {
  product.next_codes = panels.codes + size_t(panel) * product.layout->codes;
  product.next_scales = panels.scales + size_t(panel) * product.layout->scales;
}

// Whether so many tokens are multiplied in tiles, two panels at a time.
bool Experts::in_pairs(int tokens) const { return !engine_->kernels().lane && tokens > 4 * engine_->pool().size(); }

// Parts per worker of a phase that reads `bytes` of every expert.
int Experts::turns(size_t bytes, int tokens) const {
  const int workers = engine_->pool().size();
  const int most = tokens <= 4 * workers ? kFewRowsTurns : in_pairs(tokens) ? kTileTurns : kManyRowsTurns;
  return std::clamp(int(engine_->work.schedule.readings() * double(bytes) / workers / kTurnBytes), 1, most);
}

// body(part) for those of the parts of the worker's node that are its turn.
template <class Body> void Experts::take_turns(int worker, int phase, int parts, const Body& body) {
  const Pool& pool = engine_->pool();
  const int index = pool.node_of(worker);
  const Node& node = pool.nodes()[size_t(index)];
  auto& next = engine_->turns[size_t(phase) * pool.nodes().size() + size_t(index)].next;
  for (int part = worker - node.first; part < parts; part = parts > node.count ? next.fetch_add(1, std::memory_order_relaxed) : parts)
    body(part);
}

void Experts::gate_up(const Forward& call, int tokens, int worker) {
  auto& work = engine_->work;
  const int split = split_of(call);
  const Share& share = share_of(worker);
  const auto piece = [&](const Schedule::Group& g, int tile, int count, const Schedule::Group* next) {
    GateUp args;
    args.product = {packed(share, g.expert, false), &up_, share.first_tile + tile, count,
                    work.x_rows.data() + g.begin * split, (g.end - g.begin) * split, split, engine_->scratch(worker), engine_->batch_invariant(), false};
    if (next) read_next(args.product, packed(share, next->expert, false), 2 * share.first_tile);
    args.gate_scale = global_[size_t(g.expert) * 3];
    args.up_scale = global_[size_t(g.expert) * 3 + 1];
    args.gate_columns = vector(columns_, g.expert, Part::gate);
    args.up_columns = vector(columns_, g.expert, Part::up);
    args.gate_bias = vector(bias_, g.expert, Part::gate);
    args.up_bias = vector(bias_, g.expert, Part::up);
    args.input_weight = call.weight_on_input ? work.schedule.weight().data() + g.begin : nullptr;
    args.activation = activation_;
    args.out = work.act_rows.data() + g.begin * split;
    args.out_in_tiles = act_in_tiles((g.end - g.begin) * split);
    args.width = shape_.width;
    args.sums = coding_.zeros ? down_.depth : 0;
    kernels_.gate_up(args);
  };
  const int each = turns(up_.bytes(up_panels(shape_.width)), tokens), workers = node_of(worker).count;
  take_turns(worker, 0, workers * each, [&](int part) {
    work.schedule.share(part_begin(workers, each, part), part_begin(workers, each, part + 1), share.tiles, piece);
  });
}

Pieces Experts::down_pieces(const Node& node, int tokens) const {
  return {share_of(node.first).panels, node.count, turns(down_.bytes(size_t(panel_count(shape_.hidden))), tokens), in_pairs(tokens)};
}

// The beginning of what a worker reads first after the barrier, while it waits there.
void Experts::fetch_down(int tokens, int worker) const {
  const auto& work = engine_->work;
  const auto& groups = work.schedule.groups();
  const Node& node = node_of(worker);
  const Share& share = share_of(worker);
  const Piece piece = down_pieces(node, tokens).at(worker - node.first);
  const size_t group = work.schedule.group_at(piece.run, piece.runs);
  if (group == groups.size() || piece.begin == piece.end) return;
  const Panels panels = packed(share, groups[group].expert, true);
  const size_t panel = size_t(share.first_panel + piece.begin);
  for (size_t i = 0; i < std::min(kFetchFirst, down_.codes); i += 64) __builtin_prefetch(panels.codes + panel * down_.codes + i);
  for (size_t i = 0; i < std::min(kFetchFirst, down_.scales); i += 64) __builtin_prefetch(panels.scales + panel * down_.scales + i);
}

// A piece is some panels of the output, to which experts are added in ascending order, so a token's sum depends neither
// on the number of threads nor on the other tokens.
void Experts::down(const Forward& call, int64_t first, int tokens, int worker) {
  const Pieces pieces = down_pieces(node_of(worker), tokens);
  take_turns(worker, 1, pieces.count(), [&](int part) {
    const Piece piece = pieces.at(part);
    if (piece.begin == piece.end) return;
    auto& ended = engine_->runs[size_t(share_of(worker).first_panel + piece.begin)];
    // Whoever has the run before took it earlier, so it ends without this worker.
    engine_->pool().wait_until([&] { return ended.load(std::memory_order_acquire) == piece.run; });
    down_piece(call, first, tokens, worker, piece);
    ended.store(piece.run + 1, std::memory_order_release);
  });
}

void Experts::down_piece(const Forward& call, int64_t first, int tokens, int worker, const Piece& piece) {
  auto& work = engine_->work;
  const Share& share = share_of(worker);
  const int split = split_of(call), begin = share.first_panel + piece.begin, end = share.first_panel + piece.end;
  if (piece.run == 0) {
    for (int t = 0; t < tokens; ++t)
      memset(work.out.data() + (size_t(t) * size_t(out_stride_) + size_t(begin) * kColumns) * 4, 0, size_t(end - begin) * kColumns * 4);
  }
  const auto& groups = work.schedule.groups();
  const size_t until = work.schedule.group_at(piece.run + 1, piece.runs);
  for (size_t i = work.schedule.group_at(piece.run, piece.runs); i < until; ++i) {
    const Schedule::Group& g = groups[i];
    Down args;
    const int rows = (g.end - g.begin) * split;
    args.product = {packed(share, g.expert, true), &down_, begin, end - begin, work.act_rows.data() + g.begin * split,
                    rows, split, engine_->scratch(worker), engine_->batch_invariant(), act_in_tiles(rows)};
    if (i + 1 < until) read_next(args.product, packed(share, groups[i + 1].expert, true), begin);
    args.scale = global_[size_t(g.expert) * 3 + 2];
    args.columns = vector(columns_, g.expert, Part::down);
    args.bias = vector(bias_, g.expert, Part::down);
    args.weight = call.weight_on_input ? nullptr : work.schedule.weight().data() + g.begin;
    args.out = work.out_rows.data() + g.begin;
    kernels_.down(args);
  }
  if (piece.run + 1 < piece.runs) return;
  for (int t = 0; t < tokens; ++t)
    store_row(call, first + t, begin * kColumns, std::min(end * kColumns, shape_.hidden));
}

// Columns begin..end of a finished row, scaled, to the caller's tensor.
void Experts::store_row(const Forward& call, int64_t row, int begin, int end) {
  const int64_t t = row % kMaxTokens;  // passes start at multiples of it
  const float* from = at<float>(engine_->work.out.data(), t * out_stride_ * 4) + begin;
  void* to = at<char>(call.out, row * call.out_stride);
  const Kernels& kernels = engine_->kernels();
  if (call.out_type == Type::bf16) return kernels.to_bf16(from, at<uint16_t>(to, 0) + begin, end - begin, call.scale);
  if (call.out_type == Type::f16) return kernels.to_half(from, at<uint16_t>(to, 0) + begin, end - begin, call.scale);
  float* out = at<float>(to, 0) + begin;
  for (int c = 0; c < end - begin; ++c) out[c] = from[c] * call.scale;
}

bool Experts::act_in_tiles(int rows) const {
  Product product{};
  product.layout = &down_;
  product.row_count = rows;
  product.tiles_only = engine_->batch_invariant();
  return kernels_.tiles(product);
}

// Where every row's activations go: side by side, or in the tiles that down would otherwise gather in every part.
void Experts::place_activations(int split) {
  auto& work = engine_->work;
  const auto& groups = work.schedule.groups();
  const auto bytes = [&](int rows) {
    return act_in_tiles(rows) ? size_t(round_up(rows, kTileRows)) * size_t(down_.depth) * 2 : size_t(rows) * size_t(act_stride_) * 2;
  };
  size_t all = 0;
  for (const Schedule::Group& g : groups) all += bytes((g.end - g.begin) * split);
  work.act.reserve(all, engine_->huge());
  const int written = round_up(shape_.width, kColumns), padded = down_.depth;
  uint8_t* to = work.act.data();
  for (const Schedule::Group& g : groups) {
    const int rows = (g.end - g.begin) * split;
    const bool tiled = act_in_tiles(rows);
    for (int r = 0; r < rows; ++r) {
      uint16_t* const row = tiled ? at<uint16_t>(to, (ptrdiff_t(r / kTileRows) * down_.depth * kTileRows + r % kTileRows * kUnit) * 2)
                                  : at<uint16_t>(to, ptrdiff_t(r) * act_stride_ * 2);
      work.act_rows[size_t(g.begin * split + r)] = row;
      if (padded == written) continue;
      memset(row + (tiled ? written / kUnit * kTileRows * kUnit + written % kUnit : written), 0, size_t(padded - written) * 2);
      if (coding_.zeros) memset(row + padded + written / kSumOf * 2, 0, size_t(padded - written) / kSumOf * sizeof(float));
    }
    to += bytes(rows);
  }
}

void Experts::pass(const Forward& call, int64_t first, int tokens) {
  auto& work = engine_->work;
  const bool huge = engine_->huge();
  work.schedule.build(call.routing, first, tokens, shape_.experts);
  const auto& token = work.schedule.token();
  const size_t slots = token.size(), split = size_t(split_of(call));
  work.x.reserve(size_t(tokens) * split * size_t(x_stride_) * 2, huge);
  work.out.reserve(size_t(tokens) * size_t(out_stride_) * 4, huge);
  work.x_rows.resize(slots * split);
  work.act_rows.resize(slots * split);
  work.out_rows.resize(slots);
  for (size_t i = 0; i < slots; ++i) {
    work.out_rows[i] = at<float>(work.out.data(), ptrdiff_t(token[i]) * out_stride_ * 4);
    for (size_t part = 0; part < split; ++part)
      work.x_rows[i * split + part] = at<uint16_t>(work.x.data(), ptrdiff_t(size_t(token[i]) * split + part) * x_stride_ * 2);
  }
  place_activations(int(split));
  Pool& pool = engine_->pool();
  const bool together = tokens >= 4 * pool.size();  // few rows: the caller alone is faster than a barrier
  if (!together) load_rows(call, first, 0, tokens);
  engine_->reset_turns(panel_count(shape_.hidden));
  pool.run([&](int w) {
    if (together) {
      load_rows(call, first, tokens * w / pool.size(), tokens * (w + 1) / pool.size());
      pool.barrier();
    }
    gate_up(call, tokens, w);
    fetch_down(tokens, w);
    pool.barrier();
    down(call, first, tokens, w);
  });
}

void Experts::forward(const Forward& call) {
  const auto held = engine_->lock();
  const FlushSubnormals flush;
  const int64_t start = now_ns();
  engine_->pool().stay_awake(call.awake_us);
  if (engine_->places()) engine_->pool().bring_caller();
  for (int64_t first = 0; first < call.tokens; first += kMaxTokens)
    pass(call, first, int(std::min<int64_t>(kMaxTokens, call.tokens - first)));
  ++engine_->stats.calls;
  engine_->stats.tokens += call.tokens;
  engine_->stats.busy_ns += now_ns() - start;
}

}  // namespace lk
