#include "moe/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "cpu.h"

namespace lk {
namespace {

void futex(std::atomic<uint32_t>& word, int op, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

void Signal::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst)) futex(value_, FUTEX_WAKE, INT_MAX);
}

void Signal::wait_past(uint32_t old, int spin_us) {
  const auto seen = [&] {
    for (int i = 0; i < 32; ++i) {
      if (value() != old) return true;
      relax();
    }
    return false;
  };
  if (seen()) return;  // most waits of a busy engine: without asking for the time
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
  do {
    if (seen()) return;
  } while (std::chrono::steady_clock::now() < until);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value() == old) futex(value_, FUTEX_WAIT, old);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

Pool::Pool(std::vector<int> cpus, const std::vector<int>& nodes, bool split, bool bind_each, int spin_us)
    : cpus_(std::move(cpus)), homes_(nodes.empty() ? std::vector<int>(cpus_.size()) : nodes), bind_each_(bind_each),
      spin_us_(spin_us), spin_now_us_(spin_us), owner_(getpid()) {
  for (int i = 0; i < size(); ++i) {
    const int id = homes_[split ? size_t(i) : 0];
    if (nodes_.empty() || nodes_.back().id != id) nodes_.push_back({id, i, 0});
    ++nodes_.back().count;
    node_of_.push_back(int(nodes_.size()) - 1);
  }
  try {
    for (int i = 1; i < size(); ++i) {
      threads_.emplace_back([this, i] { work(i); });
      bind(i);
    }
  } catch (const std::system_error& error) {
    const size_t started = threads_.size();
    stop();
    throw std::runtime_error("the system started " + std::to_string(started) + " of " + std::to_string(size() - 1) +
                             " worker threads and refused the next (" + error.what() +
                             "); use fewer threads, or raise the limit of processes or memory");
  }
}

Pool::~Pool() {
  // In a forked child the threads do not exist: they can be neither joined nor detached, so their handles stay.
  if (getpid() != owner_) new std::vector<std::thread>(std::move(threads_));
  else stop();
}

void Pool::stop() {
  stop_ = true;
  begin_.advance();
  for (auto& t : threads_) t.join();
}

cpu_set_t Pool::cpus_of(int home) const {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (size_t i = 0; i < cpus_.size(); ++i)
    if (homes_[i] == home) CPU_SET(cpus_[i], &set);
  return set;
}

void Pool::bring_caller() const {
  const cpu_set_t home = cpus_of(homes_.front());
  const int cpu = sched_getcpu();
  if (cpu < 0 || CPU_ISSET(cpu, &home)) return;
  cpu_set_t given, there;
  if (sched_getaffinity(0, sizeof given, &given) != 0) return;
  CPU_AND(&there, &given, &home);
  if (CPU_COUNT(&there) == 0) return;  // pinned elsewhere by its owner
  // The system moves a thread at once when its mask asks for it, and seldom moves it back.
  if (sched_setaffinity(0, sizeof there, &there) == 0) sched_setaffinity(0, sizeof given, &given);
}

void Pool::bind(int worker) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (bind_each_) CPU_SET(cpus_[size_t(worker)], &set);
  else set = cpus_of(homes_[size_t(worker)]);
  const pthread_t thread = threads_[size_t(worker) - 1].native_handle();
  if (pthread_setaffinity_np(thread, sizeof set, &set) != 0) ++unbound_;  // it keeps the mask of its maker
  pthread_setname_np(thread, "lk-worker");
}

void Pool::work(int worker) {
  FlushSubnormals flush;
  for (uint32_t seen = 0;; ++seen) {
    begin_.wait_past(seen, spin_now_us_.load(std::memory_order_relaxed));
    if (stop_) return;
    call(worker);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) end_.advance();
  }
}

void Pool::call(int worker) {
  try {
    entry_(context_, worker);
  } catch (const Left&) {
  } catch (...) {
    fail(worker);
  }
}

void Pool::fail(int worker) {
  {
    const std::lock_guard held(failing_);
    if (!error_ || worker < first_) {
      error_ = std::current_exception();
      first_ = worker;
    }
  }
  failed_.store(true, std::memory_order_release);
  phase_.advance();  // those who wait for this worker leave
}

void Pool::refuse_fork() const {
  if (getpid() != owner_)
    throw std::runtime_error("the CPU engine was started before this process was forked; start it in the process that uses it");
}

void Pool::start(Entry entry, const void* context) {
  refuse_fork();
  FlushSubnormals flush;
  if (threads_.empty()) return entry(context, 0);
  const uint32_t end = end_.value();
  entry_ = entry;
  context_ = context;
  running_.store(size() - 1, std::memory_order_relaxed);
  begin_.advance();
  call(0);
  end_.wait_past(end, spin_now_us_.load(std::memory_order_relaxed));
  if (!failed_.load(std::memory_order_acquire)) return;
  arrived_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::barrier() {
  if (threads_.empty()) return;
  const uint32_t phase = phase_.value();
  // The failing worker sets the flag before it advances the phase: one of the two is seen.
  if (failed_.load(std::memory_order_acquire)) throw Left();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.advance();
  } else {
    phase_.wait_past(phase, spin_now_us_.load(std::memory_order_relaxed));
    if (failed_.load(std::memory_order_acquire)) throw Left();
  }
}

}  // namespace lk
