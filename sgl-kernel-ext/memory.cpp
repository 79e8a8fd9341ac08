#include "memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <utility>

namespace lk {

constexpr size_t kHuge = size_t(2) << 20;

#ifdef LK_GUARD_PAGES
// For lk_selfcheck: whole cache lines that end where a page begins that nobody may touch.
Buffer::Buffer(size_t bytes, bool) {
  if (bytes == 0) return;
  const size_t page = size_t(sysconf(_SC_PAGESIZE)), lines = (bytes + 63) / 64 * 64, pages = (lines + page - 1) / page * page;
  void* map = mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  mprotect(static_cast<uint8_t*>(map) + pages, page, PROT_NONE);
  data_ = static_cast<uint8_t*>(map) + pages - lines;
  size_ = lines;
}

Buffer::~Buffer() {
  if (!data_) return;
  const size_t page = size_t(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(data_) / page * page;
  munmap(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data_) + size_ + page - begin);
}
#else
Buffer::Buffer(size_t bytes, bool huge) {
  if (bytes == 0) return;
  size_ = (bytes + kHuge - 1) / kHuge * kHuge;
  void* map = mmap(nullptr, size_ + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) {
    size_ = 0;
    throw std::bad_alloc();
  }
  const uintptr_t begin = reinterpret_cast<uintptr_t>(map), aligned = (begin + kHuge - 1) / kHuge * kHuge;
  if (aligned > begin) munmap(map, aligned - begin);
  if (begin + kHuge > aligned) munmap(reinterpret_cast<void*>(aligned + size_), begin + kHuge - aligned);
  data_ = reinterpret_cast<uint8_t*>(aligned);
  madvise(data_, size_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // a hint: doctor reports what the system does with it
}

Buffer::~Buffer() {
  if (data_) munmap(data_, size_);
}
#endif

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

int prefer_node(const Buffer& buffer, int node) {
  if (buffer.size() == 0) return 0;
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMaxNodes / kBits] = {};
  mask[node / kBits] = 1ul << node % kBits;
  // The kernel reads one bit less than it is told.
  return syscall(SYS_mbind, buffer.data(), buffer.size(), MPOL_PREFERRED, mask, kMaxNodes + 1ul, 0) == 0 ? 0 : errno;
}

void touch(const Buffer& buffer, int part, int parts) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers do not have
  const size_t page = size_t(sysconf(_SC_PAGESIZE)), pages = (buffer.size() + page - 1) / page;
  const size_t begin = pages * size_t(part) / size_t(parts), end = pages * size_t(part + 1) / size_t(parts);
  if (begin == end || madvise(buffer.data() + begin * page, (end - begin) * page, kPopulateWrite) == 0) return;
  for (size_t i = begin; i < end; ++i) {  // Linux before 5.14
    volatile uint8_t* at = buffer.data() + i * page;
    *at = *at;
  }
}

}  // namespace lk
