// The CPU's end of the hand-over between GPU and CPU experts: a thread that answers requests which the GPU (or a host
// function) writes into pinned memory, and a watch that notices when it no longer does.
//
// The GPU's end is python/sglang/srt/lk/handover.cu. Neither thread here calls CUDA, takes Python's lock or allocates
// once warm, so a captured graph can replay whole decode steps against them. One request at a time: steps of one
// stream follow each other. Nothing here knows a format or a shape; a new thing to hand over is a field of Control.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "moe/experts.h"

namespace lk {

// In pinned memory, 256 bytes; handover.cu has the same struct. Each line has one writer.
struct alignas(64) Control {
  // The GPU (or `submit`): `request` last, with release.
  std::atomic<uint64_t> request;
  std::atomic<uint32_t> layer, rows;
  uint64_t pad0[6];
  // The CPU.
  alignas(64) std::atomic<uint64_t> done;
  std::atomic<uint64_t> abort;
  uint64_t pad1[6];
  // The GPU: layer + 1 of a wait that passed its limit, and the sum of all waits.
  alignas(64) std::atomic<uint64_t> expired;
  std::atomic<uint64_t> wait_ns;
  uint64_t pad2[6];
  uint64_t spare[8];
};
static_assert(sizeof(Control) == 256);

class Handover {
 public:
  // Where a request's rows lie, in pinned memory: `rows` of `x_bytes` and `out_bytes` at most, ids int32, weights float.
  struct Buffers {
    Control* control;
    const void* x;
    const int32_t* ids;
    const float* weights;
    void* out;
    int64_t x_bytes, out_bytes, routes;  // capacities in bytes, bytes and ids
  };
  // One layer as the requests name it, by the number that `add` returned.
  struct Layer {
    std::string name;
    Experts* experts;
    int top_k;
    Type type;
    float scale;
    bool weight_on_input;
    int64_t ns_per_row;  // what the watch allows beyond `patience_ms`
  };
  struct Stats { int64_t calls, steps, rows, busy_ns, wait_ns; };

  // The thread runs on `cpu` (-1: on any of `cpus`), stays awake `spin_us` after a request and then looks ever more rarely.
  Handover(std::vector<int> cpus, int cpu, int spin_us, int patience_ms);
  ~Handover();
  Handover(const Handover&) = delete;
  Handover& operator=(const Handover&) = delete;

  void bind(const Buffers& buffers);  // before the first request, and again to move to larger buffers while none is open
  int add(const Layer& layer);        // before its first request; throws when there are too many
  void close();                       // ends both threads; before the pinned memory goes
  int64_t capacity(int layer) const;  // rows that fit the buffers
  Stats stats() const;

  // Blocks up to `ms`; what failed ("" while nothing has), with the layer's name. The first failure stays.
  std::string failure(int ms);
  void abort();  // lets GPU and host functions go at once; nothing they deliver afterwards is a result
  void fail(int layer, const std::string& why);

  // For cudaLaunchHostFunc: what to pass is a ticket, which lives as long as this object.
  struct Ticket { Handover* owner; int layer; uint32_t rows; };
  Ticket* ticket(int layer, uint32_t rows);
  static void submit(void* ticket);
  static void join(void* ticket);

 private:
  void serve();
  void watch();
  void answer(uint64_t request);

  std::vector<int> cpus_;
  int cpu_, spin_us_, patience_ms_;
  int64_t last_ns_ = 0;  // what the answer before took
  Buffers buffers_{};
  std::atomic<Control*> control_{nullptr};
  std::vector<Layer> layers_;  // never moves: answers read it while layers are added
  std::map<std::pair<int, uint32_t>, Ticket> tickets_;
  mutable std::mutex mutex_;     // layers, tickets, failure: never taken between request and done
  std::condition_variable failed_;
  std::string failure_;
  std::atomic<int> layer_count_{0};
  std::atomic<bool> stop_{false}, broken_{false};
  std::atomic<int64_t> calls_{0}, steps_{0}, rows_{0}, busy_ns_{0};
  std::thread server_, watch_;
};

}  // namespace lk
