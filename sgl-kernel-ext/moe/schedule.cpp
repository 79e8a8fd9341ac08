#include "moe/schedule.h"

namespace lk {

void Schedule::build(const Routing& r, int64_t first_token, int tokens, int experts) {
  const size_t slots = size_t(tokens) * size_t(r.top_k);
  picked_.resize(slots);
  count_.assign(size_t(experts) + 1, 0);
  for (int t = 0; t < tokens; ++t) {
    const char* row = static_cast<const char*>(r.ids) + (first_token + t) * r.ids_stride;
    for (int k = 0; k < r.top_k; ++k) {
      const int64_t id = r.wide ? reinterpret_cast<const int64_t*>(row)[k] : reinterpret_cast<const int32_t*>(row)[k];
      const bool ours = id >= 0 && id < experts;
      picked_[size_t(t) * size_t(r.top_k) + size_t(k)] = ours ? int(id) : -1;
      if (ours) ++count_[size_t(id) + 1];
    }
  }
  groups_.clear();
  cost_ = 0;
  for (int e = 0; e < experts; ++e) {
    const int rows = count_[size_t(e) + 1];
    count_[size_t(e) + 1] += count_[size_t(e)];
    if (rows == 0) continue;
    groups_.push_back({e, count_[size_t(e)], count_[size_t(e) + 1]});
    cost_ += cost(rows);
  }
  token_.resize(size_t(count_[size_t(experts)]));
  weight_.resize(token_.size());
  for (int t = 0; t < tokens; ++t) {
    const float* row = reinterpret_cast<const float*>(static_cast<const char*>(r.weights) + (first_token + t) * r.weights_stride);
    for (int k = 0; k < r.top_k; ++k) {
      const int e = picked_[size_t(t) * size_t(r.top_k) + size_t(k)];
      if (e < 0) continue;
      const size_t at = size_t(count_[size_t(e)]++);
      token_[at] = t;
      weight_[at] = row[k];
    }
  }
}

}  // namespace lk
