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

// Copies of a fixed size compile to a few moves, which is most of a packer's speed.
template <int kBytes> void copy(void* to, const void* from, int bytes) {
  if (bytes == kBytes) memcpy(to, from, kBytes);
  else memcpy(to, from, size_t(bytes));
}

int64_t pack_bf16(const PanelLayout& layout, const Matrix& m, int panel, const uint8_t* rows, ptrdiff_t row_bytes) {
  const int columns = std::min(kColumns, m.columns - panel * kColumns);
  uint32_t* out = reinterpret_cast<uint32_t*>(super(layout, m, panel, 0));
  int64_t bad = 0;
  constexpr int kPairs = 16;  // pairs of k per pass: a 16 x 16 transposition in L1
  for (int k0 = 0; k0 < padded_depth(layout, m.depth); k0 += 2 * kPairs, out += kPairs * kColumns) {
    const int n = std::clamp(m.depth - k0, 0, 2 * kPairs);
    uint32_t tile[kColumns][kPairs] = {};
    for (int c = 0; c < columns; ++c) copy<4 * kPairs>(tile[c], rows + (ptrdiff_t(panel) * kColumns + c) * row_bytes + ptrdiff_t(k0) * 2, n * 2);
    // An exponent of all ones, in either half: adding one to it carries into the bit above.
    uint32_t carry = 0;
    for (int c = 0; c < columns; ++c)
      for (int j = 0; j < kPairs; ++j) carry |= ((tile[c][j] & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
    if (carry)
      for (int c = 0; c < columns; ++c)
        for (int j = 0; j < kPairs; ++j) bad += ((tile[c][j] & 0x7f80u) == 0x7f80u) + ((tile[c][j] >> 16 & 0x7f80u) == 0x7f80u);
    for (int j = 0; j < kPairs; ++j)
      for (int c = 0; c < kColumns; ++c) out[j * kColumns + c] = tile[c][j];
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
      copy<4 * kStep>(raw, row, n * 4);
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
