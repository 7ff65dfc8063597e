// A whole decoder layer: the same kernels in the same order as the layer's modules, without the way back to Python
// between them.
#include <algorithm>
#include <cstring>
#include <utility>

#include "functions.h"
#include "pool.h"
#include "vec.h"

namespace ISA {
namespace {

// A part of rows of [q | k | v]: `heads` heads from column `first` on.
struct Heads {
  char* data;
  int32_t heads;
  int32_t size;
};

struct Layer {
  const LayerArgs& w;
  const StepArgs& step;
  AttentionArgs attend;
  int32_t bytes;      // of an element
  int64_t qkv_width;  // elements between rows of [q | k | v]

  void normed(const void* x, void* out, const void* weight, float eps) const {
    NormArgs a{x, out, weight, step.rows, 1, step.hidden, step.hidden, 0, step.hidden, 0, eps, w.plus_one, bytes};
    norm(&a);
  }

  void head_norm(const Heads& part, const void* weight) const {
    if (!weight) return;
    NormArgs a{part.data, part.data, weight, step.rows, part.heads, part.size, qkv_width, part.size,
               qkv_width, part.size, w.head_eps, w.plus_one, bytes};
    norm(&a);
  }

  void rotate(const Heads& part) const {
    RopeArgs a{part.data, qkv_width, part.size, step.cos, step.sin, step.rows, part.heads, part.size, bytes};
    rope(&a);
  }

  void keep(const Heads& part, const void* pool, const float* scales) const {
    WriteArgs a{part.data, qkv_width, part.size, (void*)pool, (float*)scales, attend.block_stride, step.blocks, step.offsets,
                step.rows, part.heads, part.size, attend.block_size, bytes};
    write(&a);
  }

  void project(const Packed* weight, const void* x, int64_t x_stride, Part out, int32_t activation,
               const void* residual) const {
    LinearArgs a{weight, x, x_stride, step.rows, &out, 1, activation, residual, step.hidden};
    linear(&a);
  }

  void run() {
    int32_t size = attend.k_size;
    int64_t rows = step.rows, attended = int64_t(attend.heads) * attend.v_size;
    char* h = (char*)pool::scratch(1, rows * (step.hidden > attended ? step.hidden : attended) * bytes);
    int64_t wide = qkv_width > w.intermediate ? qkv_width : w.intermediate;
    char* qkv = (char*)pool::scratch(2, rows * wide * bytes);

    Heads q{qkv, attend.heads, size};
    Heads k{q.data + int64_t(q.heads) * size * bytes, attend.kv_heads, size};
    Heads v{k.data + int64_t(k.heads) * size * bytes, attend.kv_heads, attend.v_size};
    int64_t q_panels = (int64_t(q.heads) * size + 31) / 32, k_panels = (int64_t(k.heads) * size + 31) / 32;
    Part parts[3] = {{q.data, qkv_width, int64_t(q.heads) * size, 0},
                     {k.data, qkv_width, int64_t(k.heads) * size, q_panels},
                     {v.data, qkv_width, int64_t(v.heads) * v.size, q_panels + k_panels}};

    normed(step.x, h, w.input_norm, w.eps);
    LinearArgs in{w.qkv, h, step.hidden, rows, parts, 3, kNone, nullptr, 0};
    linear(&in);
    head_norm(q, w.q_norm);
    head_norm(k, w.k_norm);
    rotate(q);
    rotate(k);
    keep(k, attend.keys, attend.key_scales);
    keep(v, attend.values, attend.value_scales);
    attend.q = q.data;
    attend.q_row_stride = qkv_width;
    attend.q_head_stride = size;
    attend.out = h;
    attention(&attend);
    project(w.output, h, attended, {step.out, step.hidden, step.hidden, 0}, kNone, step.x);

    normed(step.out, w.gate_up ? h : step.normed, w.mid_norm, w.mid_eps);
    if (!w.gate_up) return;
    project(w.gate_up, h, step.hidden, {qkv, w.intermediate, w.intermediate, 0}, w.activation, nullptr);
    project(w.down, qkv, w.intermediate, {step.out, step.hidden, step.hidden, 0}, kNone, step.out);
  }
};

}  // namespace

void layers(const PagedLayer* layers, int64_t num_layers, const StepArgs* step) {
  StepArgs s = *step;
  for (const PagedLayer* at = layers; at < layers + num_layers; at++) {
    AttentionArgs attention = at->attention;
    attention.tables = s.tables;
    attention.segments = s.segments;
    attention.num_segments = s.num_segments;
    attention.first_key = s.first_key;
    const int64_t width = int64_t(attention.heads + attention.kv_heads) * attention.k_size +
                          int64_t(attention.kv_heads) * attention.v_size;
    Layer{*at->weights, s, attention, attention.element_bytes, width}.run();
    std::swap(s.x, s.out);
  }
}

// Copy the chosen rows of `size` bytes: out[i] = rows[chosen[i]].
static void copy_rows(void* out, const void* rows, const int64_t* chosen, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; i++) memcpy((char*)out + i * size, (const char*)rows + chosen[i] * size, size);
}

void body(const NativeModelArgs* a, const StepArgs* step) {
  StepArgs s = *step;
  const int64_t wide = s.hidden * a->element_bytes, narrow = int64_t(a->head_size) * a->element_bytes;
  const int64_t rows = std::max(s.rows, a->num_kept);
  char* memory = (char*)pool::scratch(7, 2 * rows * (wide + narrow));
  s.x = memory;
  s.out = memory + rows * wide;
  char* cos = memory + 2 * rows * wide;
  char* sin = cos + rows * narrow;
  s.cos = cos;
  s.sin = sin;
  copy_rows(cos, a->cos, a->positions, s.rows, narrow);
  copy_rows(sin, a->sin, a->positions, s.rows, narrow);
  if (a->packed_embedding) {
    LookupArgs found{a->packed_embedding, a->ids, s.x, s.rows};
    lookup(&found);
  } else {
    copy_rows(s.x, a->embedding, a->ids, s.rows, wide);
  }
  layers(a->layers, a->num_layers, &s);
  if (a->num_layers % 2) std::swap(s.x, s.out);  // x is what the last layer gave
  copy_rows(s.out, s.x, a->kept, a->num_kept, wide);
  NormArgs last{s.out, s.out, a->norm, a->num_kept, 1, s.hidden, s.hidden, 0, s.hidden, 0, a->eps, a->plus_one, a->element_bytes};
  norm(&last);
  if (a->kept_hidden) memcpy(a->kept_hidden, s.out, a->num_kept * wide);
  Part logits{a->logits, a->num_logits, a->num_logits, 0};
  LinearArgs head{a->head, s.out, s.hidden, a->num_kept, &logits, 1, kNone, nullptr, 0};
  linear(&head);
}

}  // namespace ISA
