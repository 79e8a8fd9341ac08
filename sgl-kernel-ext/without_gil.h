// Native work while other Python threads run, also at the interpreter's end.
#pragma once

#include <nanobind/nanobind.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace lk {

// Around native work: other Python threads run. Once the interpreter ends, a daemon thread that comes back from a call
// must not ask for the GIL: Python would unwind it through frames that may not throw, which aborts the process. It sleeps
// instead, and the process ends around it.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    ++returning_;
    if (closing_ && std::this_thread::get_id() != closer_) {
      --returning_;
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
    PyEval_RestoreThread(state_);
    --returning_;
  }
  static void watch() {
    pthread_atfork(nullptr, nullptr, [] { returning_ = 0; });  // a forked child has none of the other threads
    nanobind::module_::import_("atexit").attr("register")(nanobind::cpp_function(&WithoutGil::close));
  }

 private:
  // At the interpreter's end; afterwards no other thread waits for the GIL in here, or ever will.
  static void close() {
    closer_ = std::this_thread::get_id();
    closing_ = true;
    PyThreadState* state = PyEval_SaveThread();
    while (returning_) std::this_thread::yield();
    PyEval_RestoreThread(state);
  }

  PyThreadState* state_;
  static inline std::atomic<int> returning_{0};
  static inline std::atomic<bool> closing_{false};
  static inline std::thread::id closer_;
};

}  // namespace lk
