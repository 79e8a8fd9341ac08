// Arrays that end where a page begins that nobody may touch: one byte too far is a crash at the very instruction.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace check {

template <class T> class Guarded {
 public:
  Guarded() = default;
  explicit Guarded(size_t count, int poison = 0) : count_(count) {  // every byte is `poison`
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), bytes = count * sizeof(T);
    mapped_ = (bytes + page - 1) / page * page + page;
    map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map_ == MAP_FAILED) throw std::bad_alloc();
    uint8_t* end = static_cast<uint8_t*>(map_) + mapped_ - page;
    mprotect(end, page, PROT_NONE);
    data_ = reinterpret_cast<T*>(end - bytes);
    if (count > 0) memset(data_, poison, bytes);
  }
  ~Guarded() { if (map_) munmap(map_, mapped_); }
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(map_, other.map_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

 private:
  void* map_ = nullptr;
  size_t mapped_ = 0, count_ = 0;
  T* data_ = nullptr;
};

}  // namespace check
