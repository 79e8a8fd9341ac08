// Tiles without a matrix multiplier, for tests of shape/tile.h on any processor: the scalar instruction set with
// AMX's eight tiles in memory. Never chosen by itself.
#include "scalar.h"

struct SoftTiles : Scalar {
  static constexpr bool kOwnOrder = true;
  static constexpr int kFewRows = 2, kFewBf16Rows = 4, kNearSteps = 2, kChains = 2;
  inline static thread_local uint32_t tiles[8][16][16];
  inline static thread_local int rows;  // of tiles 0-5

  static void copy_line(void* to, const void* from) { __builtin_memcpy(to, from, 64); }
  static void tile_begin(int count) { rows = count; }
  static void tile_end() { __builtin_memset(tiles, 0xff, sizeof tiles); }  // NaN: nobody may use them afterwards
  template <int T> static void tile_zero() { __builtin_memset(tiles[T], 0, sizeof tiles[T]); }
  template <int T> static void tile_load(const void* p, ptrdiff_t stride) {
    for (int r = 0; r < (T < 6 ? rows : 16); ++r) __builtin_memcpy(tiles[T][r], static_cast<const uint8_t*>(p) + r * stride, 64);
  }
  template <int T> static void tile_load_once(const void* p, ptrdiff_t stride) { tile_load<T>(p, stride); }
  template <int T> static void tile_store(void* p, ptrdiff_t stride) {
    for (int r = 0; r < (T < 6 ? rows : 16); ++r) __builtin_memcpy(static_cast<uint8_t*>(p) + r * stride, tiles[T][r], 64);
  }
  template <int Sums, int Rows, int Weights> LK_CALL static void tile_dot() {
    for (int m = 0; m < rows; ++m)
      for (int n = 0; n < 16; ++n) {
        float sum = from_bits(tiles[Sums][m][n]);
        for (int k = 0; k < 16; ++k) {
          const uint32_t a = tiles[Rows][m][k], w = tiles[Weights][k][n];
          sum = __builtin_fmaf(from_bits(a & 0xffff0000u), from_bits(w & 0xffff0000u), __builtin_fmaf(from_bits(a << 16), from_bits(w << 16), sum));
        }
        tiles[Sums][m][n] = bits(sum);
      }
  }
};
static_assert(TileIsa<SoftTiles>);
