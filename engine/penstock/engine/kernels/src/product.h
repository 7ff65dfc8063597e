// Products of rows of units with lines of columns: what attention spends its time on.
#pragma once
#include <algorithm>

#include "tiles.h"
#include "vec.h"

namespace ISA {
namespace {

// kRows rows of kColumns vectors of sums fit into the registers.
#if defined(__AVX512F__)
constexpr int kRows = 6, kColumns = 4;
#else
constexpr int kRows = 4, kColumns = 2;
#endif

// out = out * factor + a b, or a b without a factor. `a` holds rows of units.
struct Product {
  const uint32_t* a;
  int64_t a_stride;
  int units;
  float* out;
  int64_t out_stride;
  const float* factor;  // of each row
};

// A line of columns for each unit: what `a` is multiplied by. Several vectors at once may be read of the `whole` columns.
struct Lines {
  const uint32_t* data;
  int64_t stride;
  template <int C> INLINE void load_line(int u, int column, u32xn* line) const {
    const uint32_t* from = data + u * stride + column;
    unroll<C>([&](int c) { line[c] = *(const u32xn_any*)(from + c * kLanes); });
  }
  static int whole(int columns) { return columns; }
};

// The same, made of the rows of V, whose elements are S: an element of each token of the unit.
template <class T, class S> struct ValueLines;
template <> struct ValueLines<float, float> {
  const float* const* rows;
  int size;
  template <int C> INLINE void load_line(int u, int column, u32x16* line) const {
    for (int c = 0; c < C; c++, column += 16)
      line[c] = (u32x16)load_first(rows[u] + column, C == 1 ? size - column : 16);
  }
  int whole(int) const { return size / 16 * 16; }
};
template <> struct ValueLines<bf16, bf16> {
  const bf16* const* rows;
  int size;
  template <int C> INLINE void load_line(int u, int column, u32x16* line) const {
    const bf16 *even = rows[2 * u] + column, *odd = rows[2 * u + 1] + column;
#if defined(__AVX512BW__)
    const u32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const u32x16 low = lanes | (lanes + 32) << 16, high = low + 0x00100010;
    for (int c = 0; c + 1 < C; c += 2) {
      const __m512i x = _mm512_loadu_si512(even + c * 16), y = _mm512_loadu_si512(odd + c * 16);
      line[c] = (u32x16)_mm512_permutex2var_epi16(x, (__m512i)low, y);
      line[c + 1] = (u32x16)_mm512_permutex2var_epi16(x, (__m512i)high, y);
    }
    if constexpr (C % 2 == 0) return;
#endif
    for (int c = 0; c < C; c++) {
      const int count = C == 1 ? size - column : 16;
      line[c] = (u32x16)load_first(even + c * 16, count) >> 16 | (u32x16)load_first(odd + c * 16, count);
    }
  }
  int whole(int) const { return size / 16 * 16; }
};

template <class T> struct ValueLines<T, int8_t> {
  const int8_t* const* rows;
  int size;
  template <int C> INLINE void load_line(int u, int column, u32x16* line) const {
    for (int c = 0; c < C; c++, column += 16) {
      const int count = C == 1 ? size - column : 16;
      if constexpr (Unit<T>::width == 1) {
        line[c] = (u32x16)load_first(rows[u] + column, count);
      } else {
        line[c] = (u32x16)load_first(rows[2 * u] + column, count) >> 16 |
                  (u32x16)load_first(rows[2 * u + 1] + column, count);
      }
    }
  }
  int whole(int) const { return size / 16 * 16; }
};

// Each sum is one chain over the units, in order, whatever R and C are.
template <class T, int R, int C, class L> void multiply(const Product& p, const L& lines, int column) {
  const uint32_t* a = p.a;
  float* out = p.out + column;
  f32xn sums[R * C];
  unroll<R * C>([&](int i) {
    const f32xn before = *(const f32xn_any*)(out + i / C * p.out_stride + i % C * kLanes);
    sums[i] = p.factor ? before * p.factor[i / C] : f32xn{};
  });
  for (int u = 0; u < p.units; u++, a++) {
    u32xn line[C];
    lines.template load_line<C>(u, column, line);
    unroll<R>([&](int r) {
      const u32xn x = u32xn{} + a[r * p.a_stride];
      unroll<C>([&](int c) { sums[r * C + c] = madd<T>(x, line[c], sums[r * C + c]); });
    });
  }
  unroll<R * C>([&](int i) { *(f32xn_any*)(out + i / C * p.out_stride + i % C * kLanes) = sums[i]; });
}

template <class T, int R, class L> void multiply_columns(const Product& p, const L& lines, int columns) {
  int c = 0;
  for (; c + kColumns * kLanes <= lines.whole(columns); c += kColumns * kLanes) multiply<T, R, kColumns>(p, lines, c);
  for (; c < columns; c += kLanes) multiply<T, R, 1>(p, lines, c);
}

// `rows` is 1 to kRows, `columns` a multiple of 16.
template <class T, int R = kRows, class L>
INLINE void multiply_rows(const Product& p, const L& lines, int rows, int columns) {
  if (rows == R) return multiply_columns<T, R>(p, lines, columns);
  if constexpr (R > 1) multiply_rows<T, R - 1>(p, lines, rows, columns);
}

#if defined(__AMX_BF16__)

// Tiles 0 to 3 are the sums of 64 columns, tile 4 is of `a`, tiles 5 and 6 of `lines`, by turns.
template <int C> void multiply_columns_in_tiles(const Product& p, const uint32_t* lines, int64_t line_stride) {
  const int64_t out_stride = p.out_stride * 4, stride = line_stride * 4;
  float* out = p.out;
  if (p.factor) {
    _tile_loadd(0, out, out_stride);
    if constexpr (C > 1) _tile_loadd(1, out + 16, out_stride);
    if constexpr (C > 2) _tile_loadd(2, out + 32, out_stride);
    if constexpr (C > 3) _tile_loadd(3, out + 48, out_stride);
  } else {
    _tile_zero(0);
    if constexpr (C > 1) _tile_zero(1);
    if constexpr (C > 2) _tile_zero(2);
    if constexpr (C > 3) _tile_zero(3);
  }
  for (int u = 0; u < p.units; u += 16, lines += 16 * line_stride) {
    _tile_loadd(4, p.a + u, p.a_stride * 4);
    _tile_loadd(5, lines, stride);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (C > 1) {
      _tile_loadd(6, lines + 16, stride);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (C > 2) {
      _tile_loadd(5, lines + 32, stride);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (C > 3) {
      _tile_loadd(6, lines + 48, stride);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  _tile_stored(0, out, out_stride);
  if constexpr (C > 1) _tile_stored(1, out + 16, out_stride);
  if constexpr (C > 2) _tile_stored(2, out + 32, out_stride);
  if constexpr (C > 3) _tile_stored(3, out + 48, out_stride);
}

// The same bits by vectors, for few rows: of each 16 units, the products of even and of odd elements have sums of their
// own, which are added first (Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS).
template <int R, int C, class L> void multiply_columns_as_tiles(const Product& p, const L& lines, int column) {
  float* out = p.out + column;
  auto place = [&](int i) INLINED { return (f32xn_any*)(out + i / C * p.out_stride + i % C * kLanes); };
  auto even_of = [](u32xn units) INLINED { return (f32xn)(units << 16); };
  auto odd_of = [](u32xn units) INLINED { return (f32xn)(units & 0xffff0000u); };
  f32xn sums[R * C];
  unroll<R * C>([&](int i) INLINED { sums[i] = p.factor ? *place(i) * p.factor[i / C] : f32xn{}; });
  for (int first = 0; first < p.units; first += 16) {
    f32xn even[R * C] = {}, odd[R * C] = {};
    for (int u = first; u < first + 16; u++) {
      u32xn line[C];
      lines.template load_line<C>(u, column, line);
      unroll<R>([&](int r) INLINED {
        const u32xn x = u32xn{} + p.a[r * p.a_stride + u];
        unroll<C>([&](int c) INLINED {
          even[r * C + c] = multiply_add(even_of(x), even_of(line[c]), even[r * C + c]);
          odd[r * C + c] = multiply_add(odd_of(x), odd_of(line[c]), odd[r * C + c]);
        });
      });
    }
    unroll<R * C>([&](int i) INLINED { sums[i] += even[i] + odd[i]; });
  }
  unroll<R * C>([&](int i) INLINED { *place(i) = sums[i]; });
}

// `rows` is 1 to kRows.
template <int R = kRows, class L> INLINE void multiply_as_tiles(const Product& p, const L& lines, int rows, int columns) {
  if (rows == R) {
    constexpr int C = R <= 2 ? 4 : 2;
    int c = 0;
    for (; c + C * kLanes <= lines.whole(columns); c += C * kLanes) multiply_columns_as_tiles<R, C>(p, lines, c);
    for (; c < columns; c += kLanes) multiply_columns_as_tiles<R, 1>(p, lines, c);
    return;
  }
  if constexpr (R > 1) multiply_as_tiles<R - 1>(p, lines, rows, columns);
}

// As `multiply_rows`, with 1 to 16 rows: `units` and `columns` are multiples of 16.
inline void multiply_in_tiles(Product p, const uint32_t* lines, int64_t line_stride, int rows, int64_t columns) {
  for (int r = 0; p.factor && r < rows; r++) {
    if (p.factor[r] == 1.0f) continue;
    for (float* at = p.out + r * p.out_stride; at < p.out + r * p.out_stride + columns; at += 16)
      store(at, load(at) * p.factor[r]);
  }
  for (; columns >= 64; columns -= 64, p.out += 64, lines += 64) multiply_columns_in_tiles<4>(p, lines, line_stride);
  for (; columns > 0; columns -= 16, p.out += 16, lines += 16) multiply_columns_in_tiles<1>(p, lines, line_stride);
}

#else

inline void multiply_in_tiles(const Product&, const uint32_t*, int64_t, int, int64_t) {}
template <class L> void multiply_as_tiles(const Product&, const L&, int, int) {}

#endif

}  // namespace
}  // namespace ISA
