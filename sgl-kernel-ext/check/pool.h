// What the worker threads owe the engine when a worker throws. Python cannot make one throw where it hurts.
#pragma once

#include <sched.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "moe/pool.h"

namespace check {

// What a run throws; empty if nothing.
template <class Body> std::string thrown(lk::Pool& pool, const Body& body) {
  try {
    pool.run(body);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

// One that throws before, between or after barriers is the error of the run, whichever worker it is; nobody waits
// for it, and the next run is as any other. `expect(good, what)` takes the verdicts.
template <class Expect> void check_pool(const Expect& expect) {
  for (int threads : {1, 2, 5}) {
    lk::Pool pool(std::vector<int>(size_t(threads), sched_getcpu()), {}, true, true, 20);
    const std::string title = std::to_string(threads) + " threads: ";
    for (int who = 0; who < threads; ++who)
      for (int when = 0; when < 3; ++when) {
        const auto body = [&](int worker) {
          for (int step = 0; step < 3; ++step) {
            if (worker == who && step == when) throw std::runtime_error("worker " + std::to_string(who));
            if (step < 2) pool.barrier();
          }
        };
        expect(thrown(pool, body) == "worker " + std::to_string(who), title + "the error of a worker is lost");
        std::atomic<int> before{0}, ran{0};
        bool together = true;
        pool.run([&](int worker) {
          ++before;
          pool.barrier();
          if (worker == 0) together = before == threads;
          ++ran;
        });
        expect(together && ran == threads, title + "a run after an error is not whole");
      }
    const auto all = [&](int worker) { throw std::runtime_error("worker " + std::to_string(worker)); };
    expect(thrown(pool, all) == "worker 0", title + "of several errors the lowest worker's is not the one thrown");
  }
}

}  // namespace check
