// What the library offers: one table of functions for each instruction set it was compiled for.
//
// Elements are float (element_bytes 4) or bf16 (2). Sizes and strides count elements, never bytes. `rows` are the
// tokens of a step. All results depend on their own row and the weights alone: not on the number of rows, their order
// or the number of threads.
#pragma once
#include <cstdint>

// One packed group of linear layers that read the same input. Panels of 32 output columns follow each other; within a
// panel one line of 32 units (four bytes: a float, or two bf16 consecutive along the input) for each unit of the input.
struct Packed {
  const uint32_t* data;
  const float* bias;  // one for each column of all panels, or null
  int64_t inputs;
  int64_t num_panels;
  int32_t element_bytes;  // of the inputs and outputs, and of stored weights
  int32_t form;
  int64_t group;                     // inputs of one scale, if they have 4 bits: 32, 64 or 128
  const float* scales;               // of quantized weights: see quantized.h
  const uint8_t* palettes;           // of compressed weights: see compressed.h
  const uint32_t* exceptions;
  const uint32_t* first_exception;   // of each panel
  const uint8_t* kinds;              // of a GGUF file's blocks, of each panel: a GgufKind. See gguf.h
  const int64_t* places;             // of each panel: bytes from `data` on
};

// How weights are packed: as they are stored, as integers of 8 or 4 bits, bf16 without loss in 12 bits, or a GGUF file's
// blocks.
enum Form : int32_t { kStored = 0, kInt8 = 1, kInt4 = 2, kCompressed = 3, kGguf = 4 };
enum GgufKind : uint8_t { kQ8_0 = 0, kQ4_0 = 1, kQ5_0 = 2, kQ4_K = 3, kQ5_K = 4, kQ6_K = 5 };

// Of the gate. kBoundedSwish bounds the gate and what it gates, to which it adds one: as gpt-oss does.
enum Activation : int32_t { kNone = 0, kSilu = 1, kGeluTanh = 2, kBoundedSwish = 3 };

// A part of the output columns: panels from `first_panel` on belong to it, up to the next part's.
struct Part {
  void* out;
  int64_t stride;   // between rows
  int64_t columns;  // that exist; the rest of the last panel is padding
  int64_t first_panel;
};

struct LinearArgs {
  const Packed* weight;
  const void* x;
  int64_t x_stride;
  int64_t rows;
  const Part* parts;
  int32_t num_parts;
  int32_t activation;    // not kNone: panels are 16 columns of the gate and 16 of what it gates; one part, of the products
  const void* residual;  // added to the (rounded) result, or null; one part only
  int64_t residual_stride;
  float limit, slope;  // of kBoundedSwish
};

// A mixture of experts: each row goes to the `top_k` experts that were chosen for it, and their results are weighted and
// added in the order of the choice. An expert is gate, up and down; those of one kind are packed one after the other.
struct ExpertsArgs {
  const Packed* gate_up;  // of all experts
  const Packed* down;
  const void* x;          // [rows, inputs], contiguous
  const int64_t* chosen;  // [rows, top_k]
  const void* shares;     // [rows, top_k] the weights of the results
  void* out;              // [rows, inputs]
  int64_t rows, top_k, num_experts;
  int64_t intermediate;   // columns of the gate
  int32_t activation;
  int32_t share_bytes;    // of a weight: with those of an element, a weighted result is rounded before it is added
  float limit, slope;     // of kBoundedSwish
};

// The new tokens of one sequence in a step. They attend to the sequence's tokens before them and to each other.
struct Segment {
  int32_t first_row;   // of its new tokens in the flat batch
  int32_t num_rows;
  int32_t start;       // position of the first of them
  int32_t table;       // where its block table begins in `tables`
};

struct AttentionArgs {
  const void* q;            // [rows, heads, k_size], k_size contiguous
  int64_t q_row_stride;
  int64_t q_head_stride;
  const void* keys;         // this layer's K in block 0: [kv_heads, block_size, k_size]
  const void* values;       // this layer's V in block 0: [kv_heads, block_size, v_size]
  const float* key_scales;  // of K in block 0: [kv_heads, block_size], if K and V are int8; else null
  const float* value_scales;
  int64_t block_stride;     // from a block to the next
  const int32_t* tables;
  const Segment* segments;
  const int32_t* first_key; // for each row the position of the first token it sees, or null: all before it
  const float* sinks;       // [heads] a score that takes its share and gives nothing, or null
  void* out;                // [rows, heads, v_size], contiguous
  int32_t num_segments;
  int32_t heads;
  int32_t kv_heads;
  int32_t k_size;
  int32_t v_size;
  int32_t block_size;
  float scale;
  float softcap;            // 0: none
  int32_t element_bytes;
};

struct WriteArgs {
  const void* x;        // [rows, heads, size], size contiguous
  int64_t row_stride;
  int64_t head_stride;
  void* pool;           // this layer's K or V in block 0: [heads, block_size, size]
  float* scales;        // of int8: [heads, block_size] in block 0; else null, and K or V are stored as they are
  int64_t block_stride;
  const int64_t* blocks;   // of each row
  const int64_t* offsets;  // of each row in its block
  int64_t rows;
  int32_t heads;
  int32_t size;
  int32_t block_size;
  int32_t element_bytes;
};

struct NormArgs {
  const void* x;
  void* out;  // may be x
  const void* weight;
  int64_t rows;
  int64_t groups;  // each row has this many parts that are normed alone (heads), `group_stride` apart
  int64_t size;
  int64_t x_stride, x_group_stride, out_stride, out_group_stride;
  float eps;
  int32_t plus_one;  // 1: times (1 + weight), rounded once at the end; 0: rounded, then times weight
  int32_t element_bytes;
};

struct RopeArgs {
  void* x;  // [rows, heads, size], changed in place
  int64_t row_stride, head_stride;
  const void* cos;  // [rows, size]
  const void* sin;
  int64_t rows;
  int32_t heads;
  int32_t size;
  int32_t element_bytes;
};

// One decoder layer of the common form, from the residual stream x to the next layer's, `out`:
//   h = norm(x); q, k, v = h Wqkv; norms of the heads of q and k if there are any; rope; x += attention(q, K, V) Wo
//   h = norm(x); x += (act(h Wgate) * h Wup) Wdown
struct LayerArgs {
  const Packed* qkv;
  const Packed* output;
  const Packed* gate_up;  // null: it ends with h, which the caller gives to a mixture of experts
  const Packed* down;
  const void* input_norm;
  const void* mid_norm;
  const void* q_norm;  // [head size], or null
  const void* k_norm;
  float eps, mid_eps, head_eps;
  int32_t activation;
  int32_t plus_one;         // of all norms
  int32_t intermediate;     // columns of the gate
};

// A decoder layer over a pool. `attention` says all that is the same in every step: neither q and out, nor what StepArgs
// has, too.
struct PagedLayer {
  const LayerArgs* weights;
  AttentionArgs attention;
};

// What all layers of a step share.
struct StepArgs {
  void* x;                  // [rows, hidden], contiguous
  void* out;                // the same; not x
  const void* cos;          // [rows, head size]
  const void* sin;
  const int64_t* blocks;    // where each row's K and V go
  const int64_t* offsets;
  int64_t rows;
  int64_t hidden;
  const int32_t* tables;    // these as in AttentionArgs
  const Segment* segments;
  const int32_t* first_key;
  int32_t num_segments;
  void* normed;             // [rows, hidden]: h of a layer without gate_up
};

// A whole model of such layers, from token ids to logits. It sets x, out, cos and sin of its StepArgs itself.
struct NativeModelArgs {
  const PagedLayer* layers;
  int64_t num_layers;
  const Packed* packed_embedding;  // or null: `embedding` has the rows
  const void* embedding;           // [num_tokens, hidden], contiguous
  int64_t num_tokens;
  const int64_t* ids;              // [rows]
  const void* cos;                 // [num_positions, head size]
  const void* sin;
  int64_t num_positions;
  const int64_t* positions;        // [rows]
  const void* norm;                // of the rows that are kept
  const Packed* head;
  const int64_t* kept;             // [num_kept] the rows whose logits are wanted
  int64_t num_kept;
  void* logits;                    // [num_kept, num_logits], contiguous
  void* kept_hidden;               // [num_kept, hidden] the same rows behind the norm, or null
  int64_t num_logits;
  float eps;
  int32_t plus_one;
  int32_t head_size;
  int32_t element_bytes;
};

// Put a weight [outputs, inputs] where it belongs in a group's panels: `columns` (32, or 16 for the two halves of a gated
// panel) of it in each panel, from `first_column` on.
struct PackArgs {
  const void* weight;
  int64_t outputs, inputs, row_stride;
  uint32_t* data;
  int64_t first_panel;
  int32_t columns;
  int32_t first_column;
  int32_t element_bytes;
  int32_t form;
  int64_t group;
  float* scales;
};

// The same of a GGUF file's blocks, whose parts are apart: a code for each weight, and for each group of them scales.
struct PackGgufArgs {
  const uint8_t* codes;     // [outputs, inputs]
  const uint16_t* halves;   // float16 [outputs, groups]; nested [outputs, inputs / 256], or with minimums [.., 2]
  const uint8_t* scales;    // nested: [outputs, groups]
  const uint8_t* minimums;  // [outputs, groups], or null
  int64_t outputs, inputs;
  uint8_t* data;            // zeros
  const int64_t* places;    // of the group's panels
  int64_t first_panel;
  int32_t columns;
  int32_t first_column;
  int32_t kind;
};

// Panels of stored bf16 weights, compressed. `inputs` is a multiple of four.
struct CompressArgs {
  const uint32_t* stored;
  int64_t inputs, num_panels;
  uint8_t* data;
  uint8_t* palettes;
  uint32_t* counts;                 // of each panel's exceptions
  const uint32_t* first_exception;
  uint32_t* exceptions;             // each panel's list, or null: they are counted
};

// Rows of a weight that was packed alone: out[i] = weight[ids[i]].
struct LookupArgs {
  const Packed* weight;
  const int64_t* ids;
  void* out;
  int64_t rows;
};

// A number found in each row: by `best` the column of its highest value, the first of equal ones; by `broken` whether a
// value is no number, or the highest is infinite.
struct RowsArgs {
  const void* values;  // [rows, columns]
  int64_t rows, columns, row_stride;
  int64_t* found;  // [rows]
  int32_t element_bytes;
};

// How the token of one row is drawn. What is absent has the number 0.
struct SampleRow {
  const uint32_t* mask;  // or null: bit i of word w says whether token 32 w + i may follow
  const int64_t* forbidden;  // tokens that may not follow
  int64_t num_forbidden;
  const int64_t* biased;  // tokens, none twice
  const float* biases;
  int64_t num_biased;
  const int64_t* tokens;  // of the prompt and the output, none twice
  const int64_t* counts;  // how often each is in the output
  int64_t num_tokens;
  double presence, frequency;
  float repetition;
  float rate;  // log2(e) / temperature; 0: the best token
  int64_t top_k;
  double top_p, min_p;
  double uniform;  // the random number, in [0, 1)
};

// A token of each row.
struct SampleArgs {
  const void* logits;  // [rows, columns]
  int64_t rows, columns, row_stride;
  const SampleRow* each;  // [rows]
  int64_t* drawn;         // [rows]
  int32_t element_bytes;
};

// The likeliest tokens of each row, and the sum of its weights.
struct RankArgs {
  const void* logits;  // [rows, columns]
  int64_t rows, columns, row_stride;
  int64_t width;  // how many tokens
  float rate;     // as above
  float* values;  // [rows, width]
  int64_t* ids;   // [rows, width]
  int64_t* totals;
  int32_t element_bytes;
};

// Tokens through a layer that keeps a state. A run is `count` rows of a batch from `first` on, one token behind the other of
// one sequence, whose state is the one in `row` of the states, which are `row_stride` elements apart. The first `kept`
// tokens change it. The others are read into a copy, as nobody knows yet whether they come.
struct Run {
  int64_t row, first, count, kept;
};

// A depthwise convolution whose state is the last `length` inputs of each channel: at least `width`.
struct ConvolveArgs {
  void* state;  // [.., channels, length]
  const Run* runs;
  const void* x;  // [batch, channels]
  int64_t x_stride, x_channel_stride;
  const void* weight;  // [channels, width]
  const void* bias;    // [channels], or null
  void* out;           // [batch, channels]
  int64_t num_runs, channels, row_stride;
  int32_t width, length, has_silu, element_bytes;
};

// A delta rule with decay. All is contiguous.
struct DeltaArgs {
  float* state;  // [.., heads, keys, values]
  const Run* runs;
  const float *query, *key;  // [batch, key_heads, keys]: each for as many consecutive heads
  const float* value;        // [batch, heads, values]
  const float* decay;        // logarithms of it, [batch, heads], or [batch, heads, keys] with `has_key_decays`
  const float* beta;         // [batch, heads]
  float* out;                // [batch, heads, values]
  int64_t num_runs, heads, key_heads, keys, values, row_stride;
  int32_t is_normed, has_key_decays;
};

// A selective state space: state = state exp(step rate) + step x b, out = c state + skip x, times silu(gate).
struct SpaceArgs {
  void* state;  // [.., heads, parts, size]
  const Run* runs;
  const float* x;          // [batch, heads, parts]
  const float* steps;      // [batch, heads]
  const float* step_bias;  // [heads], or null
  const float* rates;      // [heads], or [heads, size] with `has_rates`
  const float *b, *c;      // [batch, groups, size]: each for as many consecutive heads
  const float* skip;       // [heads], or null
  const float* gate;       // [batch, heads, parts], or null
  float* out;              // [batch, heads, parts]
  int64_t num_runs, heads, parts, size, groups, row_stride;
  int32_t has_rates, has_softplus, element_bytes;  // of the state
};

// The functions of one instruction set.
struct Table {
  const char* name;
  void (*pack)(const PackArgs*);
  void (*pack_gguf)(const PackGgufArgs*);
  void (*compress)(const CompressArgs*);
  void (*linear)(const LinearArgs*);
  void (*experts)(const ExpertsArgs*);
  void (*lookup)(const LookupArgs*);
  void (*attention)(const AttentionArgs*);
  void (*write)(const WriteArgs*);
  void (*norm)(const NormArgs*);
  void (*rope)(const RopeArgs*);
  void (*best)(const RowsArgs*);
  void (*broken)(const RowsArgs*);
  void (*sample)(const SampleArgs*);
  void (*rank)(const RankArgs*);
  void (*convolve)(const ConvolveArgs*);
  void (*delta)(const DeltaArgs*);
  void (*space)(const SpaceArgs*);
  // One layer after the other, from x to out, from there to x, and so on.
  void (*layers)(const PagedLayer*, int64_t num_layers, const StepArgs*);
  void (*body)(const NativeModelArgs*, const StepArgs*);
  uint64_t (*read)(const void* data, int64_t bytes);  // all of it once, as fast as memory gives it; returns a mixture
};
