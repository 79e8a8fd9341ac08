#include "pack.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

namespace lk {
namespace {

// Copies of a fixed size compile to a few moves, which is most of a packer's speed.
template <int kBytes> void copy(void* to, const void* from, int bytes) {
  if (bytes == kBytes) memcpy(to, from, kBytes);
  else memcpy(to, from, size_t(bytes));
}

// One panel: its columns, and where it begins in the checkpoint and in the store.
struct Panel {
  const uint8_t* from;
  int columns;
  uint8_t *codes, *scales, *zeros;

  Panel(const Matrix& m, int panel, const Rows& rows)
      : from(rows.data + ptrdiff_t(panel) * kColumns * rows.row_bytes), columns(std::min(kColumns, m.columns - panel * kColumns)) {
    const size_t at = size_t(m.first + panel * m.step);
    codes = m.panels.codes + at * m.layout.codes;
    scales = m.panels.scales + at * m.layout.scales;
    zeros = m.panels.zeros + at * m.layout.zeros;
  }
};

// Values of a 16-bit type in a 32-bit pair whose exponent is all ones.
int64_t not_finite(const uint32_t (&tile)[kColumns][16], uint32_t exponent, uint32_t lowest) {
  // Adding one to an exponent of all ones carries into the sign, which the mask leaves out.
  const uint32_t both = exponent | exponent << 16, one = lowest | lowest << 16;
  uint32_t carry = 0;
  for (const auto& row : tile)
    for (uint32_t pair : row) carry |= ((pair & both) + one) & 0x80008000u;
  if (!carry) return 0;
  int64_t bad = 0;
  for (const auto& row : tile)
    for (uint32_t pair : row) bad += ((pair & exponent) == exponent) + ((pair >> 16 & exponent) == exponent);
  return bad;
}

// 16-bit values: a pass is 16 pairs of k, transposed in L1.
int64_t pack_halves(Format format, const Matrix& m, int panel, const Rows& rows) {
  const Panel p(m, panel, rows);
  uint32_t* out = reinterpret_cast<uint32_t*>(p.codes);
  constexpr int kPairs = 16;
  int64_t bad = 0;
  for (int k = 0; k < m.layout.depth; k += 2 * kPairs, out += kPairs * kColumns) {
    uint32_t tile[kColumns][kPairs] = {};
    const int n = std::clamp(m.depth - k, 0, 2 * kPairs);
    for (int c = 0; c < p.columns; ++c) copy<4 * kPairs>(tile[c], p.from + c * rows.row_bytes + ptrdiff_t(k) * 2, n * 2);
    bad += format == Format::bf16 ? not_finite(tile, 0x7f80u, 0x0080u) : not_finite(tile, 0x7c00u, 0x0400u);
    for (int j = 0; j < kPairs; ++j)
      for (int c = 0; c < kColumns; ++c) out[j * kColumns + c] = tile[c][j];
  }
  return bad;
}

// E4M3: the four codes of a column lie in a 32-bit word, the middle two exchanged.
int64_t pack_bytes(const Matrix& m, int panel, const Rows& rows) {
  const Panel p(m, panel, rows);
  uint32_t* out = reinterpret_cast<uint32_t*>(p.codes);
  constexpr int kWords = kUnit / 4;
  int64_t bad = 0;
  for (int k = 0; k < m.layout.depth; k += kUnit, out += kWords * kColumns) {
    uint32_t tile[kColumns][kWords] = {};
    const int n = std::clamp(m.depth - k, 0, kUnit);
    for (int c = 0; c < p.columns; ++c) copy<kUnit>(tile[c], p.from + c * rows.row_bytes + k, n);
    uint32_t carry = 0;  // 0x7f + 1 reaches the sign bit
    for (const auto& row : tile)
      for (uint32_t word : row) carry |= ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    if (carry)
      for (const auto& row : tile)
        for (uint32_t word : row)
          for (int i = 0; i < 32; i += 8) bad += (word >> i & 0x7fu) == 0x7fu;
    for (int j = 0; j < kWords; ++j)
      for (int c = 0; c < kColumns; ++c) {
        const uint32_t v = tile[c][j];
        out[j * kColumns + c] = (v & 0xff0000ffu) | (v >> 8 & 0xff00u) | (v << 8 & 0xff0000u);
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

// The words of one column of a step of kWords x 8 k; as it was beyond the true depth.
template <int kWords> void load_words(uint32_t* words, const uint8_t* row, ptrdiff_t word_bytes, int k) {
  if (k <= 0) return;
  const int whole = std::min(k / 8, kWords), rest = whole < kWords ? k % 8 : 0;
  if (word_bytes == 4) copy<4 * kWords>(words, row, whole * 4);
  else for (int i = 0; i < whole; ++i) memcpy(&words[i], row + i * word_bytes, 4);
  if (rest == 0) return;
  uint32_t last = 0;
  memcpy(&last, row + whole * word_bytes, size_t(rest + 1) / 2);
  const uint32_t real = (1u << 4 * rest) - 1;
  words[whole] = (last & real) | (words[whole] & ~real);
}

void pack_nibbles(Format format, const Matrix& m, int panel, const Rows& rows) {
  const uint32_t zero = format == Format::int4 ? 0x88888888u : 0u;  // the codes of 0.0
  const Panel p(m, panel, rows);
  uint32_t* out = reinterpret_cast<uint32_t*>(p.codes);
  constexpr int kWords = 16;
  for (int k = 0; k < m.layout.depth; k += kWords * 8) {
    uint32_t tile[kWords][kColumns];
    for (int c = 0; c < kColumns; ++c) {
      uint32_t raw[kWords];
      std::fill(std::begin(raw), std::end(raw), zero);
      if (c < p.columns) load_words<kWords>(raw, p.from + c * rows.row_bytes + ptrdiff_t(k) / 8 * rows.word_bytes, rows.word_bytes, m.depth - k);
      for (int i = 0; i < kWords; ++i) tile[i][c] = split_nibbles(raw[i]);
    }
    const int words = std::min(kWords, (m.layout.depth - k) / 8);
    memcpy(out, tile, size_t(words) * kColumns * 4);
    out += words * kColumns;
  }
}

// Where the checkpoint has groups, body(column, group) for each; `groups` of them.
int groups_of(const Matrix& m) { return (m.layout.depth + m.layout.group - 1) / m.layout.group; }
int true_groups_of(const Matrix& m) { return (m.depth + m.layout.group - 1) / m.layout.group; }

// One element per column and group, some groups at a time, transposed in L1; returns how many are refused. Zero, the
// padding, never is.
template <class T, class Refused> int64_t pack_each(const Matrix& m, int panel, const Rows& rows, const Refused& refused) {
  const Panel p(m, panel, rows);
  constexpr int kStep = 16;
  const int groups = groups_of(m), real = true_groups_of(m);
  int64_t bad = 0;
  for (int g = 0; g < groups; g += kStep) {
    T tile[kColumns][kStep] = {};
    const int n = std::clamp(real - g, 0, kStep);
    for (int c = 0; c < p.columns; ++c)
      copy<kStep * int(sizeof(T))>(tile[c], p.from + c * rows.row_bytes + g * ptrdiff_t(sizeof(T)), n * int(sizeof(T)));
    for (const auto& column : tile)
      for (T value : column) bad += refused(value);
    for (int j = 0; j < std::min(kStep, groups - g); ++j) {
      T row[kColumns];
      for (int c = 0; c < kColumns; ++c) row[c] = tile[c][j];
      memcpy(p.scales + size_t(g + j) * sizeof row, row, sizeof row);
    }
  }
  return bad;
}

int64_t pack_shared(const Matrix& m, int panel, const Rows& rows) {
  const Panel p(m, panel, rows);
  int64_t bad = 0;
  for (int g = 0; g < groups_of(m); ++g) {
    float value = 0.0f;
    if (g < true_groups_of(m)) {
      memcpy(&value, p.from + g * ptrdiff_t(sizeof value), sizeof value);
      for (int c = 1; c < p.columns; ++c)
        if (memcmp(&value, p.from + c * rows.row_bytes + g * ptrdiff_t(sizeof value), sizeof value) != 0)
          throw std::invalid_argument("columns " + std::to_string(panel * kColumns) + " and " + std::to_string(panel * kColumns + c) +
                                      " of group " + std::to_string(g) + " have different scales; use scales f32 instead of f32_shared");
      uint32_t bits;
      memcpy(&bits, &value, sizeof bits);
      bad += (bits & 0x7f800000u) == 0x7f800000u;
    }
    memcpy(p.scales + size_t(g) * sizeof value, &value, sizeof value);
  }
  return bad;
}

}  // namespace

int64_t pack_codes(Format format, const Matrix& m, int panel, const Rows& rows) {
  switch (kCodeBits[int(format)]) {
    case 16: return pack_halves(format, m, panel, rows);
    case 8: return pack_bytes(m, panel, rows);
    default: pack_nibbles(format, m, panel, rows);
  }
  return 0;  // every 4-bit code is finite
}

int64_t pack_scales(const Matrix& m, int panel, const Rows& rows) {
  switch (m.layout.scale) {
    case Scale::e8m0: return pack_each<uint8_t>(m, panel, rows, [](uint8_t s) { return s == 0xff; });
    case Scale::e4m3: return pack_each<uint8_t>(m, panel, rows, [](uint8_t s) { return s >= 0x7f; });
    case Scale::bf16: return pack_each<uint16_t>(m, panel, rows, [](uint16_t s) { return (s & 0x7f80u) == 0x7f80u; });
    case Scale::f16: return pack_each<uint16_t>(m, panel, rows, [](uint16_t s) { return (s & 0x7c00u) == 0x7c00u; });
    case Scale::f32: return pack_each<uint32_t>(m, panel, rows, [](uint32_t s) { return (s & 0x7f800000u) == 0x7f800000u; });
    case Scale::f32_shared: return pack_shared(m, panel, rows);
    case Scale::none: break;
  }
  throw std::invalid_argument("this layer has no group scales");
}

int64_t pack_zeros(const Matrix& m, int panel, const Rows& rows) {
  const Panel p(m, panel, rows);
  uint8_t* to = p.zeros;
  int64_t bad = 0;
  for (int g = 0; g < groups_of(m); ++g, to += kColumns)
    for (int c = 0; c < kColumns; ++c) {
      const bool real = c < p.columns && g < true_groups_of(m);
      const uint8_t z = real ? p.from[c * rows.row_bytes + g] : 8;
      bad += z > 16;
      to[c] = uint8_t(8 - z);  // int8: what the zero point adds to q - 8
    }
  return bad;
}

}  // namespace lk
