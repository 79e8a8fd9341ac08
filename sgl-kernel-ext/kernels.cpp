// Instantiates every format and shape for one instruction set. Compiled once per row of lk_isa() in
// CMakeLists.txt, with LK_ISA_FILE, LK_ISA_TYPE and LK_ISA_NAME set; exports one symbol, lk_kernels_<name>.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <initializer_list>

namespace {

#include "isa/isa.h"
#include LK_ISA_FILE
#include "format/format.h"
#include "format/bf16.h"
#include "format/f16.h"
#include "format/fp8.h"
#include "format/int4.h"
#include "format/mxfp4.h"
#include "format/mxfp8.h"
#include "format/nvfp4.h"

// Bytes ahead of their use that weights are fetched: measured, see docs/explanation/performance.md.
constexpr int kAhead = 4096;

#include "shape/epilogue.h"
#include "shape/product.h"
#include "shape/tile.h"

using I = LK_ISA_TYPE;

template <class F, class Epilogue> void multiply(const lk::Product& a, const Epilogue& done) {
  if constexpr (kTiles<I>) {
    if (takes_tiles<F, I>(a)) return tile_product<F, I>(a, done);
  }
  product<F, I>(a, done);
}
template <class F> void gate_up(const lk::GateUp& args) { multiply<F>(args.product, GateUpEpilogue<I>{args}); }
template <class F> void down(const lk::Down& args) { multiply<F>(args.product, DownEpilogue<I>{args}); }
template <class F> bool tiles(const lk::Product& a) {
  if constexpr (kTiles<I>) return !a.layout->zeros && takes_tiles<F, I>(a);
  else return false;
}
template <class F> constexpr lk::FormatKernels kernels_of() { return {gate_up<F>, down<F>, tiles<F>}; }

// Sixteen at a time through body(in, out); the last few through copies, so that nothing beyond n is touched.
template <class In, class Out, class Body> void sixteens(const In* in, Out* out, int n, const Body& body) {
  int i = 0;
  for (; i + 16 <= n; i += 16) body(in + i, out + i);
  if (i == n) return;
  In from[16] = {};
  Out to[16];
  __builtin_memcpy(from, in + i, size_t(n - i) * sizeof(In));
  body(from, to);
  __builtin_memcpy(out + i, to, size_t(n - i) * sizeof(Out));
}

void to_bf16(const float* in, uint16_t* out, int n, float scale) {
  sixteens(in, out, n, [=](const float* from, uint16_t* to) { I::store_bf16(to, I::mul(I::load(from), I::set1(scale))); });
}
void to_half(const float* in, uint16_t* out, int n, float scale) {
  sixteens(in, out, n, [=](const float* from, uint16_t* to) { I::store_half(to, I::mul(I::load(from), I::set1(scale))); });
}

// x = high + rest: the nearest bf16 that is finite, and what it leaves.
void split_high(typename I::F32 x, uint16_t* high) { I::store_bf16(high, Maths<I>::finite(x)); }
void split_rest(typename I::F32 x, uint16_t* rest) {
  split_high(x, rest);
  I::store_bf16(rest, I::fma(I::widen(rest), I::set1(-1.0f), x));
}
template <class In, class Load> void split_with(const In* in, uint16_t* high, uint16_t* rest, int n, const Load& load) {
  sixteens(in, high, n, [&](const In* from, uint16_t* to) { split_high(load(from), to); });
  sixteens(in, rest, n, [&](const In* from, uint16_t* to) { split_rest(load(from), to); });
}
void split(const float* in, uint16_t* high, uint16_t* rest, int n) {
  split_with(in, high, rest, n, [](const float* p) { return I::load(p); });
}
void split_half(const uint16_t* in, uint16_t* high, uint16_t* rest, int n) {
  split_with(in, high, rest, n, [](const uint16_t* p) { return I::half(p); });
}

void sums(const uint16_t* in, float* out, int n) {
  for (int i = 0; i < n; i += lk::kSumOf) out[i / lk::kSumOf] = Maths<I>::sum(I::widen(in + i));
}

// Reads every line once, into sums that are used: what the memory gives to loads of this width. No prefetching:
// for a plain stream the hardware's own was the fastest (54 against 46-50 GB/s on two Zen 4 cores).
double read(const void* data, size_t bytes) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  typename I::F32 sum[8];
  for (auto& s : sum) s = I::zero();
  for (size_t i = 0; i + 512 <= bytes; i += 512)
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sum[j] = I::max(sum[j], I::load(reinterpret_cast<const float*>(p + i + j * 64)));
  float out[16];
  double total = 0;
  for (auto& s : sum) {
    I::store(out, s);
    for (float v : out) total += v;
  }
  return total;
}

// Independent dot2 chains on registers: the multiplier's peak.
double lane_peak(int64_t rounds, float* sink) {
  constexpr int kSums = I::kSums > 6 ? I::kSums : 6;
  alignas(64) uint16_t ones[32];
  for (auto& x : ones) x = 0x3f80;
  const auto w = I::load_pairs(reinterpret_cast<const uint8_t*>(ones));
  const auto a = I::broadcast(ones);
  typename I::F32 acc[kSums];
  for (auto& s : acc) s = I::zero();
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 32
    for (int c = 0; c < kSums; ++c) acc[c] = I::dot2(acc[c], a, w);
  float out[16];
  for (auto& s : acc) {
    I::store(out, s);
    for (float v : out) *sink += v;
  }
  return double(rounds) * kSums * 16 * 4;
}

// Four tiles of sums from two of activations and two of weights: the peak of tiles.
template <class T> double tile_peak(int64_t rounds, float* sink) {
  T::tile_begin(16);
  alignas(64) float zeros[256] = {};
  T::template tile_load<4>(zeros, 64);
  T::template tile_load<5>(zeros, 64);
  T::template tile_load<6>(zeros, 64);
  T::template tile_load<7>(zeros, 64);
  T::template tile_zero<0>();
  T::template tile_zero<1>();
  T::template tile_zero<2>();
  T::template tile_zero<3>();
  for (int64_t i = 0; i < rounds; ++i) {
    T::template tile_dot<0, 4, 6>();
    T::template tile_dot<1, 4, 7>();
    T::template tile_dot<2, 5, 6>();
    T::template tile_dot<3, 5, 7>();
  }
  T::template tile_store<0>(zeros, 64);
  T::tile_end();
  *sink += zeros[0];
  return double(rounds) * 4 * 16 * 16 * lk::kUnit * 2;
}

constexpr size_t kProduct = kDecodedBytes + (I::kSpreads ? kSpreadBytes : 0) + kSumBytes;
constexpr size_t kScratch = kTiles<I> && TileScratch::kBytes > kProduct ? TileScratch::kBytes : kProduct;

double peak(int64_t rounds, float* sink) {
  if constexpr (kTiles<I>) return tile_peak<I>(rounds, sink);
  else return lane_peak(rounds, sink);
}


}  // namespace

#define LK_JOIN2(a, b) a##b
#define LK_JOIN(a, b) LK_JOIN2(a, b)
#define LK_TEXT2(a) #a
#define LK_TEXT(a) LK_TEXT2(a)

extern const lk::Kernels LK_JOIN(lk_kernels_, LK_ISA_NAME);
const lk::Kernels LK_JOIN(lk_kernels_, LK_ISA_NAME) = {
    LK_TEXT(LK_ISA_NAME), kLane<I>, kScratch,
    {kernels_of<Bf16>(), kernels_of<F16>(), kernels_of<Fp8>(), kernels_of<Mxfp8>(), kernels_of<Mxfp4>(), kernels_of<Nvfp4>(), kernels_of<Int4>()},
    split, split_half, to_bf16, to_half, sums, read, peak};
