// Attention of the step's new tokens over the paged KV pool: flash attention (Dao, 2022) with the online softmax of
// Milakov & Gimelshein (2018).
//
// A row is one new token in one query head. Its bits depend on its query, its position and its sequence's K and V
// alone. Tiles of 64 tokens lie at absolute positions, each row takes them in order, and each of its sums has one
// order. Which rows are computed together changes only what is skipped: tiles and tokens that a row does not see count
// exactly nothing in it (probability 0, factor 1), up to the sign of a zero, which the last addition of +0 removes.
// Rows of the pool outside the sequence are never read.
//
// K and V may be int8 with a scale for each token and head. Codes are exact in bf16 and float: a score is the product of
// the query and the codes, times K's scale, and V's scale is a factor of the probability.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "integers.h"
#include "kernels.h"
#include "pool.h"
#include "product.h"
#include "vec.h"

namespace ISA {
namespace {

constexpr int kTile = 64;            // tokens whose scores are taken together
constexpr int kGroups = kTile / 16;  // of 16 tokens, a lane each
constexpr int kMostRows = kHasTiles ? kRowsOfTile : kRows;  // whose scores are taken together
constexpr int kBlockRows = 96;       // rows of a task: they share the rearranged K and V
constexpr float kLog2e = 1.44269504f;

// Into L2: the first level has too few requests to spare.
INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

// 2^x for x <= 0, to about one unit in the last place; 0 below -126. The polynomial is the one of the Cephes library.
INLINE f32x16 exp2(f32x16 x) {
  return by_parts([](f32xn x) INLINED {
    auto all = [](float c) INLINED { return f32xn{} + c; };
    f32xn clamped = -126.0f > x ? all(-126.0f) : x;
    f32xn shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the integer
    f32xn r = clamped - (shifted - 12582912.0f);
    f32xn y = multiply_add(all(1.535336188e-4f), r, all(1.339887440e-3f));
    y = multiply_add(y, r, all(9.618437357e-3f));
    y = multiply_add(y, r, all(5.550332471e-2f));
    y = multiply_add(y, r, all(2.402264791e-1f));
    y = multiply_add(y, r, all(6.931472029e-1f));
    y = multiply_add(y, r, all(1.0f));
    f32xn scaled = (f32xn)((u32xn)y + ((u32xn)shifted << 23));
    return x < -126.0f ? all(0.0f) : scaled;
  }, x);
}

// Some rows of one segment that share a KV head: `first` to `first + count` of its (token, head of the group) pairs.
struct Task {
  int segment, kv_head, first, count;
};

// The positions `begin` to `end` of a sequence in one KV head.
struct Span {
  const int32_t* table;
  int kv_head, begin, end;
};

Span span_of(const AttentionArgs& args, const Task& task) {
  const Segment& segment = args.segments[task.segment];
  const int group = args.heads / args.kv_heads;
  const int first = task.first / group, last = (task.first + task.count - 1) / group;
  int begin = args.first_key ? INT32_MAX : 0;
  for (int i = first; args.first_key && i <= last; i++) begin = std::min(begin, args.first_key[segment.first_row + i]);
  return {args.tables + segment.table, task.kv_head, std::max(begin, 0), segment.start + last + 1};
}

// Where each token of a tile lies in the pool, whose elements are S; tokens outside the span are rows of zeros.
template <class S> struct Tile {
  const S* keys[kTile];
  const S* values[kTile];
  const float* key_scales[kTile];  // of int8
  const float* value_scales[kTile];

  void set_zeros(int i, const S* zeros) {
    keys[i] = values[i] = zeros;
    key_scales[i] = value_scales[i] = (const float*)zeros;
  }

  void find(const AttentionArgs& args, const Span& span, int at, const S* zeros) {
    const int from = std::clamp(span.begin - at, 0, kTile), to = std::clamp(span.end - at, 0, kTile);
    for (int i = 0; i < from; i++) set_zeros(i, zeros);
    for (int i = to; i < kTile; i++) set_zeros(i, zeros);
    int block = (at + from) / args.block_size, offset = (at + from) % args.block_size;
    for (int i = from; i < to; block++, offset = 0) {
      const int64_t base = span.table[block] * args.block_stride;
      const int64_t row = int64_t(span.kv_head) * args.block_size + offset;
      const S* key = (const S*)args.keys + base + row * args.k_size;
      const S* value = (const S*)args.values + base + row * args.v_size;
      const int end = std::min(to, i + args.block_size - offset);
      if constexpr (sizeof(S) == 1) {
        const float* key_scale = (const float*)((const char*)args.key_scales + base) + row;
        const float* value_scale = (const float*)((const char*)args.value_scales + base) + row;
        for (int j = i; j < end; j++) key_scales[j] = key_scale++, value_scales[j] = value_scale++;
      }
      for (; i < end; i++, key += args.k_size, value += args.v_size) keys[i] = key, values[i] = value;
    }
  }
};

// Sixteen scales.
INLINE f32x16 gather(const float* const* scales) {
  alignas(64) float found[16];
  for (int i = 0; i < 16; i++) found[i] = *scales[i];
  return load(found);
}

// Brings a tile's rows nearer, some at a time.
template <class S> struct Ahead {
  const Tile<S>& tile;
  int k_size, v_size;
  int next = 0;

  INLINE void fetch(int count) {
    constexpr int line = 64 / sizeof(S);
    for (const int end = std::min(next + count, kTile); next < end; next++) {
      if constexpr (sizeof(S) == 1) {
        prefetch_far(tile.key_scales[next]);
        prefetch_far(tile.value_scales[next]);
      }
      for (int k = 0; k < k_size; k += line) prefetch_far(tile.keys[next] + k);
      for (int v = 0; v < v_size; v += line) prefetch_far(tile.values[next] + v);
    }
  }
};

// Attention of a task in elements of T, over a pool of elements of S: T, or int8.
template <class T, class S> class RowBlock {
 public:
  // `next` is a task that this thread is likely to take after this one.
  RowBlock(const AttentionArgs& args, const Task& task, const Task& next)
      : args_(args), segment_(args.segments[task.segment]), task_(task), span_(span_of(args, task)),
        next_span_(span_of(args, next)), group_(args.heads / args.kv_heads),
        units_((args.k_size + width - 1) / width), columns_((args.v_size + 15) / 16),
        rounds_as_tiles_(kHasTiles && sizeof(T) == 2 && units_ % 16 == 0),
        tiles_(rounds_as_tiles_ && task.count > kRows), rows_at_once_(tiles_ ? kRowsOfTile : kRows),
        slope_((args.softcap != 0.0f ? args.softcap : args.scale) * kLog2e) {
    reserve();
    load_rows();
  }

  void run() {
    const FlushScope flush(rounds_as_tiles_);
    const TileScope scope(tiles_, std::min(task_.count, kRowsOfTile));
    Tile<S> tiles[2];
    int at = first_tile(span_);
    tiles[0].find(args_, span_, at, zeros_);
    for (int i = 0; at < span_.end; at += kTile, i ^= 1) {
      if (at + kTile < span_.end)
        tiles[i ^ 1].find(args_, span_, at + kTile, zeros_);
      else
        tiles[i ^ 1].find(args_, next_span_, first_tile(next_span_), zeros_);
      Ahead<S> ahead{tiles[i ^ 1], args_.k_size, args_.v_size};
      pack_keys(at, tiles[i], ahead);
      for (int r = 0; r < task_.count; r += rows_at_once_) score(at, r, tiles[i]);
      if constexpr (kLanes == 16) {
        if (task_.count <= kRows) {  // the values are used once: not worth a copy
          add_values(at, 0, ValueLines<T, S>{tiles[i].values, args_.v_size});
          continue;
        }
      }
      pack_values(at, tiles[i]);
      for (int r = 0; r < task_.count; r += rows_at_once_) add_values(at, r, Lines{values_, columns_ * 16});
    }
    for (int r = 0; r < task_.count; r++) finish(r);
  }

 private:
  static constexpr int width = Unit<T>::width;
  static constexpr bool kIsInt8 = sizeof(S) == 1;
  static constexpr int kTileUnits = kTile / width;

  const AttentionArgs& args_;
  const Segment& segment_;
  const Task& task_;
  const Span span_, next_span_;
  const int group_;    // query heads of a KV head
  const int units_;    // of a query or a key
  const int columns_;  // of 16 elements of a value
  // Whether products round as those of the processor's tiles, for each row alike, and whether it is the tiles that make
  // them: for few rows vectors are faster.
  const bool rounds_as_tiles_, tiles_;
  const int rows_at_once_;
  const float slope_;  // what a score is multiplied by to be a power of 2
  // Of each row: the positions it sees, its highest score so far (times log2 e), and what that rise scales sums by.
  int first_seen_[kBlockRows], seen_end_[kBlockRows];
  float high_[kBlockRows + 16], factor_[kBlockRows + 16];  // read and written 16 at a time
  uint32_t* queries_;  // [rows, units]
  uint32_t* keys_;     // [units, kTile]
  uint32_t* values_;   // [kTileUnits, columns, 16]
  uint32_t* probabilities_;  // [rows, kTileUnits]
  float* scores_;  // [kMostRows, kTile]
  float* totals_;  // [rows, 16] sums of the probabilities in each lane
  float* sums_;    // [rows, columns, 16]
  S* zeros_;       // a row of K or V, and a scale

  static int first_tile(const Span& span) { return span.begin / kTile * kTile; }
  int token(int r) const { return (task_.first + r) / group_; }
  int head(int r) const { return task_.kv_head * group_ + (task_.first + r) % group_; }
  int rows_from(int r) const { return std::min(rows_at_once_, task_.count - r); }
  // Groups of 16 tokens of the tile at `at`, up to the last one that rows before `r` see; in tiles of the processor,
  // which hold 32 tokens of V, two or four.
  int groups(int at, int r) const {
    const int count = std::clamp((seen_end_[r - 1] - at + 15) / 16, 0, kGroups);
    return rounds_as_tiles_ ? (count + 1) / 2 * 2 : count;
  }

  void reserve() {
    // Whole tiles are loaded and stored: rows behind the last one are memory that nobody reads.
    const size_t rows = tiles_ ? (task_.count + kRowsOfTile - 1) / kRowsOfTile * kRowsOfTile : task_.count;
    const size_t padded = (units_ + 15) / 16 * 16, row = std::max(padded, size_t(columns_) * 16);
    size_t sizes[] = {rows * padded, padded * kTile,         kTileUnits * columns_ * 16ul, rows * kTileUnits,
                      kMostRows * kTile, rows * 16, rows * columns_ * 16,    row};
    size_t total = 0;
    for (size_t& size : sizes) total += size = (size + 15) / 16 * 16;
    uint32_t* memory = (uint32_t*)pool::scratch(0, total * 4);
    auto take = [&, i = 0]() mutable {
      uint32_t* part = memory;
      memory += sizes[i++];
      return part;
    };
    queries_ = take();
    keys_ = take();
    values_ = take();
    probabilities_ = take();
    scores_ = (float*)take();
    totals_ = (float*)take();
    sums_ = (float*)take();
    zeros_ = (S*)memset(take(), 0, row * 4);
  }

  void load_rows() {
    for (int r = 0; r < task_.count; r++) {
      const int64_t row = segment_.first_row + token(r);
      const T* q = (const T*)args_.q + row * args_.q_row_stride + head(r) * args_.q_head_stride;
      queries_[r * units_ + units_ - 1] = 0;
      memcpy(queries_ + r * units_, q, args_.k_size * sizeof(T));
      first_seen_[r] = args_.first_key ? std::max(args_.first_key[row], 0) : 0;
      seen_end_[r] = segment_.start + token(r) + 1;
      high_[r] = args_.sinks ? args_.sinks[head(r)] * kLog2e : -FLT_MAX;
      store(totals_ + r * 16, all(0.0f));
      if (args_.sinks) totals_[r * 16] = 1.0f;
    }
    memset(sums_, 0, task_.count * columns_ * 16 * sizeof(float));
  }

  // Keys become lanes: a line of the tile's keys for each unit.
  void pack_keys(int at, const Tile<S>& tile, Ahead<S>& ahead) {
    const int num_groups = groups(at, task_.count), steps = num_groups * ((units_ + 15) / 16);
    for (int g = 0; g < num_groups; g++)
      for (int u = 0; u < units_; u += 16) {
        u32x16 rows[16];
        for (int i = 0; i < 16; i++)
          rows[i] = load_units_as<T>(tile.keys[g * 16 + i] + u * width, args_.k_size - u * width);
        ahead.fetch((kTile + steps - 1) / steps);
        transpose(rows);
        for (int i = 0; i < 16; i++) store(keys_ + (u + i) * kTile + g * 16, rows[i]);
      }
  }

  void pack_values(int at, const Tile<S>& tile) {
    const int num_units = groups(at, task_.count) * 16 / width;
    const ValueLines<T, S> lines{tile.values, args_.v_size};
    for (int u = 0; u < num_units; u++) {
      uint32_t* out = values_ + u * columns_ * 16;
      int c = 0;
      for (; (c + 2) * 16 <= args_.v_size; c += 2) {
        u32x16 line[2];
        lines.template load_line<2>(u, c * 16, line);
        store(out + c * 16, line[0]);
        store(out + c * 16 + 16, line[1]);
      }
      for (; c < columns_; c++) {
        u32x16 line;
        lines.template load_line<1>(u, c * 16, &line);
        store(out + c * 16, line);
      }
    }
  }

  // Scores of up to kRows rows, and what they change in the softmax.
  void score(int at, int r, const Tile<S>& tile) {
    const int rows = rows_from(r), num_groups = groups(at, r + rows);
    if (num_groups == 0) return;
    const Product product{queries_ + r * units_, units_, units_, scores_, kTile, nullptr};
    const Lines lines{keys_, kTile};
    if (tiles_) multiply_in_tiles(product, keys_, kTile, rows, num_groups * 16);
    else if (rounds_as_tiles_) multiply_as_tiles(product, lines, rows, num_groups * 16);
    else multiply_rows<T>(product, lines, rows, num_groups * 16);
    float raised[16] = {};
    for (int i = 0; i < rows; i++) {
      float* scores = scores_ + i * kTile;
      if constexpr (kIsInt8) {
        for (int g = 0; g < num_groups; g++)
          store(scores + g * 16, load(scores + g * 16) * gather(tile.key_scales + g * 16));
      }
      if (args_.softcap != 0.0f) cap(scores, num_groups);
      if (first_seen_[r + i] > at || seen_end_[r + i] < at + num_groups * 16) mask(at, r + i, scores, num_groups);
      f32x16 top = load(scores);
      for (int g = 1; g < num_groups; g++) top = max(top, load(scores + g * 16));
      raised[i] = std::max(high_[r + i], max(top) * slope_);
    }
    store(factor_ + r, exp2(load(high_ + r) - load(raised)));
    for (int i = 0; i < rows; i++) {
      high_[r + i] = raised[i];
      weigh(r + i, scores_ + i * kTile, num_groups, tile);
    }
  }

  void cap(float* scores, int num_groups) const {
    for (int g = 0; g < num_groups; g++)
      store(scores + g * 16, tanh(load(scores + g * 16) * (args_.scale / args_.softcap)));
  }

  void mask(int at, int r, float* scores, int num_groups) const {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int g = 0; g < num_groups; g++) {
      const int first = first_seen_[r], end = seen_end_[r];
      store(scores + g * 16, by_parts([&](i32xn position, f32xn score) INLINED {
        return position >= first && position < end ? score : f32xn{} - INFINITY;
      }, lanes + (at + g * 16), load(scores + g * 16)));
    }
  }

  // Scores become probabilities, relative to the highest score.
  void weigh(int r, const float* scores, int num_groups, const Tile<S>& tile) {
    f32x16 total = load(totals_ + r * 16) * factor_[r];
    T* out = (T*)(probabilities_ + r * kTileUnits);
    for (int g = 0; g < num_groups; g++) {
      const f32x16 p = exp2(fma(load(scores + g * 16), all(slope_), all(-high_[r])));
      total += p;
      if constexpr (kIsInt8) store(out + g * 16, p * gather(tile.value_scales + g * 16));
      else store(out + g * 16, p);
    }
    store(totals_ + r * 16, total);
  }

  template <class L> void add_values(int at, int r, const L& lines) {
    const int rows = rows_from(r), num_groups = groups(at, r + rows), stride = columns_ * 16;
    if (num_groups == 0) return;
    const Product product{probabilities_ + r * kTileUnits, kTileUnits, num_groups * 16 / width, sums_ + r * stride,
                          stride, factor_ + r};
    if (tiles_) multiply_in_tiles(product, values_, stride, rows, stride);
    else if (rounds_as_tiles_) multiply_as_tiles(product, lines, rows, columns_ * 16);
    else multiply_rows<T>(product, lines, rows, columns_ * 16);
  }

  void finish(int r) {
    const float inverse = 1.0f / sum(load(totals_ + r * 16));
    const int64_t row = int64_t(segment_.first_row + token(r)) * args_.heads + head(r);
    T* out = (T*)args_.out + row * args_.v_size;
    for (int c = 0; c < args_.v_size; c += 16)
      store_first(out + c, load(sums_ + r * columns_ * 16 + c) * inverse + 0.0f, std::min(16, args_.v_size - c));
  }
};

// The costly tasks come first, so that small ones are left to even out the threads.
std::vector<Task> make_tasks(const AttentionArgs& args, int block_rows) {
  std::vector<int> order(args.num_segments);
  for (int i = 0; i < args.num_segments; i++) order[i] = i;
  auto cost = [&](int i) {
    const Segment& segment = args.segments[i];
    return int64_t(segment.num_rows) * (segment.start + segment.num_rows);
  };
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return cost(i) > cost(j); });
  std::vector<Task> tasks;
  for (int segment : order) {
    const int rows = args.segments[segment].num_rows * (args.heads / args.kv_heads);
    const int blocks = (rows + block_rows - 1) / block_rows;
    for (int kv_head = 0; kv_head < args.kv_heads; kv_head++)
      for (int b = blocks - 1; b >= 0; b--)
        tasks.push_back({segment, kv_head, b * block_rows, std::min(block_rows, rows - b * block_rows)});
  }
  return tasks;
}

template <class T, class S> void attend(const AttentionArgs& args) {
  std::vector<Task> tasks;
  for (int rows = kBlockRows;; rows /= 2) {
    tasks = make_tasks(args, rows);
    if (int(tasks.size()) >= 2 * pool::threads() || rows <= kRows) break;
  }
  const int last = int(tasks.size()) - 1;
  pool::run(last + 1, [&](int i) { RowBlock<T, S>(args, tasks[i], tasks[std::min(i + 1, last)]).run(); });
}

}  // namespace

void attention(const AttentionArgs* args) {
  if (args->key_scales) args->element_bytes == 2 ? attend<bf16, int8_t>(*args) : attend<float, int8_t>(*args);
  else args->element_bytes == 2 ? attend<bf16, bf16>(*args) : attend<float, float>(*args);
}

template <class T> void write_int8(const WriteArgs& args, int64_t row) {
  const int64_t base = args.blocks[row] * args.block_stride;
  for (int h = 0; h < args.heads; h++) {
    const int64_t at = int64_t(h) * args.block_size + args.offsets[row];
    int32_t sum;
    quantize_group((const T*)args.x + row * args.row_stride + h * args.head_stride, args.size, args.size,
                   (int8_t*)args.pool + base + at * args.size, (float*)((char*)args.scales + base) + at, &sum);
  }
}

void write(const WriteArgs* args) {
  constexpr int64_t kRowsOfTask = 32;
  const int64_t bytes = args->element_bytes;
  auto copy = [&](int64_t row) {
    const char* from = (const char*)args->x + row * args->row_stride * bytes;
    char* to = (char*)args->pool + (args->blocks[row] * args->block_stride + args->offsets[row] * args->size) * bytes;
    for (int h = 0; h < args->heads; h++)
      memcpy(to + int64_t(h) * args->block_size * args->size * bytes, from + h * args->head_stride * bytes,
             args->size * bytes);
  };
  pool::run(int((args->rows + kRowsOfTask - 1) / kRowsOfTask), [&](int task) {
    const int64_t end = std::min(args->rows, (task + 1) * kRowsOfTask);
    for (int64_t row = task * kRowsOfTask; row < end; row++) {
      if (!args->scales) copy(row);
      else bytes == 2 ? write_int8<bf16>(*args, row) : write_int8<float>(*args, row);
    }
  });
}

}  // namespace ISA
