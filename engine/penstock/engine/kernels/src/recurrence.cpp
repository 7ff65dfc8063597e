// Single tokens of layers that keep a state: a depthwise convolution, a gated delta rule, and a state space. A sequence's
// tokens are read one after the other, as each alone, and its state is changed in place.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "functions.h"
#include "pool.h"
#include "vec.h"

namespace ISA {
namespace {

constexpr int kVectors = 4;  // of sums that are made at once
constexpr int kColumns = kVectors * kLanes;

INLINE f32xn load_n(const float* p) { return *(const f32xn_any*)p; }
INLINE f32xn load_n(const bf16* p) {
  float copy[kLanes];
  for (int i = 0; i < kLanes; i++) copy[i] = scalar(p[i]);
  return load_n(copy);
}
INLINE void store_n(float* p, f32xn v) { *(f32xn_any*)p = v; }
INLINE void store_scalar(float* p, float v) { *p = v; }
INLINE void store_scalar(bf16* p, float v) { *p = bf16(bits_of_bf16(all(v))[0]); }
INLINE void store_n(bf16* p, f32xn v) {
  for (int i = 0; i < kLanes; i++) store_scalar(p + i, v[i]);
}
INLINE f32xn fma_n(f32xn a, f32xn b, f32xn c) { return madd<float>((u32xn)a, (u32xn)b, c); }
INLINE f32xn all_n(float x) { return f32xn{} + x; }

INLINE f32x16 silu(f32x16 v) { return v / (1.0f + exp(-v)); }

// Call read(row, state) for each row of a run, with a part of its state, or a copy of what it was behind the kept ones.
template <class S, class F> INLINE void read_run(const Run& run, S* state, int64_t size, const F& read) {
  for (int64_t i = 0; i < run.count; i++) {
    if (i == run.kept) state = (S*)memcpy(pool::scratch(1, size * sizeof(S)), state, size * sizeof(S));
    read(run.first + i, state);
  }
}

// Convolve the `count` channels from `c` on of a row. WIDTH: of the convolution, or 0 for any.
template <class T, int WIDTH> void convolve_row(const ConvolveArgs& a, int64_t row, T* window, int64_t c, int count) {
  const int width = WIDTH ? WIDTH : a.width, length = a.length;
  const T *x = (const T*)a.x + row * a.x_stride + c * a.x_channel_stride, *w = (const T*)a.weight + c * width;
  float sums[16] = {};
  for (int i = 0; i < count; i++, window += length, w += width) {
    for (int at = 0; at < length - 1; at++) window[at] = window[at + 1];
    window[length - 1] = x[i * a.x_channel_stride];
    for (int tap = 0; tap < width; tap++) sums[i] += scalar(window[length - width + tap]) * scalar(w[tap]);
  }
  f32x16 v = load(sums);
  if (a.bias) v += load_first((const T*)a.bias + c, count);
  if (a.has_silu) v = silu(rounded<T>(v));
  store_first((T*)a.out + row * a.channels + c, v, count);
}

template <class T> void convolve_of(const ConvolveArgs& a) {
  constexpr int64_t kTask = 2048;
  const int64_t tasks = (a.channels + kTask - 1) / kTask;
  pool::run(int(a.num_runs * tasks), [&](int task) {
    const Run& run = a.runs[task / tasks];
    const int64_t first = task % tasks * kTask, end = std::min(a.channels, first + kTask);
    for (int64_t c = first; c < end; c += 16) {
      const int count = int(std::min<int64_t>(16, end - c));
      T* state = (T*)a.state + run.row * a.row_stride + c * a.length;
      read_run(run, state, count * a.length, [&](int64_t row, T* window) {
        (a.width == 4 ? convolve_row<T, 4> : convolve_row<T, 0>)(a, row, window, c, count);
      });
    }
  });
}

// What a head of a delta rule reads: its key, query and decay for each row of the state.
struct Head {
  const float *key, *query, *decay;
  int64_t keys, values;
};

// state = state * decay + key (value - key state) beta, and the query's sums over it, for C vectors of columns.
template <int C> INLINE void delta_columns(const Head& h, float* state, const float* value, float beta, float* out) {
  f32xn sums[C] = {}, change[C], found[C] = {};
  for (int64_t k = 0; k < h.keys; k++) {
    const f32xn part = all_n(h.key[k] * h.decay[k]);
    unroll<C>([&](int c) { sums[c] = fma_n(load_n(state + k * h.values + c * kLanes), part, sums[c]); });
  }
  unroll<C>([&](int c) { change[c] = (load_n(value + c * kLanes) - sums[c]) * beta; });
  for (int64_t k = 0; k < h.keys; k++) {
    const f32xn key = all_n(h.key[k]), query = all_n(h.query[k]), decay = all_n(h.decay[k]);
    unroll<C>([&](int c) {
      float* at = state + k * h.values + c * kLanes;
      const f32xn s = fma_n(key, change[c], load_n(at) * decay);
      store_n(at, s);
      found[c] = fma_n(s, query, found[c]);
    });
  }
  unroll<C>([&](int c) { store_n(out + c * kLanes, found[c]); });
}

void delta_column(const Head& h, float* state, float value, float beta, float* out) {
  float sum = 0, found = 0;
  for (int64_t k = 0; k < h.keys; k++) sum += state[k * h.values] * (h.key[k] * h.decay[k]);
  const float change = (value - sum) * beta;
  for (int64_t k = 0; k < h.keys; k++) {
    float& s = state[k * h.values];
    s = s * h.decay[k] + h.key[k] * change;
    found += s * h.query[k];
  }
  *out = found;
}

// A head's key or query as its rule uses it.
void scale_head(const float* x, int64_t size, bool is_normed, float factor, float* out) {
  if (is_normed) {
    f32x16 squares{};
    for (int64_t i = 0; i < size; i += 16) {
      const f32x16 v = load_first(x + i, int(size - i));
      squares = fma(v, v, squares);
    }
    factor *= 1.0f / std::sqrt(sum(squares) + 1e-6f);
  }
  for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor;
}

// Products of a head's part of a state space: s = s * decay + b change, and c's sum over it.
template <class S> INLINE float space_line(S* s, const float* b, const float* c, int64_t size, float decay, float change) {
  f32xn sums[kVectors] = {};
  int64_t n = 0;
  for (; n + kColumns <= size; n += kColumns) {
    unroll<kVectors>([&](int i) {
      const int64_t at = n + i * kLanes;
      const f32xn v = fma_n(load_n(b + at), all_n(change), load_n(s + at) * decay);
      store_n(s + at, v);
      sums[i] = fma_n(v, load_n(c + at), sums[i]);
    });
  }
  float total = 0;
  const f32xn both = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int i = 0; i < kLanes; i++) total += both[i];
  for (; n < size; n++) {
    const float v = scalar(s[n]) * decay + b[n] * change;
    store_scalar(s + n, v);
    total += v * c[n];
  }
  return total;
}

// The same with a decay for each of its numbers: e to the power of step * rate.
template <class S>
INLINE float space_line(S* s, const float* b, const float* c, int64_t size, const float* rates, float step, float change) {
  f32x16 sums{};
  for (int64_t n = 0; n < size; n += 16) {
    const int count = int(size - n);
    const f32x16 decay = exp(load_first(rates + n, count) * step);
    const f32x16 v = fma(load_first(b + n, count), all(change), load_first(s + n, count) * decay);
    store_first(s + n, v, count);
    sums = fma(v, load_first(c + n, count), sums);
  }
  return sum(sums);
}

template <class S> void space_head(const SpaceArgs& a, int64_t row, int64_t head, S* state) {
  const int64_t at = row * a.heads + head, group = row * a.groups + head / (a.heads / a.groups);
  float step = a.steps[at] + (a.step_bias ? a.step_bias[head] : 0.0f);
  if (a.has_softplus && step <= 20.0f) step = std::log1p(std::exp(step));
  const float *b = a.b + group * a.size, *c = a.c + group * a.size;
  const float decay = a.has_rates ? 0.0f : exp(all(step * a.rates[head]))[0];
  for (int64_t p = 0; p < a.parts; p++, state += a.size) {
    const float x = a.x[at * a.parts + p];
    float y = a.has_rates ? space_line(state, b, c, a.size, a.rates + head * a.size, step, step * x)
                          : space_line(state, b, c, a.size, decay, step * x);
    if (a.skip) y += x * a.skip[head];
    if (a.gate) y *= silu(all(a.gate[at * a.parts + p]))[0];
    a.out[at * a.parts + p] = y;
  }
}

}  // namespace

void convolve(const ConvolveArgs* a) { a->element_bytes == 4 ? convolve_of<float>(*a) : convolve_of<bf16>(*a); }

void delta(const DeltaArgs* a) {
  const int64_t size = a->keys * a->values;
  pool::run(int(a->num_runs * a->heads), [&](int task) {
    const Run& run = a->runs[task / a->heads];
    const int64_t head = task % a->heads;
    float* const memory = (float*)pool::scratch(0, 3 * a->keys * sizeof(float));
    float *key = memory, *query = key + a->keys, *decay = query + a->keys;
    read_run(run, a->state + run.row * a->row_stride + head * size, size, [&](int64_t row, float* state) {
      const int64_t at = row * a->heads + head, key_head = row * a->key_heads + head / (a->heads / a->key_heads);
      scale_head(a->key + key_head * a->keys, a->keys, a->is_normed, 1.0f, key);
      scale_head(a->query + key_head * a->keys, a->keys, a->is_normed, 1.0f / std::sqrt(float(a->keys)), query);
      const float* logs = a->decay + (a->has_key_decays ? at * a->keys : at);
      for (int64_t k = 0; k < a->keys; k += 16) {
        const int count = int(a->keys - k);
        store_first(decay + k, exp(a->has_key_decays ? load_first(logs + k, count) : all(*logs)), count);
      }
      const Head h{key, query, decay, a->keys, a->values};
      const float *value = a->value + at * a->values, beta = a->beta[at];
      float* out = a->out + at * a->values;
      int64_t v = 0;
      for (; v + kColumns <= a->values; v += kColumns) delta_columns<kVectors>(h, state + v, value + v, beta, out + v);
      for (; v + kLanes <= a->values; v += kLanes) delta_columns<1>(h, state + v, value + v, beta, out + v);
      for (; v < a->values; v++) delta_column(h, state + v, value[v], beta, out + v);
    });
  });
}

template <class S> static void space_of(const SpaceArgs& a) {
  constexpr int64_t kTask = 8192;  // numbers of a state
  const int64_t size = a.parts * a.size, per_task = std::max<int64_t>(1, kTask / size);
  const int64_t tasks = (a.heads + per_task - 1) / per_task;
  pool::run(int(a.num_runs * tasks), [&](int task) {
    const Run& run = a.runs[task / tasks];
    const int64_t first = task % tasks * per_task, end = std::min<int64_t>(a.heads, first + per_task);
    S* state = (S*)a.state + run.row * a.row_stride;
    for (int64_t head = first; head < end; head++)
      read_run(run, state + head * size, size, [&](int64_t row, S* mine) { space_head(a, row, head, mine); });
  });
}

void space(const SpaceArgs* a) { a->element_bytes == 4 ? space_of<float>(*a) : space_of<bf16>(*a); }

}  // namespace ISA
