// Number formats in float64 and a random generator that gives the same numbers everywhere. Slow and obvious.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace check {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  int below(int n) { return int(bits() % uint64_t(n)); }
  double uniform() { return double(bits() >> 11) * 0x1p-53; }
  double normal() {  // twelve uniform numbers: near enough, and exact everywhere
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  uint64_t state_;
};

inline double from_float_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline double from_bf16(uint16_t bits) { return from_float_bits(uint32_t(bits) << 16); }

inline uint16_t to_bf16(double finite) {  // nearest even
  const float value = float(finite);
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// A float of `exponent` and `mantissa` bits with IEEE subnormals; all ones is not treated apart.
inline double small_float(uint32_t bits, int exponent, int mantissa) {
  const int bias = (1 << (exponent - 1)) - 1, e = int(bits >> mantissa) & ((1 << exponent) - 1);
  const double fraction = std::ldexp(double(bits & ((1u << mantissa) - 1)), -mantissa);
  const double value = e ? std::ldexp(1 + fraction, e - bias) : std::ldexp(fraction, 1 - bias);
  return bits >> (exponent + mantissa) & 1 ? -value : value;
}
inline uint16_t to_f16(double value) {  // nearest even
  if (std::fabs(value) >= 65520) return value < 0 ? 0xfc00 : 0x7c00;
  if (value == 0) return std::signbit(value) ? 0x8000 : 0;
  const int e = std::ilogb(value) < -14 ? -14 : std::ilogb(value);
  const uint32_t steps = uint32_t(std::nearbyint(std::ldexp(std::fabs(value), 10 - e)));
  return uint16_t((value < 0 ? 0x8000u : 0u) | ((uint32_t(e + 14) << 10) + steps));
}
inline double from_f16(uint16_t bits) { return small_float(bits, 5, 10); }
inline double from_e4m3(uint8_t bits) { return small_float(bits, 4, 3); }
inline double from_e2m1(uint8_t bits) { return small_float(bits, 2, 1); }
inline double from_e8m0(uint8_t bits) { return bits ? std::ldexp(1.0, int(bits) - 127) : 0.0; }  // byte 0 counts as 0

}  // namespace check
