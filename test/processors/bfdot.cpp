// What BFDOT and BFMMLA compute, as docs/explanation/numerics.md has it, against the instructions themselves: random
// operands of many sizes, infinities and subnormals among them. Prints how many results were compared and how many differ.
#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>

static float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// sum + error, exactly, rounded to odd: cut off, and the last bit set if anything was cut off.
static float to_odd(double sum, double error) {
  if (!std::isfinite(sum)) return float(sum);
  if (std::fabs(sum) + (sum > 0 ? error : -error) >= 0x1p128) return std::copysign(INFINITY, float(sum));
  float nearest = float(sum);
  if (std::isinf(nearest)) nearest = std::copysign(0x1.fffffep127f, nearest);
  const double cut = sum - double(nearest) + error;
  if (cut == 0) return flushed(nearest);
  const bool too_large = nearest != 0 && (nearest > 0) != (cut > 0);
  return flushed(from_bits((bits_of(nearest) - too_large) | 1));
}
static float add(float a, float b) {
  a = flushed(a), b = flushed(b);
  const double sum = double(a) + b, part = sum - a;  // the error of a sum in two parts, exactly
  return to_odd(sum, (double(a) - (sum - part)) + (double(b) - part));
}
static float multiply(float a, float b) { return to_odd(double(flushed(a)) * flushed(b), 0); }
static float dot(float sum, uint32_t a, uint32_t b) {
  const float low = multiply(from_bits(a << 16), from_bits(b << 16));
  const float high = multiply(from_bits(a & 0xffff0000u), from_bits(b & 0xffff0000u));
  return add(sum, add(low, high));
}
static bool same(float a, float b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

int main() {
  std::mt19937 random(1);
  const unsigned from[] = {0, 120, 100, 118}, some[] = {255, 10, 50, 20};  // ranges of exponents
  long compared = 0, different = 0;
  for (int turn = 0; turn < 100000; ++turn) {
    uint32_t v[9];
    for (uint32_t& word : v) {
      const auto exponent = [&] { return uint32_t(from[turn % 4] + random() % some[turn % 4]); };
      word = (uint32_t(random()) & 0x807f807fu) | exponent() << 23 | exponent() << 7;
    }
    const float sum = from_bits(v[8]);
    const bfloat16x8_t a = vreinterpretq_bf16_u32(vld1q_u32(v)), b = vreinterpretq_bf16_u32(vld1q_u32(v + 4));
    float pairs[4], squares[4];
    vst1q_f32(pairs, vbfdotq_f32(vdupq_n_f32(sum), a, b));
    vst1q_f32(squares, vbfmmlaq_f32(vdupq_n_f32(sum), a, b));
    for (int i = 0; i < 4; ++i) {
      const uint32_t *row = v + i / 2 * 2, *column = v + 4 + i % 2 * 2;
      different += !same(pairs[i], dot(sum, v[i], v[4 + i]));
      different += !same(squares[i], dot(dot(sum, row[0], column[0]), row[1], column[1]));
      compared += 2;
    }
  }
  std::printf("%ld compared, %ld different\n", compared, different);
  return different != 0;
}
