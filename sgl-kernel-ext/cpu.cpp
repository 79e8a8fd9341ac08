// Feature detection by cpuid and XGETBV. Compiled without any -m flag: it must run everywhere.
#include "cpu.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace lk {
namespace {

#if defined(__x86_64__)
struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf(unsigned leaf, unsigned sub = 0) {
    if (!__get_cpuid_count(leaf, sub, &a, &b, &c, &d)) a = b = c = d = 0;
  }
};
bool bit(unsigned word, int n) { return word >> n & 1; }

std::vector<std::string> detect() {
  std::vector<std::string> found;
  auto add = [&](bool yes, const char* name) { if (yes) found.push_back(name); };
  const Leaf one(1), seven(7), seven1(7, 1);
  unsigned xcr0 = 0;
  if (bit(one.c, 27)) {  // OSXSAVE
    unsigned high;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
  }
  const bool ymm = (xcr0 & 0x6) == 0x6, zmm = ymm && (xcr0 & 0xe0) == 0xe0, tiles = (xcr0 & 0x60000) == 0x60000;
  add(ymm && bit(one.c, 12), "fma");
  add(ymm && bit(one.c, 29), "f16c");
  add(ymm && bit(seven.b, 5), "avx2");
  const bool f = zmm && bit(seven.b, 16);
  add(f, "avx512f");
  add(f && bit(seven.b, 17), "avx512dq");
  add(f && bit(seven.b, 30), "avx512bw");
  add(f && bit(seven.b, 31), "avx512vl");
  add(f && bit(seven.c, 11), "avx512_vnni");
  add(f && bit(seven1.a, 5), "avx512_bf16");
  add(tiles && bit(seven.d, 24), "amx_tile");
  add(tiles && bit(seven.d, 22), "amx_bf16");
  return found;
}
#else
std::vector<std::string> detect() { return {}; }
#endif

}  // namespace

const std::vector<std::string>& cpu_features() {
  static const std::vector<std::string> features = detect();
  return features;
}

bool cpu_has(const std::string& feature) {
  const auto& all = cpu_features();
  return std::find(all.begin(), all.end(), feature) != all.end();
}

std::string cpu_brand() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0) {
      const auto colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  return "unknown";
}

#if defined(__x86_64__)
FlushSubnormals::FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(unsigned(saved_) | 0x8040u); }
FlushSubnormals::~FlushSubnormals() { _mm_setcsr(unsigned(saved_)); }
#elif defined(__aarch64__)
FlushSubnormals::FlushSubnormals() {
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
  __asm__ volatile("msr fpcr, %0" ::"r"(saved_ | 1ul << 24));
}
FlushSubnormals::~FlushSubnormals() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
FlushSubnormals::FlushSubnormals() : saved_(0) {}
FlushSubnormals::~FlushSubnormals() {}
#endif

}  // namespace lk
