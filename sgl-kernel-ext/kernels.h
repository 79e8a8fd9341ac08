// The contract between the three folders that cannot see each other: what an instruction set
// offers (isa/), how a format's bytes are read (format/), and how they are looped over (shape/).
//
// Pair panel. A weight matrix of N output columns and K inputs is stored as ceil(N/16) panels of 16
// columns. A *row* of a panel is 16 x (k, k+1): sixteen 32-bit lanes, each holding two neighbouring k
// of one column, low half first. That is the operand of the bf16 dot instructions, sixteen rows are an
// AMX B tile in VNNI order, and a lane instruction set splits a row with one mask and one shift.
// A format stores its codes so that a handful of instructions turn a 64-byte block into rows; group
// scales keep the checkpoint's width and follow the codes of their *super-group* (format/format.h).
// K is padded to a whole super-group and N to a whole panel when a matrix is packed, with zeros, so no
// kernel has a tail. The gate and up panels of one output tile are neighbours: gate 0, up 0, gate 1, ...
//
// A new kernel argument is a field below; a new format is one enumerator and one file in format/.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lk {

constexpr int kColumns = 16;  // columns of a panel

enum class Format { bf16, mxfp4, nvfp4 };
constexpr int kFormats = 3;

// How many bytes a panel takes, per format; the packer and the kernels both read it from here.
struct PanelLayout {
  int super;        // k per super-group: the depth is padded to a multiple of it
  int super_bytes;  // bytes of one super-group of one panel: codes, then scales
  int group;        // k that share one scale; 0 where the format has none
};

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
// weights are still read once.
struct Product {
  const uint8_t* panels;        // panel 0 of the matrix
  size_t panel_bytes;
  int first, count;             // tiles (gate_up: two panels each) or panels (down)
  int depth;                    // padded k
  const uint16_t* const* rows;  // row_count pointers
  int row_count, split;         // row_count is a multiple of split
};

struct GateUp {
  Product product;
  float gate_scale, up_scale;    // second scale of the format (1 where it has none)
  const float *gate_bias, *up_bias;  // null, or 16 values per tile
  const float* input_weight;     // null, or a factor per split row (router weight on the input)
  Activation activation;
  uint16_t* const* out;          // row_count pointers: bf16, 16 values per tile
};

struct Down {
  Product product;
  float scale;
  const float* bias;             // null, or 16 values per panel
  const float* weight;           // router weight per split row; null: 1
  float* const* out;             // per split row: f32, 16 values per panel; the result is added
};

struct FormatKernels {
  PanelLayout layout;
  void (*gate_up)(const GateUp&);
  void (*down)(const Down&);
};

// One table per instruction set, the only symbol its translation unit exports.
struct Kernels {
  const char* name;
  bool lane;                     // sums in the common order: bit-identical to every other lane ISA
  FormatKernels format[kFormats];
  void (*to_bf16)(const float* in, uint16_t* out, int n, float scale);  // n a multiple of 16
  void (*split)(const float* in, uint16_t* high, uint16_t* rest, int n);  // any n; in = high + rest, nearly
  double (*read)(const void* data, size_t bytes);                      // for the bandwidth measurement
  double (*peak)(int64_t rounds, float* sink);                         // returns FLOP done with dot2
};

}  // namespace lk
