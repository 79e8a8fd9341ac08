// Host memory for weights and the workspace: anonymous maps aligned to 2 MB, in huge pages where the system
// gives them (a plain reader is 19-40 % faster over 2 MB pages).
#pragma once

#include <cstddef>
#include <cstdint>

namespace lk {

constexpr int kMaxNodes = 1024;  // NUMA nodes that Linux can be built for

class Buffer {
 public:
  Buffer() = default;
  Buffer(size_t bytes, bool huge);  // zero-filled; throws std::bad_alloc
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  void reserve(size_t bytes, bool huge) {  // grows by half at least; contents are lost
    if (bytes > size_) *this = Buffer(bytes > size_ + size_ / 2 ? bytes : size_ + size_ / 2, huge);
  }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Asks for the buffer's memory, before it is touched, from a NUMA node; where that is full the system takes another.
// Returns 0, or the error with which the system refuses (containers often do, and a node may not exist).
int prefer_node(const Buffer& buffer, int node);

// Makes every page of part `part` of `parts` resident and leaves what it holds; untouched memory comes from the calling
// thread's node.
void touch(const Buffer& buffer, int part, int parts);

}  // namespace lk
