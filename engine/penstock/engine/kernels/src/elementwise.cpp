// RMSNorm and rotary embeddings, rounded where the transformers modules round; logits as masked scores, and the best of
// a row of them; and a plain reading of memory, the limit that everything else is compared with.
#include <atomic>
#include <cmath>

#include "kernels.h"
#include "pool.h"
#include "vec.h"

namespace ISA {
namespace {

constexpr int64_t kTaskElements = 32768;  // less than this is not worth a second thread

template <class F> void in_tasks(int64_t rows, int64_t row_elements, const F& each) {
  int64_t per_task = kTaskElements / row_elements + 1;
  pool::run(int((rows + per_task - 1) / per_task), [&](int task) {
    for (int64_t row = task * per_task; row < rows && row < (task + 1) * per_task; row++) each(row);
  });
}

template <class T> void norm_row(const NormArgs& a, const T* x, T* out) {
  const T* weight = (const T*)a.weight;
  f32xn squares[kParts] = {};
  for (int64_t i = 0; i < a.size; i += 16) {
    const Parts<f32x16> v{load_first(x + i, int(a.size - i))};
    unroll<kParts>([&](int j) INLINED { squares[j] = multiply_add(v.part[j], v.part[j], squares[j]); });
  }
  const float scale = 1.0f / std::sqrt(sum(joined<f32x16>(squares)) / float(a.size) + a.eps);
  for (int64_t i = 0; i < a.size; i += 16) {
    int count = int(a.size - i);
    f32x16 v = load_first(x + i, count) * scale, w = load_first(weight + i, count);
    if (a.plus_one) store_first(out + i, v * (1.0f + w), count);
    else store_first(out + i, rounded<T>(v) * w, count);
  }
}

template <class T> void norm_of(const NormArgs& a) {
  in_tasks(a.rows, a.groups * a.size, [&](int64_t row) {
    const T* x = (const T*)a.x + row * a.x_stride;
    T* out = (T*)a.out + row * a.out_stride;
    for (int64_t g = 0; g < a.groups; g++) norm_row(a, x + g * a.x_group_stride, out + g * a.out_group_stride);
  });
}

template <class T> void rotate(T* x, const T* cos, const T* sin, int half) {
  for (int i = 0; i < half; i += 16) {
    int count = half - i;
    f32x16 a = load_first(x + i, count), b = load_first(x + half + i, count);
    f32x16 c1 = load_first(cos + i, count), c2 = load_first(cos + half + i, count);
    f32x16 s1 = load_first(sin + i, count), s2 = load_first(sin + half + i, count);
    store_first(x + i, rounded<T>(a * c1) + rounded<T>(-b * s1), count);
    store_first(x + half + i, rounded<T>(b * c2) + rounded<T>(a * s2), count);
  }
}

template <class T> void rope_of(const RopeArgs& a) {
  in_tasks(a.rows, int64_t(a.heads) * a.size, [&](int64_t row) {
    for (int h = 0; h < a.heads; h++) {
      rotate((T*)a.x + row * a.row_stride + h * a.head_stride, (const T*)a.cos + row * a.size,
             (const T*)a.sin + row * a.size, a.size / 2);
    }
  });
}

// Lanes keep their own first maximum; values before NaNs win, as nothing compares greater than them.
template <class T> int64_t best_of(const T* values, int64_t columns) {
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32xn highs[kParts];
  i32xn places[kParts], at[kParts];
  const Parts<i32x16> first{lanes};
  unroll<kParts>([&](int j) INLINED {
    highs[j] = f32xn{} - INFINITY;
    places[j] = at[j] = first.part[j];
  });
  auto take = [&](f32x16 values) INLINED {
    const Parts<f32x16> v{values};
    unroll<kParts>([&](int j) INLINED {
      const i32xn higher = (i32xn)(v.part[j] > highs[j]);
      highs[j] = higher ? v.part[j] : highs[j];
      places[j] = higher ? at[j] : places[j];
      at[j] += 16;
    });
  };
  int64_t i = 0;
  for (; i + 16 <= columns; i += 16) take(load(values + i));
  if (i < columns) {
    const int left = int(columns - i);
    const i32x16 exists = by_parts<i32x16>([&](i32xn lane) INLINED { return (i32xn)(lane < left); }, lanes);
    take(select(exists, load_first(values + i, left), all(-INFINITY)));
  }
  const f32x16 high = joined<f32x16>(highs);
  const i32x16 where = joined<i32x16>(places);
  int best = 0;
  for (int lane = 1; lane < 16; lane++) {
    if (high[lane] > high[best] || (high[lane] == high[best] && where[lane] < where[best])) best = lane;
  }
  return where[best];
}

template <class T> void best_rows(const RowsArgs& a) {
  pool::run(int(a.rows), [&](int row) { a.found[row] = best_of((const T*)a.values + row * a.row_stride, a.columns); });
}

uint64_t read_piece(const uint32_t* p, const uint32_t* end) {
  u32x16 mixed[4] = {};
  for (; p + 64 <= end; p += 64) {
    for (int i = 0; i < 4; i++) {
      prefetch(p + 1024 + i * 16);
      mixed[i] |= load(p + i * 16);
    }
  }
  u32x16 all_mixed = (mixed[0] | mixed[1]) | (mixed[2] | mixed[3]);
  uint64_t value = 0;
  for (int i = 0; i < 16; i++) value |= all_mixed[i];
  return value;
}

}  // namespace

uint64_t read(const void* data, int64_t bytes) {
  constexpr int64_t kPiece = 1 << 18;
  std::atomic<uint64_t> mixed{0};
  pool::run(int(bytes / kPiece), [&](int i) {
    const char* p = (const char*)data + i * kPiece;
    mixed |= read_piece((const uint32_t*)p, (const uint32_t*)(p + kPiece));
  });
  return mixed;
}

void best(const RowsArgs* a) { a->element_bytes == 4 ? best_rows<float>(*a) : best_rows<bf16>(*a); }
void norm(const NormArgs* a) { a->element_bytes == 4 ? norm_of<float>(*a) : norm_of<bf16>(*a); }
void rope(const RopeArgs* a) { a->element_bytes == 4 ? rope_of<float>(*a) : rope_of<bf16>(*a); }

}  // namespace ISA
