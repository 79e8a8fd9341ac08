#include "moe/handover.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "cpu.h"

namespace lk {
namespace {

constexpr int kTickMs = 50;
constexpr uint32_t kLooksPerClock = 64;  // reading the clock takes as long as a look
constexpr size_t kMostLayers = 4096;
constexpr int64_t kAwakeShare = 8, kMostAwakeNs = 5'000'000;  // of the time of an answer

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// What the GPU does between two layers grows with the batch, as the experts do: a prompt's takes a millisecond or two, and
// then all workers would be woken for every layer.
int awake_us(int64_t last_ns) { return int(std::min<int64_t>(last_ns / kAwakeShare, kMostAwakeNs) / 1000); }

void sleep_us(int us) {
  const timespec t{us / 1'000'000, (us % 1'000'000) * 1000L};
  nanosleep(&t, nullptr);
}

size_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

}  // namespace

Handover::Handover(std::vector<int> cpus, int cpu, int spin_us, int patience_ms)
    : cpus_(std::move(cpus)), cpu_(cpu), spin_us_(spin_us), patience_ms_(patience_ms) {
  layers_.reserve(kMostLayers);
  server_ = std::thread([this] { serve(); });
  watch_ = std::thread([this] { watch(); });
}

Handover::~Handover() { close(); }

void Handover::close() {
  stop_ = true;
  if (server_.joinable()) server_.join();
  if (watch_.joinable()) watch_.join();
}

void Handover::bind(const Buffers& buffers) {
  const std::lock_guard held(mutex_);
  buffers_ = buffers;
  Control* old = control_.load();
  if (old) {  // the numbers go on, so that neither side takes an old answer for a new one
    buffers.control->request.store(old->request.load());
    buffers.control->done.store(old->done.load());
    buffers.control->abort.store(old->abort.load());
  }
  control_.store(buffers.control);
}

int Handover::add(const Layer& layer) {
  const std::lock_guard held(mutex_);
  if (layers_.size() == kMostLayers) throw std::length_error("more than " + std::to_string(kMostLayers) + " layers");
  layers_.push_back(layer);
  layer_count_.store(int(layers_.size()), std::memory_order_release);
  return int(layers_.size()) - 1;
}

int64_t Handover::capacity(int layer) const {
  const std::lock_guard held(mutex_);
  const Layer& l = layers_.at(size_t(layer));
  const int64_t row = int64_t(l.experts->shape().hidden) * int64_t(size_of(l.type));
  return std::min({buffers_.x_bytes / row, buffers_.out_bytes / row, buffers_.routes / l.top_k});
}

Handover::Stats Handover::stats() const {
  Stats s{calls_, steps_, rows_, busy_ns_, 0};
  if (const Control* control = control_.load()) s.wait_ns = int64_t(control->wait_ns.load(std::memory_order_relaxed));
  return s;
}

void Handover::serve() {
  pthread_setname_np(pthread_self(), "lk-handover");
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu_ >= 0) CPU_SET(cpu_, &set);
  else for (int cpu : cpus_) CPU_SET(cpu, &set);
  // A refusal leaves the inherited mask, which is where the cpus came from.
  if (CPU_COUNT(&set)) pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  prctl(PR_SET_TIMERSLACK, 1000UL);
  int64_t since = now_ns(), idle_ns = 0;
  for (uint32_t looks = 0;; ++looks) {
    Control* control = control_.load(std::memory_order_acquire);
    const uint64_t request = control ? control->request.load(std::memory_order_acquire) : 0;
    if (control && !broken_ && request != control->done.load(std::memory_order_relaxed)) {
      answer(request);
      since = now_ns();
      idle_ns = 0;
      looks = 0;
      continue;
    }
    if (stop_.load(std::memory_order_relaxed)) return;
    if (looks % kLooksPerClock == 0) idle_ns = now_ns() - since;
    if (idle_ns < int64_t(spin_us_) * 1000) relax();  // one: on some processors it takes 140 cycles
    else sleep_us(idle_ns < 1'000'000'000 ? 20 : 500);  // the kernel's timer adds some 50 µs by default; lowered above
  }
}

void Handover::answer(uint64_t request) {
  const int64_t start = now_ns();
  Control& control = *control_.load(std::memory_order_relaxed);
  const uint32_t number = control.layer.load(std::memory_order_relaxed);
  int64_t rows = control.rows.load(std::memory_order_relaxed);
  try {
    if (number >= uint32_t(layer_count_.load(std::memory_order_acquire)))
      throw std::out_of_range("a request names layer " + std::to_string(number) + ", which does not exist");
    const Layer& layer = layers_[number];
    // Rows without an expert are padding, and padding comes last: it costs nothing.
    const int32_t* end = buffers_.ids + rows * layer.top_k;
    while (end > buffers_.ids && end[-1] < 0) --end;
    rows = (end - buffers_.ids + layer.top_k - 1) / layer.top_k;
    const ptrdiff_t stride = ptrdiff_t(layer.experts->shape().hidden) * ptrdiff_t(size_of(layer.type));
    if (rows > 0)
      layer.experts->forward({buffers_.x, stride, layer.type, rows,
                              {buffers_.ids, layer.top_k * 4, false, buffers_.weights, layer.top_k * 4, layer.top_k},
                              buffers_.out, stride, layer.type, layer.scale, layer.weight_on_input, awake_us(last_ns_)});
  } catch (const std::exception& error) {
    broken_ = true;
    fail(int(number), error.what());
    return;
  }
  const int64_t spent = last_ns_ = now_ns() - start;
  // Counted first: who sees the answer sees its sums.
  calls_.fetch_add(1, std::memory_order_relaxed);
  rows_.fetch_add(rows, std::memory_order_relaxed);
  busy_ns_.fetch_add(spent, std::memory_order_relaxed);
  if (number == 0) steps_.fetch_add(1, std::memory_order_relaxed);
  control.done.store(request, std::memory_order_release);
}

// Counts its own ticks instead of reading a clock: while the whole process is stopped nobody waits in vain.
void Handover::watch() {
  pthread_setname_np(pthread_self(), "lk-watch");
  uint64_t open = 0;
  int64_t waited_ms = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    sleep_us(kTickMs * 1000);
    Control* control = control_.load(std::memory_order_acquire);
    if (!control || broken_) continue;
    const uint64_t expired = control->expired.load(std::memory_order_acquire);
    if (expired) {
      broken_ = true;
      fail(int(expired) - 1, "the GPU waited for the CPU experts past its limit");
      continue;
    }
    const uint64_t request = control->request.load(std::memory_order_acquire);
    if (request == control->done.load(std::memory_order_acquire) || request != open) {
      open = request;
      waited_ms = 0;
      continue;
    }
    waited_ms += kTickMs;
    const uint32_t number = control->layer.load(std::memory_order_relaxed);
    int64_t allowed = patience_ms_;
    if (number < uint32_t(layer_count_.load(std::memory_order_acquire)))
      allowed += int64_t(control->rows.load(std::memory_order_relaxed)) * layers_[number].ns_per_row / 1'000'000;
    if (waited_ms <= allowed) continue;
    broken_ = true;
    fail(int(number), "the CPU engine gave no answer for " + std::to_string(waited_ms) + " ms");
  }
}

void Handover::fail(int layer, const std::string& why) {
  const std::lock_guard held(mutex_);
  const bool known = layer >= 0 && layer < int(layers_.size());
  if (failure_.empty()) failure_ = (known ? layers_[size_t(layer)].name : "layer number " + std::to_string(layer)) + ": " + why;
  failed_.notify_all();
}

std::string Handover::failure(int ms) {
  std::unique_lock held(mutex_);
  failed_.wait_for(held, std::chrono::milliseconds(ms), [&] { return !failure_.empty(); });
  return failure_;
}

void Handover::abort() {
  if (Control* control = control_.load()) control->abort.store(1, std::memory_order_release);
}

Handover::Ticket* Handover::ticket(int layer, uint32_t rows) {
  const std::lock_guard held(mutex_);
  return &tickets_.try_emplace({layer, rows}, Ticket{this, layer, rows}).first->second;
}

void Handover::submit(void* data) {
  const Ticket& ticket = *static_cast<Ticket*>(data);
  Control& control = *ticket.owner->control_.load(std::memory_order_acquire);
  control.layer.store(uint32_t(ticket.layer), std::memory_order_relaxed);
  control.rows.store(ticket.rows, std::memory_order_relaxed);
  control.request.store(control.request.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void Handover::join(void* data) {
  const Ticket& ticket = *static_cast<Ticket*>(data);
  Handover& owner = *ticket.owner;
  Control& control = *owner.control_.load(std::memory_order_acquire);
  const uint64_t request = control.request.load(std::memory_order_relaxed);
  const int64_t start = now_ns();
  while (control.done.load(std::memory_order_acquire) != request && !control.abort.load(std::memory_order_acquire)) {
    if (now_ns() - start < 50'000) relax();
    else sleep_us(10);  // the workers may want this thread's core
  }
  if (control.done.load(std::memory_order_acquire) == request) return;
  // Without an answer a row is NaN in every type, as the exchanging kernel makes it.
  const Layer& layer = owner.layers_[size_t(ticket.layer)];
  memset(owner.buffers_.out, 0xff, size_t(ticket.rows) * size_t(layer.experts->shape().hidden) * size_of(layer.type));
}

}  // namespace lk
