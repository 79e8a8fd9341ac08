// Which rows belong to which expert, and which share of the work is whose. Pure bookkeeping: no weight
// and no activation is touched here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lk {

struct Routing {
  const void* ids;        // tokens x top_k, int32 or int64; anything outside 0..experts-1 is skipped
  ptrdiff_t ids_stride;   // bytes between tokens
  bool wide;              // int64
  const void* weights;    // tokens x top_k, float
  ptrdiff_t weights_stride;
  int top_k;
};

class Schedule {
 public:
  // Groups the routed (token, weight) pairs of `tokens` tokens by expert; within an expert in token order.
  void build(const Routing& routing, int64_t first_token, int tokens, int experts);

  struct Group { int expert, begin, end; };  // rows begin..end of the lists below
  const std::vector<Group>& groups() const { return groups_; }  // experts with rows, ascending
  const std::vector<int>& token() const { return token_; }
  const std::vector<float>& weight() const { return weight_; }

  // The share of groups x tiles from `begin` to `end` of 1, measured by cost: calls piece(group, first_tile, count, next),
  // `next` the group whose first tile comes after the piece, or null.
  template <class Piece> void share(double begin, double end, int tiles, const Piece& piece) const {
    const int64_t total = cost_ * tiles, from = int64_t(double(total) * begin), to = int64_t(double(total) * end);
    int64_t at = 0;
    for (const Group& g : groups_) {
      const int64_t each = cost(g.end - g.begin), next = at + each * tiles;
      if (next > from && at < to) {
        // A tile belongs to the share in which it begins.
        const int first = from <= at ? 0 : int((from - at + each - 1) / each);
        const int last = to >= next ? tiles : int((to - at + each - 1) / each);
        if (last > first) piece(g, first, last - first, to > next && &g != &groups_.back() ? &g + 1 : nullptr);
      }
      at = next;
    }
  }

  // The first group of run `run` of `runs` that cost about the same, of which some may be empty; the number of groups behind
  // the last.
  size_t group_at(int run, int runs) const {
    if (run == runs) return groups_.size();
    const int64_t from = cost_ * run / runs;
    int64_t at = 0;
    size_t i = 0;
    for (; i < groups_.size() && at < from; ++i) at += cost(groups_[i].end - groups_[i].begin);
    return i;
  }

  // What all groups cost together, in readings of one tile: with one row each, their number.
  double readings() const { return double(cost_) / double(cost(1)); }

 private:
  // Reading a tile's weights costs about as much as multiplying it with this many rows.
  static constexpr int kReadCost = 6;
  static int64_t cost(int rows) { return rows + kReadCost; }

  std::vector<Group> groups_;
  std::vector<int> token_, count_, picked_;
  std::vector<float> weight_;
  int64_t cost_ = 0;
};

}  // namespace lk
