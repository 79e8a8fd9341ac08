// Feature detection: cpuid and XGETBV on x86-64, the kernel's hwcaps on aarch64. Compiled without any -m flag: it must
// run everywhere. A new feature is a line in detect().
#include "cpu.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
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

// Linux hands the tile registers out per process, on request: ARCH_REQ_XCOMP_PERM for the state component of tile data.
bool tiles_permitted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

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
  add(f && bit(seven.c, 1), "avx512_vbmi");
  add(f && bit(seven.c, 11), "avx512_vnni");
  add(f && bit(seven1.a, 5), "avx512_bf16");
  const bool amx = tiles && bit(seven.d, 24) && tiles_permitted();
  add(amx, "amx_tile");
  add(amx && bit(seven.d, 22), "amx_bf16");
  return found;
}
#elif defined(__aarch64__)
std::vector<std::string> detect() {
  std::vector<std::string> found;
  // Bits of the kernel's ABI, not taken from its headers: those may be older than the machine.
  auto add = [&](unsigned long word, int n, const char* name) { if (word >> n & 1) found.push_back(name); };
  const unsigned long one = getauxval(AT_HWCAP), two = getauxval(AT_HWCAP2);
  add(one, 1, "asimd");
  add(one, 10, "asimdhp");
  add(one, 20, "asimddp");
  add(one, 22, "sve");
  add(two, 13, "i8mm");
  add(two, 14, "bf16");
  return found;
}

struct Part { unsigned implementer, part; const char* name; };
constexpr Part kParts[] = {
    {0x41, 0xd03, "Cortex-A53"}, {0x41, 0xd08, "Cortex-A72"}, {0x41, 0xd0b, "Cortex-A76"}, {0x41, 0xd0c, "Neoverse N1"},
    {0x41, 0xd40, "Neoverse V1"}, {0x41, 0xd49, "Neoverse N2"}, {0x41, 0xd4f, "Neoverse V2"}, {0x41, 0xd84, "Neoverse V3"},
    {0x41, 0xd85, "Cortex-X925"}, {0x41, 0xd87, "Cortex-A725"}, {0x41, 0xd8e, "Neoverse N3"}, {0xc0, 0xac3, "Ampere-1"},
    {0xc0, 0xac4, "Ampere-1a"}};

std::string part_name(unsigned implementer, unsigned part) {
  for (const Part& known : kParts)
    if (known.implementer == implementer && known.part == part) return known.name;
  std::ostringstream text;
  text << std::hex << "Arm processor (implementer 0x" << implementer << ", part 0x" << part << ")";
  return text.str();
}
#else
std::vector<std::string> detect() { return {}; }
#endif

// The value behind a line of /proc/cpuinfo that begins with `key`, or nothing.
const char* value_of(const std::string& line, const char* key) {
  if (line.rfind(key, 0) != 0) return nullptr;
  const auto colon = line.find(": ");
  return colon == std::string::npos ? nullptr : line.c_str() + colon + 2;
}

}  // namespace

const std::vector<std::string>& cpu_features() {
  static const std::vector<std::string> features = detect();
  return features;
}

bool cpu_has(const std::string& feature) {
  const auto& all = cpu_features();
  return std::find(all.begin(), all.end(), feature) != all.end();
}

#if defined(__aarch64__)
// Arm's cpuinfo has numbers, and cores of several kinds in one machine: "Cortex-X925 + Cortex-A725".
std::string cpu_brand() {
  std::ifstream info("/proc/cpuinfo");
  std::vector<std::string> names;
  unsigned implementer = 0;
  for (std::string line; std::getline(info, line);) {
    if (const char* text = value_of(line, "CPU implementer")) implementer = unsigned(strtoul(text, nullptr, 0));
    if (const char* text = value_of(line, "CPU part")) {
      const std::string name = part_name(implementer, unsigned(strtoul(text, nullptr, 0)));
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  std::string all;
  for (const auto& name : names) all += (all.empty() ? "" : " + ") + name;
  return all.empty() ? "unknown" : all;
}
#else
std::string cpu_brand() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (const char* name = value_of(line, "model name")) return name;
  return "unknown";
}
#endif

#if defined(__x86_64__)
FlushSubnormals::FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(unsigned(saved_) | 0x8040u); }
FlushSubnormals::~FlushSubnormals() { _mm_setcsr(unsigned(saved_)); }
#elif defined(__aarch64__)
FlushSubnormals::FlushSubnormals() {
  constexpr unsigned long kFlush = 1ul << 24, kExtendedBf16 = 1ul << 13;  // EBF off: BFDOT rounds alike on every core
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
  __asm__ volatile("msr fpcr, %0" ::"r"((saved_ | kFlush) & ~kExtendedBf16));
}
FlushSubnormals::~FlushSubnormals() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
FlushSubnormals::FlushSubnormals() : saved_(0) {}
FlushSubnormals::~FlushSubnormals() {}
#endif

}  // namespace lk
