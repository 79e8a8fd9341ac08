// Checkpoint rows to pair panels: the one place that knows both layouts. Plain code, compiled for any
// processor; a new format is a case in each function.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace lk {

struct Matrix {       // one packed N x K matrix
  uint8_t* panels;    // panel 0
  size_t stride;      // bytes from one panel to the next (gate and up alternate)
  int columns, depth; // true N and K
};

int padded_depth(const PanelLayout& layout, int depth);
size_t panel_bytes(const PanelLayout& layout, int depth);
inline int panel_count(int columns) { return (columns + kColumns - 1) / kColumns; }

// Packs the codes of one panel. `rows` points at checkpoint row 0, `row_bytes` apart.
// bf16: 2 bytes per k. 4-bit: two codes a byte, low nibble = even k. Returns the non-finite values seen.
int64_t pack_codes(Format format, const PanelLayout& layout, const Matrix& m, int panel, const uint8_t* rows, ptrdiff_t row_bytes);

// Packs the group scales of one panel: one byte per group. Returns the scales refused: NaN, or negative E4M3.
int64_t pack_scales(Format format, const PanelLayout& layout, const Matrix& m, int panel, const uint8_t* rows, ptrdiff_t row_bytes);

}  // namespace lk
