// y = act(x Wᵀ + b) for packed groups of linear layers.
//
// Every output element is one chain of `madd`s along the input, in order, whatever the number of rows: a row's bits do
// not depend on the rows beside it. A panel of weights is read once from memory for all rows; the rows are blocked so
// that the accumulators of a block fill the registers.
#include <algorithm>
#include <utility>
#include <vector>

#include "functions.h"
#include "integers.h"
#include "pool.h"
#include "tiles.h"
#include "vec.h"

namespace ISA {
namespace {

constexpr int kColumns = 32;
// A block of rows is packed in lines. A slice has so many units of the input at a time: 64 KB of weights stay in the
// second-level cache, or 32 KB nearer. A chunk is what is packed at a time: half a megabyte a slice, or a fifth of that.
#if defined(__AVX512F__)
constexpr int kMaxBlockRows = 14;  // 28 accumulators, two weights, one input: 31 of 32 registers
constexpr int kLineRows = 16, kSliceUnits = 512;
#else
constexpr int kMaxBlockRows = 6;  // of half a line: 12 accumulators, two weights, one input: 15 of 16 registers
constexpr int kLineRows = 8, kSliceUnits = 256;
#endif
// Tiles multiply so fast that the weights and inputs of a slice have to stay in the first-level cache, where weights are
// used by several blocks of rows; and 224 rows would leave 32 of a step's 256 alone with all weights.
constexpr int kTileSliceUnits = 128;
constexpr int kChunkRows = kHasTiles ? 256 : kLanes == 16 ? 224 : 96;
constexpr int kVectors = kColumns / kLanes;  // of a line
// The vectors of a line that are taken at once for so many rows.
constexpr int vectors_at_once(int rows) {
  int vectors = kVectors;
  while (vectors > 2 && rows * vectors > 2 * kMaxBlockRows) vectors /= 2;
  return vectors;
}
constexpr int kAheadBytes = 8192;  // how far ahead weights are fetched when they are used once

// Tiles take 16 lines of weights at a time and up to 32 rows; what they cannot is left to the vectors.
constexpr int kTileRows = 32;
template <class T> bool fits_tiles(int units) { return kHasTiles && sizeof(T) == 2 && units % 16 == 0; }

struct Blocks {
  int count;
  int rows;  // of a chunk
  bool tiles;
  int width;  // of a unit of a packed block
  int first(int block) const { return tiles ? block * kTileRows : int(int64_t(rows) * block / count); }
  int size(int block) const { return (block + 1 < count ? first(block + 1) : rows) - first(block); }
};

Blocks blocks_of(int rows, bool tiles, int width) {
  int most = tiles ? kTileRows : kMaxBlockRows;
  return {(rows + most - 1) / most, rows, tiles, tiles ? kTileRows : width};
}

// ---- the input: [slice][block][units of the slice][lines of a unit][kLineRows], so that a block's rows lie side by
// side; for tiles [slice][block][units of the slice / 16][32 rows][16 units]

// The lines that a unit of the input becomes: itself, or what spares the products work in each panel.
struct OneLine {
  static constexpr int count = 1;
  static INLINE void put(uint32_t unit, uint32_t* lines) { *lines = unit; }
};
template <class T> struct LinesOf : OneLine {};
#if !defined(__AVX512F__)
template <> struct LinesOf<bf16> {  // both as floats, in the order in which they are added
  static constexpr int count = 2;
  static INLINE void put(uint32_t unit, uint32_t* lines) {
    lines[0] = unit & 0xffff0000u;
    lines[kLineRows] = unit << 16;
  }
};
#endif

template <class T>
void pack_for_tiles(const T* x, int64_t stride, int rows, int64_t inputs, int first_unit, int units, uint32_t* out) {
  for (int u = 0; u < units; u += 16) {
    int64_t element = int64_t(first_unit + u) * Unit<T>::width;
    for (int r = 0; r < kTileRows; r++, out += 16) {
      store(out, r < rows ? load_units(x + r * stride + element, inputs - element) : u32x16{});
    }
  }
}

template <class T, class Lines>
void pack_block(const T* x, int64_t stride, int rows, int64_t inputs, int first_unit, int units, uint32_t* out) {
#if defined(__AVX512F__)
  for (int u = 0; u < units; u += 16) {
    u32x16 square[16];
    int64_t element = int64_t(first_unit + u) * Unit<T>::width;
    for (int r = 0; r < 16; r++) {
      square[r] = r < rows ? load_units(x + r * stride + element, inputs - element) : u32x16{};
    }
    transpose(square);
    int count = units - u < 16 ? units - u : 16;
    for (int i = 0; i < count; i++) store(out + (u + i) * 16, square[i]);
  }
#else
  for (int r = 0; r < rows; r++, x += stride) {
    const T* from = x + int64_t(first_unit) * Unit<T>::width;
    const int whole = int(std::min<int64_t>(units, inputs / Unit<T>::width - first_unit));
    auto put = [&](int u, uint32_t unit) INLINED { Lines::put(unit, out + u * Lines::count * kLineRows + r); };
    for (int u = 0; u < whole; u++) {
      uint32_t unit;
      memcpy(&unit, from + u * Unit<T>::width, 4);
      put(u, unit);
    }
    if (whole < units) {
      uint32_t unit = 0;
      memcpy(&unit, from + whole * Unit<T>::width, sizeof(T));
      put(whole, unit);
    }
  }
#endif
}

struct Input {
  uint32_t* data;
  int units;       // in all
  Blocks blocks;
  int most_slice_units() const { return blocks.tiles && blocks.count > 1 ? kTileSliceUnits : kSliceUnits; }
  int num_slices() const { return (units + most_slice_units() - 1) / most_slice_units(); }
  int slice_units(int slice) const { return std::min(units - slice * most_slice_units(), most_slice_units()); }
  size_t size() const { return size_t(units) * blocks.count * blocks.width; }
  uint32_t* at(int slice, int block) const {
    return data + (int64_t(slice) * most_slice_units() * blocks.count + int64_t(block) * slice_units(slice)) * blocks.width;
  }
};

// The inputs of a row as int8: see quantized.h.
struct QuantizedRows {
  int8_t* codes;   // [rows, units * 4]; zeros behind the inputs
  float* scales;   // [rows, groups]
  int32_t* sums;   // [rows, groups * 128 / summed], of `summed` codes each
  int units, groups;
};

// Rows of one linear layer that are computed at once.
struct Chunk {
  const LinearArgs* a;
  int64_t first_row;
  int rows;
  Input input;
  QuantizedRows quantized;
};

// Call task(chunk, i) for every i below count(chunk), of every chunk; on the pool's threads if that is worth it.
template <class Count, class F> void run_tasks(std::vector<Chunk>& chunks, const Count& count, const F& task) {
  int most = 0, all_tasks = 0;
  for (Chunk& chunk : chunks) {
    most = std::max(most, count(chunk));
    all_tasks += count(chunk);
  }
  auto run = [&](int i) {
    Chunk& chunk = chunks[i / most];
    if (i % most < count(chunk)) task(chunk, i % most);
  };
  const int num_tasks = most * int(chunks.size());
  if (all_tasks >= 8) pool::run(num_tasks, run);
  else for (int i = 0; i < num_tasks; i++) run(i);
}

// Pack the input of each chunk: `row(chunk, r)` is where row r of it begins, of `inputs` elements.
template <class T, class Lines = LinesOf<T>, class Row> void pack_inputs(std::vector<Chunk>& chunks, int64_t inputs, const Row& row) {
  size_t total = 0;
  const int units = int((inputs + Unit<T>::width - 1) / Unit<T>::width);
  for (Chunk& chunk : chunks) {
    chunk.input = {nullptr, units, blocks_of(chunk.rows, fits_tiles<T>(units), Lines::count * kLineRows)};
    total += chunk.input.size();
  }
  uint32_t* data = (uint32_t*)pool::scratch(0, total * 4);
  for (Chunk& chunk : chunks) {
    chunk.input.data = data;
    data += chunk.input.size();
  }
  auto count = [](const Chunk& chunk) { return chunk.input.blocks.count * chunk.input.num_slices(); };
  run_tasks(chunks, count, [&](const Chunk& chunk, int i) {
    const Input& input = chunk.input;
    const int block = i / input.num_slices(), slice = i % input.num_slices(), first = input.blocks.first(block);
    const T* x = row(chunk, first);
    const int64_t stride = row(chunk, first + 1) - x;
    auto pack = input.blocks.tiles ? pack_for_tiles<T> : pack_block<T, Lines>;
    pack(x, stride, input.blocks.size(block), inputs, slice * input.most_slice_units(), input.slice_units(slice),
         input.at(slice, block));
  });
}

template <class T> const T* row_of(const Chunk& chunk, int64_t row) {
  return (const T*)chunk.a->x + (chunk.first_row + row) * chunk.a->x_stride;
}

// ---- one block of rows times one panel

// How weights that come later are fetched meanwhile: `step` bytes from `address` on with each unit. Weights used ONCE
// stream through the second cache, others stay in the first for the next block of rows.
struct Ahead {
  const char* address;
  int step;
};

// Add the products of a unit of ROWS rows and VECTORS vectors of columns to their sums: `weights(line, v)` for each line of
// the unit. What there is less of, vectors of weights or rows of inputs, is held in registers beside the sums.
template <int LINES, int ROWS, int VECTORS, class S, class Weights, class Add>
INLINE void add_unit(S* sums, const uint32_t* x, const Weights& weights, const Add& add) {
  auto input = [&](int line, int r) INLINED { return u32xn{} + x[line * kLineRows + r]; };
  unroll<LINES>([&](int line) INLINED {
    if constexpr (VECTORS == 2) {
      const u32xn a = weights(line, 0), b = weights(line, 1);
      unroll<ROWS>([&](int r) INLINED {
        const u32xn both = input(line, r);
        sums[2 * r] = add(a, both, sums[2 * r]);
        sums[2 * r + 1] = add(b, both, sums[2 * r + 1]);
      });
    } else {
      u32xn all_rows[ROWS];
      unroll<ROWS>([&](int r) INLINED { all_rows[r] = input(line, r); });
      unroll<VECTORS>([&](int v) INLINED {
        const u32xn a = weights(line, v);
        unroll<ROWS>([&](int r) INLINED { sums[r * VECTORS + v] = add(a, all_rows[r], sums[r * VECTORS + v]); });
      });
    }
  });
}

template <class T, int ROWS, bool ONCE>
void multiply(const uint32_t* line, const uint32_t* x, int units, bool begins, float* c, Ahead ahead) {
  constexpr int kTaken = vectors_at_once(ROWS), kPasses = kVectors / kTaken, kLines = LinesOf<T>::count;
  for (int pass = 0; pass < kPasses; pass++, line += kTaken * kLanes, c += kTaken * kLanes) {
    f32xn sums[ROWS * kTaken];
    auto place = [&](int i) INLINED { return (f32xn_any*)(c + i / kTaken * kColumns + i % kTaken * kLanes); };
    unroll<ROWS * kTaken>([&](int i) INLINED { sums[i] = begins ? f32xn{} : *place(i); });
    const uint32_t *w = line, *input = x;
    const char* fetched = ahead.address + (ONCE ? pass * kTaken * kLanes * 4 : int64_t(units) * ahead.step * pass / kPasses);
    const int step = ONCE ? ahead.step : ahead.step / kPasses;
    for (int u = 0; u < units; u++, w += kColumns, input += kLines * kLineRows, fetched += step) {
      if (ONCE) {
        for (int i = 0; i < kTaken * kLanes * 4; i += 64) prefetch_far(fetched + i);
      } else {
        prefetch(fetched);
      }
      auto weights = [&](int half, int v) INLINED -> u32xn {
        const u32xn both = *(const u32xn_any*)(w + v * kLanes);
        return kLines == 1 ? both : half == 0 ? both & 0xffff0000u : both << 16;
      };
      add_unit<kLines, ROWS, kTaken>(sums, input, weights, [](u32xn a, u32xn b, f32xn sum) INLINED {
        return madd<std::conditional_t<kLines == 1, T, float>>(a, b, sum);
      });
    }
    unroll<ROWS * kTaken>([&](int i) INLINED { *place(i) = sums[i]; });
  }
}

#if defined(__AMX_BF16__)

// Tiles 0 to 3 are the sums: rows 0-15 and 16-31 by columns 0-15 and 16-31. `c` has room for all 32 rows.
void multiply_tiles(const uint32_t* w, const uint32_t* x, int units, int rows, bool begins, float* c, Ahead ahead) {
  constexpr int kLine = kColumns * 4;
  bool two = rows > 16;
  if (begins) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, kLine);
    _tile_loadd(1, c + 16, kLine);
    _tile_loadd(2, c + 16 * kColumns, kLine);
    _tile_loadd(3, c + 16 * kColumns + 16, kLine);
  }
  for (int u = 0; u < units; u += 16, w += 16 * kColumns, x += 16 * kTileRows) {
    for (int i = 0; i < 16 * ahead.step; i += 64) prefetch(ahead.address + i);
    ahead.address += 16 * ahead.step;
    _tile_loadd(4, x, 64);
    _tile_loadd(6, w, kLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 16, kLine);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_loadd(5, x + 16 * 16, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, kLine);
  _tile_stored(1, c + 16, kLine);
  _tile_stored(2, c + 16 * kColumns, kLine);
  _tile_stored(3, c + 16 * kColumns + 16, kLine);
}

#endif

template <class T> using Multiply = void (*)(const uint32_t*, const uint32_t*, int, bool, float*, Ahead);

template <class T, bool ONCE, int... ROWS>
Multiply<T> choose(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr Multiply<T> table[] = {multiply<T, ROWS + 1, ONCE>...};
  return table[rows - 1];
}

template <class T> Multiply<T> choose(int rows, bool once) {
  std::make_integer_sequence<int, kMaxBlockRows> all_rows;
  return once ? choose<T, true>(rows, all_rows) : choose<T, false>(rows, all_rows);
}

// ---- what is done with the sums

f32x16 silu(f32x16 x) {
  return by_parts([](f32xn x) INLINED { return x / (1.0f + exp_part(-x)); }, x);
}

// A swish whose slope is given, of a bounded gate.
f32x16 bounded_swish(const LinearArgs& a, f32x16 x) {
  f32x16 bounded = select(is_greater(x, all(a.limit)), all(a.limit), x);
  return bounded / (1.0f + exp(bounded * -a.slope));
}

f32x16 gelu_tanh(f32x16 x) {
  f32x16 cube = x * x * x;
  f32x16 inner = (x + cube * 0.044715f) * 0.7978845608028654f;
  return x * 0.5f * (1.0f + tanh(inner));
}

template <class T> void finish(const Chunk& chunk, int64_t panel, const float* c) {
  const LinearArgs& a = *chunk.a;
  int p = a.num_parts - 1;
  while (panel < a.parts[p].first_panel) p--;
  const Part& part = a.parts[p];
  int64_t local = panel - part.first_panel;
  f32x16 bias[2] = {};
  if (a.weight->bias) {
    for (int h = 0; h < 2; h++) bias[h] = load(a.weight->bias + panel * kColumns + h * 16);
  }
  for (int64_t row = chunk.first_row; row < chunk.first_row + chunk.rows; row++, c += kColumns) {
    f32x16 v[2] = {load(c) + bias[0], load(c + 16) + bias[1]};
    T* out = (T*)part.out + row * part.stride;
    if (a.activation != kNone) {
      f32x16 gate = rounded<T>(v[0]), up = rounded<T>(v[1]);
      if (a.activation == kBoundedSwish) {
        up = select(is_greater(all(-a.limit), up), all(-a.limit), up);
        up = select(is_greater(up, all(a.limit)), all(a.limit), up);
        up = rounded<T>(up + 1.0f);
        gate = bounded_swish(a, gate);
      } else {
        gate = a.activation == kSilu ? silu(gate) : gelu_tanh(gate);
      }
      int64_t column = local * 16;
      if (column < part.columns) store_first(out + column, rounded<T>(gate) * up, int(part.columns - column));
      continue;
    }
    for (int h = 0; h < 2; h++) {
      int64_t column = local * kColumns + h * 16;
      if (column >= part.columns) break;
      int count = int(part.columns - column);
      if (a.residual) {
        const T* residual = (const T*)a.residual + row * a.residual_stride + column;
        v[h] = load_first(residual, count) + rounded<T>(v[h]);
      }
      store_first(out + column, v[h], count);
    }
  }
}

template <class T>
void multiply_block(const uint32_t* w, const Input& input, int slice, int block, float* sums, Ahead ahead) {
  float* c = sums + input.blocks.first(block) * kColumns;
  int units = input.slice_units(slice), rows = input.blocks.size(block);
#if defined(__AMX_BF16__)
  if (input.blocks.tiles) return multiply_tiles(w, input.at(slice, block), units, rows, slice == 0, c, ahead);
#endif
  choose<T>(rows, input.blocks.count == 1)(w, input.at(slice, block), units, slice == 0, c, ahead);
}

template <class T> void panel_times_rows(const Chunk& chunk, int64_t panel) {
  alignas(64) float sums[kChunkRows * kColumns];
  const Input& input = chunk.input;
  const uint32_t* w = chunk.a->weight->data + panel * input.units * kColumns;
  int count = input.blocks.count;
  const TileScope scope(input.blocks.tiles);
  for (int slice = 0; slice < input.num_slices(); slice++) {
    int64_t units = input.slice_units(slice);
    const char* next = (const char*)(w + units * kColumns);
    for (int block = 0; block < count; block++) {
      // Used once, weights are fetched a little ahead; used by several blocks, each fetches its share of what follows.
      Ahead ahead = count == 1 ? Ahead{(const char*)w + kAheadBytes, 128}
                               : Ahead{next + units * 128 * block / count, 128 / count};
      multiply_block<T>(w, input, slice, block, sums, ahead);
    }
    w += units * kColumns;
  }
  finish<T>(chunk, panel, sums);
}

// How chunks are computed whose weights are as they are stored.
template <class T> struct Stored {
  static void pack(std::vector<Chunk>& chunks) { pack_inputs<T>(chunks, chunks[0].a->weight->inputs, row_of<T>); }
  static void multiply(const Chunk& chunk, int64_t panel) { panel_times_rows<T>(chunk, panel); }
};

// Layers of one shape and form, in one run: a task for each panel of each.
template <class F> void linears_of(const LinearArgs* each, int count) {
  int64_t most = 0;
  for (int i = 0; i < count; i++) most = std::max(most, each[i].rows);
  const int64_t num_panels = each->weight->num_panels;
  std::vector<Chunk> chunks;
  for (int64_t row = 0; row < most; row += kChunkRows) {
    chunks.clear();
    for (const LinearArgs* a = each; a < each + count; a++) {
      if (a->rows > row) chunks.push_back({a, row, int(std::min<int64_t>(a->rows - row, kChunkRows)), {}, {}});
    }
    F::pack(chunks);
    pool::run(int(num_panels * chunks.size()), [&](int i) { F::multiply(chunks[i / num_panels], i % num_panels); });
  }
}

// ---- the weights

template <class T> void pack_of(const PackArgs& a) {
  int units = int((a.inputs + Unit<T>::width - 1) / Unit<T>::width);
  int64_t num_panels = (a.outputs + a.columns - 1) / a.columns;
  pool::run(int(num_panels), [&](int panel) {
    uint32_t* out = a.data + (a.first_panel + panel) * units * kColumns + a.first_column;
    for (int64_t half = 0; half < a.columns; half += 16, out += 16) {
      for (int u = 0; u < units; u += 16) {
        u32x16 square[16];
        for (int c = 0; c < 16; c++) {
          int64_t output = int64_t(panel) * a.columns + half + c, element = int64_t(u) * Unit<T>::width;
          const T* row = (const T*)a.weight + output * a.row_stride + element;
          square[c] = output < a.outputs ? load_units(row, a.inputs - element) : u32x16{};
        }
        transpose(square);
        for (int i = 0; i < 16 && u + i < units; i++) store(out + int64_t(u + i) * kColumns, square[i]);
      }
    }
  });
}

template <class T> void lookup_of(const LookupArgs& a) {
  int units = int((a.weight->inputs + Unit<T>::width - 1) / Unit<T>::width);
  pool::run(int(a.rows), [&](int row) {
    const uint32_t* in = a.weight->data + (a.ids[row] / kColumns * units * kColumns + a.ids[row] % kColumns);
    T* out = (T*)a.out + row * a.weight->inputs;
    for (int u = 0; u < units; u++) {
      int64_t left = a.weight->inputs - int64_t(u) * Unit<T>::width;
      memcpy(out + u * Unit<T>::width, in + int64_t(u) * kColumns, left > 1 ? 4 : sizeof(T));
    }
  });
}

#include "quantized.h"
#include "gguf.h"
#include "compressed.h"

template <class T> void linears_in_form(const LinearArgs* each, int count) {
  switch (each->weight->form) {
    case kInt8: return linears_of<Quantized<T, 8>>(each, count);
    case kInt4: return linears_of<Quantized<T, 4>>(each, count);
    case kCompressed: return linears_of<Compressed>(each, count);
    case kGguf: return linears_of<FromGguf<T>>(each, count);
    default: return linears_of<Stored<T>>(each, count);
  }
}

// The bytes of a panel.
int64_t panel_bytes(const Packed& p) {
  switch (p.form) {
    case kInt8: return (p.inputs + 3) / 4 * Codes<8>::kLineBytes;
    case kInt4: return (p.inputs + 3) / 4 * Codes<4>::kLineBytes;
    case kCompressed: return p.inputs / 4 * kPairBytes;
    case kGguf: return 0;  // `places` says where each is
    default: return (p.inputs * p.element_bytes + 3) / 4 * kColumns * 4;
  }
}

template <class T> void pack_in_form(const PackArgs& a) {
  switch (a.form) {
    case kInt8: return quantize_of<T, 8>(a);
    case kInt4: return quantize_of<T, 4>(a);
    default: return pack_of<T>(a);
  }
}
template <class T> void lookup_in_form(const LookupArgs& a) {
  switch (a.weight->form) {
    case kInt8: return quantized_lookup_of<T, 8>(a);
    case kInt4: return quantized_lookup_of<T, 4>(a);
    case kCompressed: return compressed_lookup(a);
    case kGguf: return gguf_lookup_of<T>(a);
    default: return lookup_of<T>(a);
  }
}

}  // namespace

void linears(const LinearArgs* each, int count) {
  each->weight->element_bytes == 4 ? linears_in_form<float>(each, count) : linears_in_form<bf16>(each, count);
}
void linear(const LinearArgs* a) { linears(a, 1); }
Packed panels_of(const Packed& all, int64_t first, int64_t count) {
  Packed p = all;
  p.data = (const uint32_t*)((const char*)all.data + first * panel_bytes(all));
  p.num_panels = count;
  if (all.bias) p.bias += first * kColumns;
  if (all.scales) p.scales += first * kColumns * (all.form == kInt4 ? (all.inputs + all.group - 1) / all.group : 1);
  if (all.palettes) p.palettes += first * 16;
  if (all.first_exception) p.first_exception += first;
  if (all.kinds) p.kinds += first, p.places += first;
  return p;
}
void pack(const PackArgs* a) { a->element_bytes == 4 ? pack_in_form<float>(*a) : pack_in_form<bf16>(*a); }
void lookup(const LookupArgs* a) { a->weight->element_bytes == 4 ? lookup_in_form<float>(*a) : lookup_in_form<bf16>(*a); }
void pack_gguf(const PackGgufArgs* a) {
  with_gguf_form(a->kind, [&](auto form) { pack_gguf_of<decltype(form)>(*a); });
}
void compress(const CompressArgs* a) { compress_panels(*a); }

}  // namespace ISA
