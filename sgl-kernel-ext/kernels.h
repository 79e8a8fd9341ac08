// The contract between the three folders that cannot see each other: what an instruction set
// offers (isa/), how a format's bytes are read (format/), and how they are looped over (shape/).
//
// Pair panel. A weight matrix of N output columns and K inputs is stored as ceil(N/16) panels of 16
// columns. A *row* of a panel is 16 x (k, k+1): sixteen 32-bit lanes, each holding two neighbouring k
// of one column, low half first. That is the operand of the bf16 dot instructions, sixteen rows are an
// AMX B tile in VNNI order, and a lane instruction set splits a row with one mask and one shift.
// A format stores its codes so that a handful of instructions turn a 64-byte block into rows.
//
// A matrix holds, in this order: the codes of its panels, the scales of their groups (`group` k of 16 columns, in
// the checkpoint's own width), the zero points of their groups. Depth is padded to kUnit with codes of zero, so
// kernels have no tail in k but a last group that may be shorter; N is padded to whole panels. The gate and up
// panels of one output tile are neighbours in one matrix: gate 0, up 0, gate 1, ...
//
// A new kernel argument is a field below; a new format is one enumerator and one file in format/.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lk {

constexpr int kColumns = 16;  // columns of a panel

constexpr int kUnit = 32;     // k to which the depth of a matrix is padded

enum class Format { bf16, f16, fp8, mxfp8, mxfp4, nvfp4, int4 };
constexpr int kFormats = 7;
constexpr int kCodeBits[kFormats] = {16, 16, 8, 8, 4, 4, 4};

// How the scale of a group is written: one per column, or one for all columns of a panel (f32_shared).
enum class Scale { none, e8m0, e4m3, bf16, f16, f32, f32_shared };
constexpr int kScaleBytes[] = {0, 16, 16, 32, 32, 64, 4};  // of one group of one panel

// How the weights of a layer are written down. `group` 0: no group scales.
struct Coding {
  Format format;
  int group;
  Scale scale;
  bool zeros;  // a zero point per column and group
};

// One panel of a matrix with K inputs; the packer and the kernels both read it from here.
struct PanelLayout {
  int depth;  // K padded to kUnit
  int group;  // k of a group; the whole depth where there are no group scales
  Scale scale;
  size_t codes, scales, zeros;  // bytes of a panel; no zero points: 0

  size_t bytes(size_t panels) const { return (panels * (codes + scales + zeros) + 63) / 64 * 64; }
};

constexpr PanelLayout panel_layout(const Coding& coding, int k) {
  PanelLayout p{(k + kUnit - 1) / kUnit * kUnit, coding.group, coding.scale, 0, 0, 0};
  if (p.group == 0) p.group = p.depth;
  const size_t groups = size_t((p.depth + p.group - 1) / p.group);
  p.codes = size_t(p.depth) * kColumns * size_t(kCodeBits[int(coding.format)]) / 8;
  p.scales = groups * size_t(kScaleBytes[int(coding.scale)]);
  p.zeros = coding.zeros ? groups * kColumns : 0;
  return p;
}

// Where the parts of a packed matrix are. What is stored may begin at a later panel than 0 (a node's share does): then
// panel 0 would be in front of the memory, and only panels of the share may be asked for.
struct Panels {
  uint8_t *codes, *scales, *zeros;  // of panel 0
};
// `panels` of them, stored at `memory`, beginning with panel `first` of the matrix.
inline Panels panels_at(uint8_t* memory, const PanelLayout& layout, size_t panels, size_t first = 0) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(memory);  // as a number: it may leave the memory
  return {reinterpret_cast<uint8_t*>(at - first * layout.codes),
          reinterpret_cast<uint8_t*>(at + panels * layout.codes - first * layout.scales),
          reinterpret_cast<uint8_t*>(at + panels * (layout.codes + layout.scales) - first * layout.zeros)};
}

enum class Gate { silu, gelu, gelu_tanh, relu2 };

// y = f(gate) * (up + up_bias), f as `gate` names it (silu: g * sigmoid(alpha * g)).
// limit > 0 clamps gate above and up on both sides, before f or (limit_after) after it.
struct Activation {
  Gate gate = Gate::silu;
  float alpha = 1.0f;
  float limit = 0.0f;
  float up_bias = 0.0f;
  bool limit_after = false;
};

// Rows of activations times some panels of one expert. All row pointers are 4-byte aligned and hold
// `depth` bf16 values, zero beyond the true width. With `split` 2 a row of activations is the sum of two
// neighbouring bf16 rows, high part and rest: float32 activations with 16 bits of precision, for which the
// weights are still read once. Where the layout has zero points, `depth / kSumOf` floats follow a row's values:
// the sum of every kSumOf of them.
constexpr int kSumOf = 16;
// Rows in tiles: kUnit k of kTileRows rows are one kilobyte, row by row, a row tile's steps of k follow each other. The
// pointer of a row is to its first values.
constexpr int kTileRows = 16;
struct Product {
  Panels panels;                // of the matrix
  const PanelLayout* layout;
  int first, count;             // tiles (gate_up: two panels each) or panels (down)
  const uint16_t* const* rows;  // row_count pointers
  int row_count, split;         // row_count is a multiple of split
  uint8_t* scratch;             // of this worker, Kernels::scratch bytes
  bool tiles_only;              // multiply few rows as many are, so that a row's result does not depend on their number
  bool in_tiles;                // rows are stored in tiles, as FormatKernels::tiles asks for
  // Codes and scales of the panel that this worker reads after the last one, so that they can be fetched ahead: null
  // where that is not known.
  const uint8_t *next_codes = nullptr, *next_scales = nullptr;
};

struct GateUp {
  Product product;
  float gate_scale, up_scale;    // second scale of the format (1 where it has none)
  const float *gate_columns, *up_columns;  // null, or a factor per column: 16 values per tile
  const float *gate_bias, *up_bias;        // null, or 16 values per tile
  const float* input_weight;     // null, or a factor per split row (router weight on the input)
  Activation activation;
  uint16_t* const* out;          // row_count pointers: bf16, 16 values per tile, zero from `width` on
  bool out_in_tiles;             // rows in tiles
  int width;                     // true values of an output row
  int sums;                      // 0, or where the sums of the output rows begin, in values
};

struct Down {
  Product product;
  float scale;
  const float* columns;          // null, or a factor per column
  const float* bias;             // null, or 16 values per panel
  const float* weight;           // router weight per split row; null: 1
  float* const* out;             // per split row: f32, 16 values per panel; the result is added
};

struct FormatKernels {
  void (*gate_up)(const GateUp&);
  void (*down)(const Down&);
  bool (*tiles)(const Product&);  // whether it would like its rows in tiles; it looks at layout, row_count and tiles_only
};

// One table per instruction set, the only symbol its translation unit exports.
struct Kernels {
  const char* name;
  bool lane;                     // sums in the common order: bit-identical to every other lane ISA
  size_t scratch;                // bytes that a product needs, on a cache line
  FormatKernels format[kFormats];
  // Rows of the caller's to rows of the engine and back; any n. in = high + rest, nearly (float32) or exactly (f16);
  // infinity is the largest bf16 and infinity.
  void (*split)(const float* in, uint16_t* high, uint16_t* rest, int n);
  void (*split_half)(const uint16_t* in, uint16_t* high, uint16_t* rest, int n);
  void (*to_bf16)(const float* in, uint16_t* out, int n, float scale);
  void (*to_half)(const float* in, uint16_t* out, int n, float scale);
  void (*sums)(const uint16_t* in, float* out, int n);                    // of every kSumOf values; n a multiple of it
  double (*read)(const void* data, size_t bytes);                      // for the bandwidth measurement
  double (*peak)(int64_t rounds, float* sink);                         // returns FLOP done with dot2
};

}  // namespace lk
