// Persistent pinned worker threads with a barrier. The caller is worker 0, so an engine of n threads
// starts n - 1. Waiting spins for a short while, then sleeps in the kernel: idle costs nothing. What a worker
// throws is thrown by the run, and the others leave at their next barrier.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu.h"

namespace lk {

// A counter that threads can wait on: spin, then futex.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void advance();                            // value + 1, wakes every waiter
  void wait_past(uint32_t old, int spin_us); // returns once the value differs from `old`

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// Workers first .. first + count - 1 share the work of NUMA node `id`, or all of it where nothing is split.
struct Node { int id, first, count; };

class Pool {
 public:
  // Worker i runs on NUMA node nodes[i] (empty: all on node 0); the workers of a node are neighbours. It is bound to
  // cpus[i] alone, or to all CPUs of its node when `bind_each` is false; worker 0 is the caller and never bound. Without
  // `split` all workers share all work.
  Pool(std::vector<int> cpus, const std::vector<int>& nodes, bool split, bool bind_each, int spin_us);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return int(cpus_.size()); }
  const std::vector<int>& cpus() const { return cpus_; }
  int unbound() const { return unbound_; }  // workers that the system refused to bind: they run where the process may
  const std::vector<int>& homes() const { return homes_; }  // NUMA node of each worker
  const std::vector<Node>& nodes() const { return nodes_; }
  int node_of(int worker) const { return node_of_[size_t(worker)]; }  // index of nodes()

  // How long threads wait awake from the next wait on: at least this, in microseconds; 0 as made. Who made the pool with
  // no spin at all keeps it. For loading, where the next tensor comes sooner than a sleeping thread is woken.
  void stay_awake(int us) {
    const int next = spin_us_ == 0 || us < spin_us_ ? spin_us_ : us;
    if (spin_now_us_.load(std::memory_order_relaxed) != next) spin_now_us_.store(next, std::memory_order_relaxed);
  }

  void bring_caller() const;  // to node 0 of nodes(), where worker 0 is expected; its affinity stays what it was

  void refuse_fork() const;  // throws in a forked child, which has the object but not the threads

  // body(worker) on every worker; returns when all are done. One run at a time. Throws in a forked child, and what
  // the lowest worker threw that threw at all; the pool is as good as new after it.
  template <class Body> void run(const Body& body) {
    start([](const void* context, int worker) { (*static_cast<const Body*>(context))(worker); }, &body);
  }
  // Inside a run: waits until another worker has got so far, which must not hang on this one; throws where one has failed.
  template <class Done> void wait_until(const Done& done) const {
    for (int spins = 0; !done(); ++spins) {
      if (failed_.load(std::memory_order_acquire)) throw Left();
      if (spins < 10000) relax();
      else std::this_thread::yield();  // more threads than processors
    }
  }
  void barrier();  // inside a run: waits for all workers; throws where one has failed, so keep nothing half done across it

 private:
  using Entry = void (*)(const void*, int);
  struct Left {};  // what takes the others out of a run that has failed
  void start(Entry entry, const void* context);
  void call(int worker);
  void fail(int worker);
  void bind(int worker);
  void work(int worker);
  void stop();
  cpu_set_t cpus_of(int home) const;

  std::vector<int> cpus_, homes_, node_of_;
  std::vector<Node> nodes_;
  bool bind_each_;
  int spin_us_;
  std::atomic<int> spin_now_us_;
  int owner_;  // process that has the threads
  int unbound_ = 0;
  std::vector<std::thread> threads_;
  Entry entry_ = nullptr;
  const void* context_ = nullptr;
  bool stop_ = false;
  alignas(64) Signal begin_;
  alignas(64) Signal end_;
  alignas(64) Signal phase_;
  std::atomic<bool> failed_{false};
  std::mutex failing_;
  int first_ = 0;  // worker of error_
  std::exception_ptr error_;
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
};

}  // namespace lk
