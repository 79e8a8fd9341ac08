#include "pack.h"

#include <algorithm>
#include <cstring>

namespace lk {
namespace {

constexpr int kNibbleBlock = 8;  // k per 64-byte block of 4-bit codes

// Where super-group s, block b of a panel starts.
uint8_t* super(const PanelLayout& layout, const Matrix& m, int panel, int s) {
  return m.panels + size_t(panel) * m.stride + size_t(s) * layout.super_bytes;
}

int64_t pack_bf16(const PanelLayout& layout, const Matrix& m, int panel, const uint8_t* rows, ptrdiff_t row_bytes) {
  const int columns = std::min(kColumns, m.columns - panel * kColumns);
  uint16_t* out = reinterpret_cast<uint16_t*>(super(layout, m, panel, 0));
  const int depth = padded_depth(layout, m.depth);
  if (columns < kColumns || depth > m.depth) memset(out, 0, size_t(depth) * kColumns * 2);
  int64_t bad = 0;
  constexpr int kStep = 32;  // k per pass: the sixteen source rows stay in L1
  for (int k0 = 0; k0 < m.depth; k0 += kStep) {
    const int n = std::min(kStep, m.depth - k0);
    for (int c = 0; c < columns; ++c) {
      uint16_t row[kStep] = {};
      memcpy(row, rows + (ptrdiff_t(panel) * kColumns + c) * row_bytes + ptrdiff_t(k0) * 2, size_t(n) * 2);
      uint32_t pairs[kStep / 2];
      memcpy(pairs, row, sizeof pairs);
      for (int k = 0; k < kStep; ++k) bad += (row[k] & 0x7f80) == 0x7f80;
      for (int j = 0; j < (n + 1) / 2; ++j) memcpy(out + (k0 / 2 + j) * kColumns * 2 + c * 2, &pairs[j], 4);
    }
  }
  return bad;
}

// Low nibbles of four bytes gathered into the low half, high nibbles into the high half.
inline uint32_t split_nibbles(uint32_t v) {
  auto gather = [](uint32_t t) {
    t = (t | t >> 4) & 0x00ff00ffu;
    return (t | t >> 8) & 0xffffu;
  };
  return gather(v & 0x0f0f0f0fu) | gather(v >> 4 & 0x0f0f0f0fu) << 16;
}

void pack_nibbles(const PanelLayout& layout, const Matrix& m, int panel, const uint8_t* rows, ptrdiff_t row_bytes) {
  const int columns = std::min(kColumns, m.columns - panel * kColumns);
  const int blocks = padded_depth(layout, m.depth) / kNibbleBlock, per_super = layout.super / kNibbleBlock;
  const int whole = m.depth / kNibbleBlock;
  constexpr int kStep = 16;  // blocks per pass
  for (int b0 = 0; b0 < blocks; b0 += kStep) {
    uint32_t words[kStep][kColumns] = {};
    const int n = std::min(kStep, std::max(0, whole - b0));
    for (int c = 0; c < columns; ++c) {
      const uint8_t* row = rows + (ptrdiff_t(panel) * kColumns + c) * row_bytes + ptrdiff_t(b0) * 4;
      uint32_t raw[kStep] = {};
      memcpy(raw, row, size_t(n) * 4);
      if (b0 + n == whole && n < kStep)  // the last, partial block: fewer than 8 codes
        memcpy(&raw[n], row + n * 4, size_t(m.depth % kNibbleBlock + 1) / 2);
      for (int i = 0; i < kStep; ++i) words[i][c] = split_nibbles(raw[i]);
    }
    for (int i = 0; i < kStep && b0 + i < blocks; ++i) {
      const int b = b0 + i;
      memcpy(super(layout, m, panel, b / per_super) + b % per_super * 64, words[i], 64);
    }
  }
}

}  // namespace

int padded_depth(const PanelLayout& layout, int depth) { return (depth + layout.super - 1) / layout.super * layout.super; }

size_t panel_bytes(const PanelLayout& layout, int depth) {
  return size_t(padded_depth(layout, depth) / layout.super) * layout.super_bytes;
}

int64_t pack_codes(Format format, const PanelLayout& layout, const Matrix& m, int panel, const uint8_t* rows, ptrdiff_t row_bytes) {
  if (format == Format::bf16) return pack_bf16(layout, m, panel, rows, row_bytes);
  pack_nibbles(layout, m, panel, rows, row_bytes);
  return 0;  // every 4-bit code is finite
}

int64_t pack_scales(Format format, const PanelLayout& layout, const Matrix& m, int panel, const uint8_t* rows, ptrdiff_t row_bytes) {
  const int columns = std::min(kColumns, m.columns - panel * kColumns);
  const int groups = (m.depth + layout.group - 1) / layout.group, per_super = layout.super / layout.group;
  const int code_bytes = layout.super_bytes - per_super * kColumns;
  int64_t bad = 0;
  for (int g = 0; g < padded_depth(layout, m.depth) / layout.group; ++g) {
    uint8_t scales[kColumns] = {};
    for (int c = 0; c < columns && g < groups; ++c) {
      const uint8_t s = rows[(ptrdiff_t(panel) * kColumns + c) * row_bytes + g];
      bad += format == Format::mxfp4 ? s == 0xff : s >= 0x7f;
      scales[c] = s;
    }
    memcpy(super(layout, m, panel, g / per_super) + code_bytes + g % per_super * kColumns, scales, kColumns);
  }
  return bad;
}

}  // namespace lk
