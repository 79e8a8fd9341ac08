// What the processor and the operating system offer, and the floating-point mode kernels run in.
#pragma once

#include <string>
#include <vector>

namespace lk {

// Names as in CMakeLists.txt's NEEDS; a feature counts only if the system saves its registers (XCR0) or reports it (hwcaps).
const std::vector<std::string>& cpu_features();
bool cpu_has(const std::string& feature);
std::string cpu_brand();

// Between two looks at a word that another thread writes.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Subnormals flushed to zero in this thread while the object lives, as the bf16 dot instruction does.
class FlushSubnormals {
 public:
  FlushSubnormals();
  ~FlushSubnormals();
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  unsigned long saved_;
};

}  // namespace lk
