// The engine (threads, kernel table, workspace) and one layer's experts: packing and the forward pass.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "moe/pieces.h"
#include "moe/pool.h"
#include "moe/schedule.h"
#include "pack.h"

namespace lk {

enum class Type { bf16, f16, f32 };
enum class Part { gate, up, down };

// Everything the layers of one process share. One forward pass or packing step at a time.
class Engine {
 public:
  // `nodes`, `split`: see Pool. `place`: they are the machine's, and weights are asked for from them; otherwise memory comes from
  // where it is first touched. `batch_invariant`: a row's result does not depend on the other rows even where matrix
  // multipliers sum in an order of their own, at the price of speed with few rows.
  Engine(std::vector<int> cpus, const std::string& isa, bool bind_each, int spin_us, bool huge,
         const std::vector<int>& nodes = {}, bool place = false, bool batch_invariant = false, bool split = true);

  const Kernels& kernels() const { return kernels_; }
  Pool& pool() { return pool_; }
  bool huge() const { return huge_; }
  bool places() const { return place_; }
  bool batch_invariant() const { return batch_invariant_; }
  uint8_t* scratch(int worker) const { return scratch_.data() + kernels_.scratch * size_t(worker); }
  const std::string& unplaced() const { return unplaced_; }  // why memory cannot be taken from a node by name; empty: it can
  std::unique_lock<std::mutex> lock();  // for one call; throws in a forked child, where another thread may hold it for ever

  double read_gb_per_s(double megabytes, double seconds);  // a plain reader with all threads
  double dot_gflop_per_s(double seconds);                  // dot2 on registers with all threads

  // Grown to the largest call, never shrunk: no allocation once warm.
  struct Workspace {
    Schedule schedule;
    Buffer x, act, out;
    std::vector<const uint16_t*> x_rows;
    std::vector<uint16_t*> act_rows;
    std::vector<float*> out_rows;
  } work;

  // The parts of a phase that the workers of a node take as they become free, each its own first: the processors of a
  // machine that others use, too, are not equally fast. Which worker computes a part changes no result.
  struct alignas(64) Turn { std::atomic<int> next; };
  std::unique_ptr<Turn[]> turns;  // of gate and up, then of down; per node
  std::unique_ptr<std::atomic<int>[]> runs;  // that have ended, of the panels of down that begin at the index
  void reset_turns(int panels);

  struct Stats { int64_t calls = 0, tokens = 0, busy_ns = 0; } stats;

 private:
  const Kernels& kernels_;
  int most_panels_ = 0;
  bool huge_, place_, batch_invariant_;
  Pool pool_;
  Buffer scratch_;  // of the kernels, per worker
  std::string unplaced_;
  Buffer probe_;
  std::mutex mutex_;
};

struct Shape { int experts, hidden, width; };

struct Forward {
  const void* x;
  ptrdiff_t x_stride;  // bytes
  Type x_type;
  int64_t tokens;
  Routing routing;
  void* out;           // tokens x hidden
  ptrdiff_t out_stride;
  Type out_type;
  float scale;         // routed scaling factor, applied once to the sum
  bool weight_on_input;
  int awake_us = 0;    // how long the workers may wait for the next call awake, if that is longer than usual
};

// What one NUMA node holds of every expert: tiles of gate and up, panels of down. So a worker reads weights of its own
// node only; sums over k are whole on one node, and no result depends on how many there are.
struct Share {
  int first_tile, tiles, first_panel, panels;
  size_t expert_bytes;
  Buffer weights;  // experts one after the other
};

class Experts {
 public:
  // `column_scales`: room for a factor per output column.
  Experts(std::shared_ptr<Engine> engine, Coding coding, Shape shape, Activation activation, bool bias, bool column_scales);
  Experts(Experts&&) = default;

  static size_t packed_bytes(const Coding& coding, int hidden, int width);  // one expert
  size_t bytes() const;
  const std::vector<Share>& shares() const { return shares_; }  // in the order of the pool's nodes
  Shape shape() const { return shape_; }
  const Coding& coding() const { return coding_; }

  void take();  // touches the weights' memory with all workers, each on its node; before, it may be only addresses
  int64_t pack_codes(int expert, Part part, const Rows& rows);
  int64_t pack_scales(int expert, Part part, const Rows& rows);
  int64_t pack_zeros(int expert, Part part, const Rows& rows);
  void set_global_scale(int expert, Part part, float value);
  void set_column_scales(int expert, Part part, const float* values);
  void set_bias(int expert, Part part, const float* values);
  void repeat_first();  // every other expert becomes a copy of expert 0, with bytes of its own

  void forward(const Forward& call);

 private:
  void place();
  const Node& node_of(int worker) const { return engine_->pool().nodes()[size_t(engine_->pool().node_of(worker))]; }
  const Share& share_of(int worker) const { return shares_[size_t(engine_->pool().node_of(worker))]; }
  Panels packed(const Share& share, int expert, bool down) const;
  Matrix matrix(const Share& share, int expert, Part part) const;
  template <class Pack> int64_t each_panel(int expert, Part part, const Pack& pack);
  void pass(const Forward& call, int64_t first, int tokens);
  bool act_in_tiles(int rows) const;
  void place_activations(int split);
  void load_rows(const Forward& call, int64_t first, int begin, int end);
  static void read_next(Product& product, const Panels& panels, int panel);
  bool in_pairs(int tokens) const;
  int turns(size_t bytes, int tokens) const;
  template <class Body> void take_turns(int worker, int phase, int parts, const Body& body);
  void gate_up(const Forward& call, int tokens, int worker);
  void down(const Forward& call, int64_t first, int tokens, int worker);
  Pieces down_pieces(const Node& node, int tokens) const;
  void fetch_down(int tokens, int worker) const;
  void down_piece(const Forward& call, int64_t first, int tokens, int worker, const Piece& piece);
  void store_row(const Forward& call, int64_t row, int begin, int end);
  int columns(Part part) const { return part == Part::down ? shape_.hidden : shape_.width; }
  size_t vector_at(int expert, Part part) const;
  const float* vector(const std::vector<float>& all, int expert, Part part) const {
    return all.empty() ? nullptr : all.data() + vector_at(expert, part);
  }

  std::shared_ptr<Engine> engine_;
  Coding coding_;
  Shape shape_;
  Activation activation_;
  const FormatKernels& kernels_;
  PanelLayout up_, down_;                   // of gate and up, of down
  int x_stride_, act_stride_, out_stride_;  // elements between rows of the workspace
  std::vector<Share> shares_;
  std::vector<float> global_;               // experts x 3
  std::vector<float> bias_, columns_;       // experts x (2 padded widths + padded hidden), or empty
};

// Microseconds of a forward call with almost no work (one row, one expert of 32 x 16): the engine's own time, the best
// of many rounds within `seconds`.
double call_us(std::shared_ptr<Engine> engine, double seconds);

}  // namespace lk
