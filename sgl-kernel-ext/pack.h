// Checkpoint rows to pair panels: the one place that knows both layouts. Plain code, compiled for any
// processor; a new format is a case in each function.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace lk {

// One packed N x K matrix: every `step`-th panel from `first` on (gate and up alternate).
struct Matrix {
  Panels panels;
  int first, step;
  int columns, depth;  // true N and K
  PanelLayout layout;
};

inline int panel_count(int columns) { return (columns + kColumns - 1) / kColumns; }

// Where a checkpoint's rows are: one per output column.
struct Rows {
  const uint8_t* data;
  ptrdiff_t row_bytes;   // from one row to the next
  ptrdiff_t word_bytes;  // 4-bit codes: from one run of 8 k (4 bytes, low half of a byte first) to the next
};

// Packs the codes of one panel: 2 bytes per k (bf16, f16), 1 (fp8, mxfp8), or 4 bits, low half = even k.
// Returns the values seen that are not finite.
int64_t pack_codes(Format format, const Matrix& m, int panel, const Rows& rows);

// Packs the group scales of one panel, one element of the layout's type per group (f32_shared: float32). Returns the
// scales refused: NaN, infinite, or negative E4M3. Throws where columns that must share a scale differ.
int64_t pack_scales(const Matrix& m, int panel, const Rows& rows);

// Packs the zero points of one panel: one byte per group, 0..16. Returns how many are beyond.
int64_t pack_zeros(const Matrix& m, int panel, const Rows& rows);

}  // namespace lk
