// Linear layers with weights of 8 or 4 bits, part of linear.cpp.
//
// The inputs of a row become int8 in groups of 128, each with a scale. A group's products with the weights are summed in
// int32, exactly, so that these sums are the same on every instruction set; then they are scaled and added to the
// column's sum in float, group after group. Nothing depends on the rows beside a row.
//
// Weights are stored as codes without a sign: a weight is (code - kOffset) * scale. 8 bits have a scale for each column,
// 4 bits one for each column and group of 128, 64 or 32 inputs. A line has four inputs of the panel's 32 columns: with 8
// bits 128 bytes, with 4 bits 64, whose low nibbles are the first 16 columns.
#pragma once

constexpr int kGroup = 128, kGroupUnits = kGroup / 4;

template <int BITS> struct Codes {
  static constexpr int kOffset = 1 << (BITS - 1);
  static constexpr int kLineBytes = 16 * BITS;
};

INLINE uint32_t even_bytes(uint32_t inputs) {  // as int16
  return uint32_t(uint16_t(int16_t(int8_t(inputs)))) | uint32_t(int32_t(int8_t(inputs >> 16))) << 16;
}
INLINE uint32_t odd_bytes(uint32_t inputs) { return even_bytes(inputs >> 8); }

// Codes of 8 bits are multiplied as int16 on AVX2: products of bytes in pairs would not fit into 16 bits.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif
struct EvenAndOdd {
  static constexpr int count = 2;
  static INLINE void put(uint32_t unit, uint32_t* lines) {
    lines[0] = even_bytes(unit);
    lines[kLineRows] = odd_bytes(unit);
  }
};
template <int BITS> using CodeLines = std::conditional_t<kHasPairs && BITS == 8, EvenAndOdd, OneLine>;

#if defined(__AVX2__)
// A sum as it is, made before the next product: GCC takes integers in another order, and has no registers for them then.
INLINE __m256i in_register(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}
#endif

// sum + the products of four codes in each lane with four int8 inputs; with pairs, of two int16 with two.
INLINE i32xn dot(u32xn codes, u32xn inputs, i32xn sum) {
#if defined(__AVX512VNNI__)
  return (i32xn)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)inputs);
#elif defined(__AVX512BW__)
  const u32xn low = codes & 0x00ff00ffu, high = codes >> 8 & 0x00ff00ffu;
  const __m512i even = _mm512_set1_epi32(int(even_bytes(inputs[0])));  // all lanes have the same
  const __m512i odd = _mm512_set1_epi32(int(odd_bytes(inputs[0])));
  return sum + (i32xn)_mm512_add_epi32(_mm512_madd_epi16((__m512i)low, even), _mm512_madd_epi16((__m512i)high, odd));
#elif defined(__AVX2__)
  return (i32xn)in_register(_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)codes, (__m256i)inputs)));
#else
  const i32xn x = (i32xn)inputs;
  return sum + (i32xn)(codes & 0xff) * (x << 24 >> 24) + (i32xn)(codes >> 8 & 0xff) * (x << 16 >> 24) +
         (i32xn)(codes >> 16 & 0xff) * (x << 8 >> 24) + (i32xn)(codes >> 24) * (x >> 24);
#endif
}

// The codes of the line's vector `v`; with pairs of 8 bits the even ones or the odd ones, as int16.
template <int BITS> INLINE u32xn codes_at(const uint8_t* w, int half, int v) {
  const u32xn stored = *(const u32xn_any*)(w + v * kLanes * 4 % Codes<BITS>::kLineBytes);
  if constexpr (BITS == 4) return (v * kLanes < 16 ? stored : stored >> 4) & 0x0f0f0f0fu;
  return !kHasPairs ? stored : (half == 0 ? stored : stored >> 8) & 0x00ff00ffu;
}

// ---- the inputs as int8

// `summed`: of how many codes the sums are.
template <class T> void quantize_rows(std::vector<Chunk>& chunks, int summed) {
  const int num_sums = kGroup / summed;
  const int64_t inputs = chunks[0].a->weight->inputs;
  const int units = int((inputs + 3) / 4), groups = int((inputs + kGroup - 1) / kGroup);
  size_t rows = 0;
  for (const Chunk& chunk : chunks) rows += chunk.rows;
  QuantizedRows q{(int8_t*)pool::scratch(4, rows * units * 4), (float*)pool::scratch(5, rows * groups * 4),
                  (int32_t*)pool::scratch(6, rows * groups * num_sums * 4), units, groups};
  for (Chunk& chunk : chunks) {
    chunk.quantized = q;
    q.codes += int64_t(chunk.rows) * units * 4;
    q.scales += chunk.rows * groups;
    q.sums += chunk.rows * groups * num_sums;
  }
  run_tasks(chunks, [](const Chunk& chunk) { return chunk.rows; }, [&](const Chunk& chunk, int r) {
    const QuantizedRows& own = chunk.quantized;
    const T* x = row_of<T>(chunk, r);
    for (int g = 0; g < groups; g++) {
      const int left = int(inputs - int64_t(g) * kGroup);
      const int count = left < kGroup ? left : kGroup;
      int8_t* codes = own.codes + int64_t(r) * units * 4 + g * kGroup;
      int32_t* sums = own.sums + (r * groups + g) * num_sums;
      quantize_group(x + g * kGroup, count, (count + 3) / 4 * 4, codes, own.scales + r * groups + g, sums);
      for (int i = 0; i < count && num_sums > 1; i += summed) {
        int32_t total = 0;
        for (int j = i; j < std::min(i + summed, count); j++) total += codes[j];
        sums[i / summed] = total;
      }
    }
  });
}

// ---- a group of inputs of a block of rows, times one panel

struct GroupArgs {
  const uint8_t* w;
  const uint32_t* x;       // [units][lines of a unit][kLineRows]
  int units;
  const int32_t* sums;     // of the rows' codes, `sum_stride` apart
  const float* scales;     // of the rows, `stride` apart
  int sum_stride, stride;
  const float* columns;    // 4 bits: the weights' scales
  float* out;              // [rows, 32], added to
  bool fetches;            // what follows the group in memory
};

template <int BITS, int ROWS> void multiply_group(const GroupArgs& g) {
  constexpr int kTaken = vectors_at_once(ROWS), kLines = CodeLines<BITS>::count, kBytes = Codes<BITS>::kLineBytes;
  for (int first = 0; first < kVectors; first += kTaken) {
    i32xn sums[ROWS * kTaken];
    unroll<ROWS * kTaken>([&](int i) INLINED { sums[i] = i32xn{} - Codes<BITS>::kOffset * g.sums[i / kTaken * g.sum_stride]; });
    const uint8_t* w = g.w;
    const uint32_t* x = g.x;
    // Add the products of so many lines.
    auto add_lines = [&](int count, auto* to, const auto& add) INLINED {
      for (int u = 0; u < count; u++, w += kBytes, x += kLines * kLineRows) {
        if (g.fetches && first == 0) {
          for (int i = 0; i < kBytes; i += 64) prefetch_far(w + kAheadBytes + i);
        }
        auto weights = [&](int half, int v) INLINED { return codes_at<BITS>(w, half, first + v); };
        add_unit<kLines, ROWS, kTaken>(to, x, weights, add);
      }
    };
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (BITS == 4) {
      constexpr int kSummed = 8;  // lines whose products, of at most 15 * 127, fit into 16 bits together
      for (int u = 0; u < g.units; u += kSummed) {
        __m256i pairs[ROWS * kTaken];
        unroll<ROWS * kTaken>([&](int i) INLINED { pairs[i] = _mm256_setzero_si256(); });
        add_lines(std::min(kSummed, g.units - u), pairs, [](u32xn a, u32xn b, __m256i sum) INLINED {
          return in_register(_mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)a, (__m256i)b)));
        });
        unroll<ROWS * kTaken>([&](int i) INLINED {
          sums[i] += (i32xn)_mm256_madd_epi16(pairs[i], _mm256_set1_epi16(1));
        });
      }
    } else
#endif
      add_lines(g.units, sums, [](u32xn a, u32xn b, i32xn sum) INLINED { return dot(a, b, sum); });
    unroll<ROWS * kTaken>([&](int i) INLINED {
      const int r = i / kTaken, column = (first + i % kTaken) * kLanes;
      f32xn products = __builtin_convertvector(sums[i], f32xn) * g.scales[r * g.stride];
      if constexpr (BITS == 4) products *= *(const f32xn_any*)(g.columns + column);
      f32xn_any* out = (f32xn_any*)(g.out + r * kColumns + column);
      *out = *out + products;
    });
  }
}

using MultiplyGroup = void (*)(const GroupArgs&);
template <int BITS, int... ROWS> MultiplyGroup choose_group(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr MultiplyGroup table[] = {multiply_group<BITS, ROWS + 1>...};
  return table[rows - 1];
}

template <class T, int BITS> void quantized_panel(const Chunk& chunk, int64_t panel) {
  const QuantizedRows& q = chunk.quantized;
  const Input& input = chunk.input;
  const Packed& weight = *chunk.a->weight;
  alignas(64) float sums[kChunkRows * kColumns];
  const int rows = input.blocks.rows, count = input.blocks.count;
  memset(sums, 0, sizeof(float) * rows * kColumns);
  const uint8_t* w = (const uint8_t*)weight.data + panel * q.units * Codes<BITS>::kLineBytes;
  const int most_units = BITS == 4 ? int(weight.group / 4) : kGroupUnits, parts = kGroupUnits / most_units;
  const int groups = (q.units + most_units - 1) / most_units;
  const float* columns = weight.scales + panel * kColumns * (BITS == 4 ? groups : 1);
  for (int g = 0; g < groups; g++) {
    const int first = g * most_units, slice = first / input.most_slice_units();
    const int begin = (first - slice * input.most_slice_units()) * input.blocks.width;
    const int units = std::min(q.units - first, most_units), stride = q.groups * parts;
    for (int block = 0; block < count; block++) {
      const int row = input.blocks.first(block), size = input.blocks.size(block);
      const GroupArgs args{w, input.at(slice, block) + begin, units, q.sums + row * stride + g,
                           q.scales + row * q.groups + g / parts, stride, q.groups, columns,
                           sums + row * kColumns, block == 0};
      choose_group<BITS>(size, std::make_integer_sequence<int, kMaxBlockRows>())(args);
    }
    w += units * Codes<BITS>::kLineBytes;
    if (BITS == 4) columns += kColumns;
  }
  if (BITS == 8) {
    for (int r = 0; r < rows * kColumns; r += 16) store(sums + r, load(sums + r) * load(columns + r % kColumns));
  }
  finish<T>(chunk, panel, sums);
}

// How chunks are computed whose weights have BITS bits. Four codes of the input are packed like a float.
template <class T, int BITS> struct Quantized {
  static void pack(std::vector<Chunk>& chunks) {
    quantize_rows<T>(chunks, BITS == 4 ? int(chunks[0].a->weight->group) : kGroup);
    const int units = chunks[0].quantized.units;
    pack_inputs<float, CodeLines<BITS>>(chunks, units, [&](const Chunk& chunk, int64_t row) {
      return (const float*)chunk.quantized.codes + row * units;
    });
  }
  static void multiply(const Chunk& chunk, int64_t panel) { quantized_panel<T, BITS>(chunk, panel); }
};

// ---- the weights

INLINE int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

// The scale by which all weights are integers of so many bits, as those of a checkpoint that was quantised with such
// groups are; 0 if there is none. `most` is the weight of the largest magnitude: some integer is its code. Weights that
// were rounded to bf16 are nearly integers, and an 8-bit code cannot be told from its neighbours then.
template <class T, int BITS> float find_scale(const T* w, int64_t count, float most) {
  constexpr int kOffset = Codes<BITS>::kOffset;
  constexpr double kRounding = sizeof(T) == 2 ? 1.0 / 128 : 1.0 / (1 << 20);  // of a weight and of `most`, together
  constexpr double kMaxError = 0.07;
  for (int code = kOffset; code > 0; code--) {
    const double error = kRounding * code, inverse = -code / double(most);
    if (error > kMaxError) continue;
    double products = 0, squares = 0;  // of sums that are exact: the same on every instruction set
    int64_t i = 0;
    for (; i < count; i++) {
      const double v = scalar(w[i]), c = __builtin_nearbyint(v * inverse), off = v * inverse - c;
      if (c >= kOffset || off > error || off < -error) break;
      products += v * c;
      squares += c * c;
    }
    if (i == count) return float(products / squares);
  }
  return 0;
}

// The codes of a column's inputs [first, end), and their scale: those that the weights had in a quantised checkpoint, else
// the nearest. 8 bits: the largest is 127 or -127. 4 bits: the one of the largest magnitude becomes -8, whose like 8
// does not exist.
template <class T, int BITS> float quantize_weights(const T* w, int64_t count, uint8_t* codes) {
  float most = 0;
  for (int64_t i = 0; i < count; i++) {
    const float v = scalar(w[i]);
    if ((v < 0 ? -v : v) > (most < 0 ? -most : most)) most = v;
  }
  const bool is_finite = most - most == 0;
  float scale = most != 0 && is_finite ? find_scale<T, BITS>(w, count, most) : 0.0f;
  const bool is_found = scale != 0;
  if (!is_found) scale = BITS == 8 ? (most < 0 ? -most : most) / 127.0f : most / -8.0f;
  const float inverse = scale != 0 && 1 / scale - 1 / scale == 0 ? 1 / scale : 0.0f;
  constexpr int kOffset = Codes<BITS>::kOffset;
  for (int64_t i = 0; i < count; i++) {
    const int code = int(__builtin_nearbyintf(scalar(w[i]) * inverse));
    codes[i] = uint8_t(clamp(code, BITS == 8 && !is_found ? -127 : -kOffset, kOffset - 1) + kOffset);
  }
  return inverse != 0 ? scale : 0.0f;
}

// Where a weight's code is, and the nibble's shift.
template <int BITS> INLINE uint8_t* code_at(uint8_t* panel, int64_t input, int column) {
  uint8_t* line = panel + input / 4 * Codes<BITS>::kLineBytes;
  return line + (BITS == 8 ? column : column % 16) * 4 + input % 4;
}

template <class T, int BITS> void quantize_of(const PackArgs& a) {
  const int64_t units = (a.inputs + 3) / 4, groups = (a.inputs + a.group - 1) / a.group;
  pool::run(int((a.outputs + a.columns - 1) / a.columns), [&](int number) {
    const int64_t panel = a.first_panel + number;
    uint8_t* data = (uint8_t*)a.data + panel * units * Codes<BITS>::kLineBytes;
    uint8_t* codes = (uint8_t*)pool::scratch(4, size_t(a.inputs));
    for (int c = 0; c < a.columns; c++) {
      const int64_t output = int64_t(number) * a.columns + c;
      const int column = a.first_column + c;
      if (output >= a.outputs) break;
      const T* w = (const T*)a.weight + output * a.row_stride;
      if (BITS == 8) {
        a.scales[panel * kColumns + column] = quantize_weights<T, BITS>(w, a.inputs, codes);
      } else {
        for (int64_t g = 0; g < groups; g++) {
          const int64_t first = g * a.group;
          a.scales[(panel * groups + g) * kColumns + column] =
              quantize_weights<T, BITS>(w + first, std::min(a.inputs - first, a.group), codes + first);
        }
      }
      for (int64_t i = 0; i < a.inputs; i++) {
        uint8_t* at = code_at<BITS>(data, i, column);
        if (BITS == 8) *at = codes[i];
        else *at = uint8_t(column < 16 ? (*at & 0xf0) | codes[i] : (*at & 0x0f) | codes[i] << 4);
      }
    }
  });
}

template <class T, int BITS> void quantized_lookup_of(const LookupArgs& a) {
  const Packed& p = *a.weight;
  const int64_t units = (p.inputs + 3) / 4, groups = (p.inputs + p.group - 1) / p.group;
  pool::run(int(a.rows), [&](int row) {
    const int64_t panel = a.ids[row] / kColumns;
    const int column = int(a.ids[row] % kColumns);
    uint8_t* data = (uint8_t*)p.data + panel * units * Codes<BITS>::kLineBytes;
    const float* scales = p.scales + panel * kColumns * (BITS == 4 ? groups : 1) + column;
    T* out = (T*)a.out + row * p.inputs;
    for (int64_t i = 0; i < p.inputs; i += 16) {
      f32x16 v = {};
      const int count = int(p.inputs - i < 16 ? p.inputs - i : 16);
      for (int j = 0; j < count; j++) {
        const int code = *code_at<BITS>(data, i + j, column);
        v[j] = float((BITS == 8 ? code : column < 16 ? code & 15 : code >> 4) - Codes<BITS>::kOffset);
      }
      store_first(out + i, v * scales[BITS == 4 ? i / p.group * kColumns : 0], count);
    }
  });
}
