// The token of each row of logits, and the likeliest ones: what engine/penstock/engine/sampling computes with torch, to the last
// bit, on every instruction set. Weights are integers (their sums do not depend on an order) that additions and
// multiplications of floats give, each rounded for itself: no fused ones, and no library's exponential function.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "pool.h"
#include "vec.h"

namespace ISA {
namespace {

constexpr float kLeast = -64.0f;  // exponents below have no weight all the same
constexpr int kWeightBits = 40, kLowBits = 20;
constexpr int64_t kBlock = 1024;  // tokens whose weights are added up in 32 bits, upper and lower half apart
constexpr double kNoWeight = -41.0;

// 2^(rate * (v - top)) * 2^40, not yet an integer. `to_weights` in shares.py has the same operations in the same order.
INLINE f32x16 float_weights(f32x16 v, float top, float rate) {
  f32x16 exponent = (v - top) * rate;
  exponent = max(exponent, all(kLeast));  // what is not a number, too
  f32x16 shifted = exponent + 12582912.0f;  // 1.5 * 2^23: the sum is rounded to an integer, ties to even
  f32x16 x = exponent - (shifted - 12582912.0f);
  f32x16 y = x * 1.32647203e-3f;
  y = (y + 9.67151299e-3f) * x;
  y = (y + 5.55073358e-2f) * x;
  y = (y + 2.40222424e-1f) * x;
  y = (y + 6.93147004e-1f) * x;
  y = y + 1.0f;
  return (f32x16)((i32x16)y + (((i32x16)shifted - 0x4b400000 + kWeightBits) << 23));
}

// Truncated; to be multiplied by 2^20, and the rest.
INLINE i32x16 upper_half(f32x16 weights) {
  return __builtin_convertvector(weights * (1.0f / (1 << kLowBits)), i32x16);
}
INLINE i32x16 lower_half(f32x16 weights, i32x16 upper) {
  return __builtin_convertvector(weights - __builtin_convertvector(upper, f32x16) * float(1 << kLowBits), i32x16);
}

INLINE f32x16 load_or_lowest(const float* row, int64_t at, int64_t columns) {
  float copy[16];
  const float* from = row + at;
  if (columns - at < 16) {
    for (int i = 0; i < 16; i++) copy[i] = at + i < columns ? row[at + i] : -INFINITY;
    from = copy;
  }
  return load(from);
}

INLINE void weights_of(const float* row, int64_t at, int64_t columns, float top, float rate, int64_t out[16]) {
  f32x16 weights = float_weights(load_or_lowest(row, at, columns), top, rate);
  i32x16 upper = upper_half(weights), lower = lower_half(weights, upper);
  for (int i = 0; i < 16; i++) out[i] = (int64_t(upper[i]) << kLowBits) + lower[i];
}

// The sum of the weights; those of the blocks go to `blocks` unless it is null.
int64_t sum_weights(const float* row, int64_t columns, float top, float rate, int64_t* blocks) {
  int64_t total = 0;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    int64_t end = std::min(columns, begin + kBlock);
    i32xn uppers[kParts] = {}, lowers[kParts] = {};
    for (int64_t at = begin; at < end; at += 16) {
      f32x16 weights = float_weights(load_or_lowest(row, at, columns), top, rate);
      const Parts<i32x16> upper{upper_half(weights)}, lower{lower_half(weights, upper.whole)};
      unroll<kParts>([&](int j) INLINED {
        uppers[j] += upper.part[j];
        lowers[j] += lower.part[j];
      });
    }
    const i32x16 upper_sum = joined<i32x16>(uppers), lower_sum = joined<i32x16>(lowers);
    int64_t sum = 0;
    for (int i = 0; i < 16; i++) sum += (int64_t(upper_sum[i]) << kLowBits) + lower_sum[i];
    total += sum;
    if (blocks) blocks[begin / kBlock] = sum;
  }
  return total;
}

INLINE bool has_any(i32x16 lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
  const Parts<i32x16> parts{lanes};
  const __m256i mixed = _mm256_or_si256((__m256i)parts.part[0], (__m256i)parts.part[1]);
  return !_mm256_testz_si256(mixed, mixed);
#else
  int32_t mixed = 0;
  for (int i = 0; i < 16; i++) mixed |= lanes[i];
  return mixed != 0;
#endif
}

struct Top {
  float score;  // the highest of the numbers
  bool is_finite;  // and all scores are numbers
};

Top find_top(const float* row, int64_t columns) {
  constexpr int kChains = 4;
  f32xn highs[kChains * kParts];
  i32xn strange[kParts] = {};
  unroll<kChains * kParts>([&](int i) INLINED { highs[i] = f32xn{} - INFINITY; });
  auto take = [&](f32x16 values, int chain) INLINED {
    const Parts<f32x16> v{values};
    unroll<kParts>([&](int j) INLINED {
      f32xn& high = highs[chain * kParts + j];
      strange[j] |= (i32xn)(v.part[j] != v.part[j]);
      high = v.part[j] > high ? v.part[j] : high;
    });
  };
  int64_t at = 0;
  for (; at + kChains * 16 <= columns; at += kChains * 16) {
    unroll<kChains>([&](int i) INLINED { take(load(row + at + i * 16), i); });
  }
  for (; at < columns; at += 16) take(load_or_lowest(row, at, columns), 0);
  f32xn high[kParts];
  unroll<kParts>([&](int j) INLINED {
    const f32xn one = highs[j] > highs[kParts + j] ? highs[j] : highs[kParts + j];
    const f32xn other = highs[2 * kParts + j] > highs[3 * kParts + j] ? highs[2 * kParts + j] : highs[3 * kParts + j];
    high[j] = one > other ? one : other;
  });
  float score = max(joined<f32x16>(high));
  return {score, !has_any(joined<i32x16>(strange)) && std::isfinite(score)};
}

int64_t find_first(const float* row, int64_t columns, float score) {
  for (int64_t at = 0; at < columns; at += 16) {
    auto is_score = [&](f32xn v) INLINED { return (i32xn)(v == score); };
    if (!has_any(by_parts<i32x16>(is_score, load_or_lowest(row, at, columns)))) continue;
    for (int64_t id = at; id < std::min(at + 16, columns); id++) {
      if (row[id] == score) return id;
    }
  }
  return 0;
}

// Smaller keys go first: falling score, then rising id. A zero has no sign here.
INLINE uint64_t rank_key(float score, int64_t id) {
  float value = score + 0.0f;
  int32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t rising = uint32_t(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u;
  return uint64_t(~rising) << 32 | uint64_t(id);
}

int64_t target_weight(int64_t total, double uniform) {
  return std::min(int64_t(double(total) * uniform), total - 1);
}

// In the order of the ids. The top score is finite.
int64_t draw_from_all(const float* row, int64_t columns, float top, const SampleRow& how) {
  int64_t num_blocks = (columns + kBlock - 1) / kBlock;
  int64_t* blocks = (int64_t*)pool::scratch(1, num_blocks * sizeof(int64_t));
  int64_t wanted = target_weight(sum_weights(row, columns, top, how.rate, blocks), how.uniform);
  int64_t block = 0;
  for (; block < num_blocks - 1 && blocks[block] <= wanted; block++) wanted -= blocks[block];
  for (int64_t at = block * kBlock; at < columns; at += 16) {
    int64_t weights[16];
    weights_of(row, at, columns, top, how.rate, weights);
    for (int i = 0; i < 16; i++) {
      if ((wanted -= weights[i]) < 0) return at + i;
    }
  }
  return columns - 1;
}

struct Candidate {
  uint64_t key;
  int64_t weight;
  bool operator<(const Candidate& other) const { return key < other.key; }
};

// The tokens with exponents from `least` on: the first ones of the ranking.
int64_t find_candidates(const float* row, int64_t columns, float top, float rate, float least, Candidate* found) {
  int64_t count = 0;
  for (int64_t at = 0; at < columns; at += 16) {
    f32x16 v = load_or_lowest(row, at, columns);
    i32x16 inside = by_parts<i32x16>([&](f32xn v) INLINED { return (i32xn)((v - top) * rate >= least); }, v);
    if (!has_any(inside)) continue;
    int64_t weights[16];
    weights_of(row, at, columns, top, rate, weights);
    for (int i = 0; i < 16; i++) {
      if (inside[i]) found[count++] = {rank_key(v[i], at + i), weights[i]};
    }
  }
  return count;
}

// Puts first the fewest of the ranking whose weights' sum is enough, in any order but for the last of them, which is the
// last one in the ranking, too. How many they are; all if all are not enough.
template <class F> int64_t find_reaching(Candidate* all, int64_t count, const F& is_enough) {
  int64_t begin = 0, end = count, before = 0;  // the place is in [begin, end)
  for (int halvings = 0; end - begin > 16 && halvings < 64; halvings++) {
    Candidate *a = all + begin, *b = all + (begin + end) / 2, *c = all + end - 1;
    uint64_t pivot = std::max(std::min(a->key, b->key), std::min(std::max(a->key, b->key), c->key));
    int64_t sum = before, place = begin;
    for (int64_t i = begin; i < end; i++) {
      if (all[i].key <= pivot) {
        sum += all[i].weight;
        std::swap(all[i], all[place++]);
      }
    }
    if (is_enough(sum)) {
      end = place;
    } else {
      begin = place;
      before = sum;
    }
  }
  std::sort(all + begin, all + end);
  for (int64_t i = begin; i < end; i++) {
    before += all[i].weight;
    if (is_enough(before)) return i + 1;
  }
  return end;
}

// Among the tokens that the filters leave, in the order of the ranking.
int64_t draw_filtered(const float* row, int64_t columns, float top, const SampleRow& how) {
  int64_t top_k = how.top_k > 0 ? std::min(how.top_k, columns) : columns;
  bool is_whole = top_k == columns;
  int64_t total = is_whole && how.top_p < 1 ? sum_weights(row, columns, top, how.rate, nullptr) : 0;
  double least_weight = double(int64_t(1) << kWeightBits) * how.min_p;
  Candidate* found = (Candidate*)pool::scratch(2, columns * sizeof(Candidate));
  int64_t count = 0;
  for (double least : {-6.0, -14.0, kNoWeight}) {
    count = find_candidates(row, columns, top, how.rate, float(least), found);
    if (!is_whole) {
      if (count >= top_k) break;
      continue;
    }
    if (std::ldexp(1.01, int(least)) < how.min_p) break;  // those behind are too unlikely
    if (how.top_p < 1) {
      int64_t reached = 0;
      for (int64_t i = 0; i < count; i++) reached += found[i].weight;
      if (double(reached) >= double(total) * how.top_p) break;
    }
  }
  if (count > top_k) {
    std::nth_element(found, found + top_k - 1, found + count);
    count = top_k;
  }
  if (!is_whole) {
    for (int64_t i = 0; i < count; i++) total += found[i].weight;
  }
  if (how.top_p < 1) {
    double limit = double(total) * how.top_p;
    count = find_reaching(found, count, [&](int64_t sum) { return double(sum) >= limit; });
  }
  int64_t kept = 0, sum = 0;
  for (int64_t i = 0; i < count; i++) {
    if (double(found[i].weight) < least_weight) continue;
    sum += found[i].weight;
    found[kept++] = found[i];
  }
  int64_t wanted = target_weight(sum, how.uniform);
  int64_t place = find_reaching(found, kept, [&](int64_t reached) { return reached > wanted; });
  return int64_t(found[place - 1].key & 0xffffffffu);
}

// Masks, bias and penalties, as `apply_penalties` in penalties.py has them.
void change_scores(const SampleRow& how, float* scores, int64_t columns) {
  const u32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t at = 0; how.mask && at < columns; at += 16) {
    f32x16 v = load_first(scores + at, int(columns - at));
    v = (all(how.mask[at / 32] >> at % 32) >> lanes & 1) != 0 ? v : all(-INFINITY);
    store_first(scores + at, v, int(columns - at));
  }
  for (int64_t i = 0; i < how.num_forbidden; i++) scores[how.forbidden[i]] = -INFINITY;
  for (int64_t i = 0; i < how.num_biased; i++) scores[how.biased[i]] += how.biases[i];
  for (int64_t i = 0; i < how.num_tokens; i++) {
    float& score = scores[how.tokens[i]];
    if (how.repetition != 1.0f) score = score > 0 ? score / how.repetition : score * how.repetition;
    if (how.counts[i] > 0 && (how.presence != 0 || how.frequency != 0)) {
      score -= float(how.presence + double(how.counts[i]) * how.frequency);
    }
  }
}

template <class T> const float* as_floats(const T* row, int64_t columns, bool is_copied) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (!is_copied) return row;
  }
  float* copy = (float*)pool::scratch(0, columns * sizeof(float));
  for (int64_t at = 0; at < columns; at += 16) {
    store_first(copy + at, load_first(row + at, int(columns - at)), int(columns - at));
  }
  return copy;
}

int64_t draw(const float* scores, int64_t columns, const SampleRow& how) {
  Top top = find_top(scores, columns);
  if (how.rate == 0) return std::isinf(top.score) && top.score < 0 ? 0 : find_first(scores, columns, top.score);
  if (!top.is_finite) return 0;
  bool is_filtered = how.top_k > 0 || how.top_p < 1 || how.min_p > 0;
  return is_filtered ? draw_filtered(scores, columns, top.score, how)
                     : draw_from_all(scores, columns, top.score, how);
}

template <class T> void find_broken_rows(const RowsArgs& a) {
  pool::run(int(a.rows), [&](int row) {
    const float* scores = as_floats((const T*)a.values + row * a.row_stride, a.columns, false);
    a.found[row] = !find_top(scores, a.columns).is_finite;
  });
}

template <class T> void sample_rows(const SampleArgs& a) {
  pool::run(int(a.rows), [&](int row) {
    const SampleRow& how = a.each[row];
    bool is_changed = how.mask || how.num_forbidden || how.num_biased || how.num_tokens;
    const float* scores = as_floats((const T*)a.logits + row * a.row_stride, a.columns, is_changed);
    if (is_changed) change_scores(how, (float*)scores, a.columns);
    a.drawn[row] = draw(scores, a.columns, how);
  });
}

void rank_row(const RankArgs& a, const float* row, int64_t number) {
  uint64_t* best = (uint64_t*)pool::scratch(1, a.width * sizeof(uint64_t));  // a heap: the last in the ranking is on top
  int64_t count = 0;
  float bound = -INFINITY;
  auto is_beyond = [&](f32xn v) INLINED { return ~(i32xn)(v <= bound); };  // of equal ones those before go first
  for (int64_t at = 0; at < a.columns; at += 16) {
    f32x16 v = load_or_lowest(row, at, a.columns);
    if (count == a.width && !has_any(by_parts<i32x16>(is_beyond, v))) continue;
    for (int64_t id = at; id < std::min(at + 16, a.columns); id++) {
      uint64_t key = rank_key(row[id], id);
      if (count == a.width) {
        if (key > best[0]) continue;
        std::pop_heap(best, best + count--);
      }
      best[count++] = key;
      std::push_heap(best, best + count);
    }
    if (count == a.width) bound = row[best[0] & 0xffffffffu];
  }
  std::sort_heap(best, best + count);
  for (int64_t i = 0; i < a.width; i++) {
    int64_t id = int64_t(best[i] & 0xffffffffu);
    a.ids[number * a.width + i] = id;
    a.values[number * a.width + i] = row[id];
  }
  a.totals[number] = sum_weights(row, a.columns, row[best[0] & 0xffffffffu], a.rate, nullptr);
}

template <class T> void rank_rows(const RankArgs& a) {
  pool::run(int(a.rows), [&](int row) {
    rank_row(a, as_floats((const T*)a.logits + row * a.row_stride, a.columns, false), row);
  });
}

}  // namespace

void broken(const RowsArgs* a) {
  a->element_bytes == 4 ? find_broken_rows<float>(*a) : find_broken_rows<bf16>(*a);
}
void sample(const SampleArgs* a) { a->element_bytes == 4 ? sample_rows<float>(*a) : sample_rows<bf16>(*a); }
void rank(const RankArgs* a) { a->element_bytes == 4 ? rank_rows<float>(*a) : rank_rows<bf16>(*a); }

}  // namespace ISA
