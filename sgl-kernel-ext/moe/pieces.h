// Which panels of down, and with which experts, a worker of a node takes at a time. Pure bookkeeping.
//
// Every piece reads the activations of all its experts, so few wide ranges of panels cost the least; but workers are not
// equally fast, so the last pieces have to be short. Where tiles multiply, the last ranges are single pairs of panels (one
// panel takes longer than half of them), and a pair is cut further by experts: into runs that follow each other, so that
// the order in which a sum is made stays the same whoever makes it.
#pragma once

#include <algorithm>

namespace lk {

// Where part `part` of `each` parts per worker begins, of 1. The parts of a worker's later turns are smaller, so that all
// end at about the same time although the first take few turns.
inline double part_begin(int workers, int each, int part) {
  const auto before = [&](int turn) { return 1.0 - double((each - turn) * (each - turn)) / (each * each); };
  const int turn = part / workers;
  return before(turn) + (before(turn + 1) - before(turn)) * (part % workers) / workers;
}

// Panels begin..end with run `run` of the `runs` that all experts are cut into. Pieces of the same panels come in the
// order of their runs, and a run begins when the one before has ended.
struct Piece { int begin, end, run, runs; };

class Pieces {
 public:
  // `each`: ranges per worker where panels are not taken in pairs; 1: the work is too small for more.
  Pieces(int panels, int workers, int each, bool pairs) : panels_(panels), workers_(workers), each_(each), together_(pairs ? 2 : 1) {
    if (!pairs || each == 1) return;
    const int all = (panels + 1) / 2;
    wide_ = std::max(all - std::max(workers, all / kShort), 0) / workers;
    chains_ = all - wide_ * workers;
  }

  int count() const { return chains_ ? (wide_ ? workers_ : 0) + chains_ * kRuns : workers_ * each_; }

  // Behind the last it is empty.
  Piece at(int i) const {
    if (i >= count()) return {0, 0, 0, 1};
    if (!chains_) return {begin(i), begin(i + 1), 0, 1};
    const int ranges = wide_ ? workers_ : 0;
    if (i < ranges) return {i * wide_ * 2, (i + 1) * wide_ * 2, 0, 1};
    const int first = (ranges * wide_ + (i - ranges) % chains_) * 2;
    return {first, std::min(first + 2, panels_), (i - ranges) / chains_, kRuns};
  }

 private:
  static constexpr int kRuns = 4;   // 3 and 6 are as good
  static constexpr int kShort = 5;  // at least a fifth of the pairs become short pieces, and as many as there are workers
  int begin(int part) const {
    return part == workers_ * each_ ? panels_ : int(panels_ * part_begin(workers_, each_, part)) / together_ * together_;
  }

  int panels_, workers_, each_, together_;
  int wide_ = 0;    // pairs of a worker's first range
  int chains_ = 0;  // single pairs, cut into runs
};

}  // namespace lk
