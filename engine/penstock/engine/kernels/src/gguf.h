// Linear layers whose weights are those of a GGUF file's blocks, part of linear.cpp.
//
// A weight is scale * (code - kOffset) - minimum, in groups of 16 or 32 inputs. A scale is a float16, or one of 8 bits
// times a float16 (nested), and so is a minimum: nothing of it is rounded again. Inputs become int8 as in quantized.h. A
// group's products are summed in int32, exactly; they are scaled and added in float, group after group, and what 128
// inputs gave is multiplied by the inputs' scale. Nothing depends on the rows beside a row.
//
// A panel has a block for each 128 inputs: the scales of its groups, 32 columns each (nested: first the float16 of all of
// them; behind the scales, in the same way, the minimums), then the codes in pairs of lines. A line has four inputs of 32
// columns: 128 bytes, or 64 whose low nibbles are the first 16 columns. With 6 bits the upper two of both lines follow in
// 64 bytes: from the lowest on those of the first line's columns 0-15, of its columns 16-31, and of the second's.
//
// The panels of a group of layers may be of several kinds. A kind is a number of `GgufKind`.
#pragma once

template <int BITS, int GROUP, int OFFSET, bool IS_NESTED, bool HAS_MINIMUMS> struct GgufForm {
  static constexpr int kBits = BITS, kGroupUnits = GROUP / 4, kOffset = OFFSET, kPairBytes = 32 * BITS;
  static constexpr bool kIsNested = IS_NESTED, kHasMinimums = HAS_MINIMUMS;
  static constexpr int kSuper = 256;  // inputs of one float16, if nested
  static constexpr int scale_bytes(int units) { return IS_NESTED ? 64 + 32 * (units / kGroupUnits) : 64 * (units / kGroupUnits); }
  static constexpr int header_bytes(int units) { return scale_bytes(units) * (1 + HAS_MINIMUMS); }
  static constexpr int64_t block_bytes(int units) { return header_bytes(units) + units / 2 * kPairBytes; }
};

// Call `act` with the form of a kind.
template <class A> auto with_gguf_form(int kind, const A& act) {
  switch (kind) {
    case kQ4_0: return act(GgufForm<4, 32, 8, false, false>());
    case kQ5_0: return act(GgufForm<6, 32, 16, false, false>());
    case kQ4_K: return act(GgufForm<4, 32, 0, true, true>());
    case kQ5_K: return act(GgufForm<6, 32, 0, true, true>());
    case kQ6_K: return act(GgufForm<6, 16, 32, true, false>());
    default: return act(GgufForm<8, 32, 128, false, false>());
  }
}

// ---- 128 inputs of a block of rows, times one panel

struct BlockArgs {
  const uint8_t* w;      // the block
  const uint32_t* x;     // [units][kLineRows]
  int units;
  const int32_t* sums;   // of each 16 of the rows' codes, `stride` * 8 apart
  const float* scales;   // of the rows, `stride` apart
  int stride;
  float* out;            // [rows, 32], added to
  bool fetches;          // what follows in memory
};

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kHasSigns = true;  // codes of 8 bits get their sign back: as bytes without one, their products do not fit
#else
constexpr bool kHasSigns = false;
#endif

// The codes of vector `v` of a pair's line.
template <class F> INLINE u32xn gguf_codes_at(const uint8_t* pair, int line, int v) {
  const int at = v * kLanes * 4 % 64, right = v * kLanes / 16;
  if constexpr (F::kBits == 8) {
    const u32xn codes = *(const u32xn_any*)(pair + line * 128 + v * kLanes * 4);
    return kHasSigns ? codes ^ 0x80808080u : codes;
  }
  const u32xn both = *(const u32xn_any*)(pair + line * 64 + at);
  const u32xn low = (right ? both >> 4 : both) & 0x0f0f0f0fu;
  if constexpr (F::kBits == 4) return low;
  const u32xn all = *(const u32xn_any*)(pair + 128 + at);
  const int field = 2 * line + right;
  return low | ((field == 0 ? all << 4 : field == 1 ? all << 2 : field == 2 ? all : all >> 2) & 0x30303030u);
}

// The scales of vector `v` of a group, or with `part` 1 its minimums. Both products are exact.
template <class F> INLINE f32xn gguf_scales_at(const uint8_t* w, int units, int group, int v, int part = 0) {
  const uint8_t* from = w + part * F::scale_bytes(units);
  const int column = v * kLanes;
  if constexpr (!F::kIsNested) return load_halves((const uint16_t*)from + group * kColumns + column);
  const uint8_t* small = from + 64 + group * kColumns + column;
  return load_halves((const uint16_t*)from + column) * (F::kOffset ? load_bytes((const int8_t*)small) : load_bytes(small));
}

template <class F, int ROWS> void multiply_gguf_block(const BlockArgs& g) {
  constexpr int kTaken = vectors_at_once(ROWS), kPairs = F::kGroupUnits / 2, kParts = F::kGroupUnits / 4;
  constexpr int kOffset = kHasSigns && F::kBits == 8 ? 0 : F::kOffset, kSums = ROWS * kTaken;
  constexpr int kChains = kSums <= 4 ? 2 : 1;  // of few rows each line of a pair has sums of its own: they wait for less
  if (g.fetches) {
    for (int i = 0; i < F::header_bytes(g.units); i += 64) prefetch_far(g.w + kAheadBytes + i);
  }
  for (int first = 0; first < kVectors; first += kTaken) {
    f32xn totals[kSums];
    unroll_large<kSums>([&](int i) INLINED { totals[i] = f32xn{}; });
    const uint8_t* w = g.w + F::header_bytes(g.units);
    const uint32_t* x = g.x;
    const int32_t* codes = g.sums;  // of the group's inputs
    // Add the products of so many pairs of lines.
    auto add_pairs = [&](int count, auto* to, const auto& add) INLINED {
      for (int p = 0; p < count; p++, w += F::kPairBytes, x += 2 * kLineRows) {
        if (g.fetches && first == 0) {
          for (int i = 0; i < F::kPairBytes; i += 64) prefetch_far(w + kAheadBytes + i);
        }
        unroll_large<2>([&](int line) INLINED {
          auto weights = [&](int, int v) INLINED { return gguf_codes_at<F>(w, line, first + v); };
          add_unit<1, ROWS, kTaken>(to + line % kChains * kSums, x + line * kLineRows, weights, add);
        });
      }
    };
    for (int group = 0; group < g.units / F::kGroupUnits; group++, codes += kParts) {
      int32_t given[ROWS];
      unroll_large<ROWS>([&](int r) INLINED {
        const int32_t* own = codes + r * g.stride * 8;
        given[r] = kParts == 1 ? own[0] : own[0] + own[1];
      });
      i32xn sums[kChains * kSums];
      unroll_large<kChains * kSums>([&](int i) INLINED { sums[i] = i32xn{} - (i < kSums ? kOffset * given[i / kTaken] : 0); });
#if defined(__AVX2__) && !defined(__AVX512F__)
      const __m256i ones = _mm256_set1_epi16(1);
      if constexpr (F::kBits == 8) {
        add_pairs(kPairs, sums, [&](u32xn a, u32xn b, i32xn sum) INLINED {
          const __m256i products =
              _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)a), _mm256_sign_epi8((__m256i)b, (__m256i)a));
          return (i32xn)in_register(_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(products, ones)));
        });
      } else {
        constexpr int kSummed = F::kBits == 4 ? kPairs : 1;  // pairs whose products fit into 16 bits together
        for (int p = 0; p < kPairs; p += kSummed) {
          __m256i pairs[kChains * kSums];
          unroll_large<kChains * kSums>([&](int i) INLINED { pairs[i] = _mm256_setzero_si256(); });
          add_pairs(kSummed, pairs, [](u32xn a, u32xn b, __m256i sum) INLINED {
            return in_register(_mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)a, (__m256i)b)));
          });
          unroll_large<kChains * kSums>([&](int i) INLINED { sums[i] += (i32xn)_mm256_madd_epi16(pairs[i], ones); });
        }
      }
#else
      add_pairs(kPairs, sums, [](u32xn a, u32xn b, i32xn sum) INLINED { return dot(a, b, sum); });
#endif
      if constexpr (kChains == 2) unroll_large<kSums>([&](int i) INLINED { sums[i] += sums[i + kSums]; });
      unroll_large<kTaken>([&](int v) INLINED {
        const f32xn scale = gguf_scales_at<F>(g.w, g.units, group, first + v);
        unroll_large<ROWS>([&](int r) INLINED {
          const f32xn products = __builtin_convertvector(sums[r * kTaken + v], f32xn);
          totals[r * kTaken + v] = multiply_add(products, scale, totals[r * kTaken + v]);
        });
        if constexpr (F::kHasMinimums) {
          const f32xn minimum = -gguf_scales_at<F>(g.w, g.units, group, first + v, 1);
          unroll_large<ROWS>([&](int r) INLINED {
            totals[r * kTaken + v] = multiply_add(minimum, f32xn{} + float(given[r]), totals[r * kTaken + v]);
          });
        }
      });
    }
    unroll_large<kSums>([&](int i) INLINED {
      f32xn_any* out = (f32xn_any*)(g.out + i / kTaken * kColumns + (first + i % kTaken) * kLanes);
      *out = *out + totals[i] * g.scales[i / kTaken * g.stride];
    });
  }
}

using MultiplyBlock = void (*)(const BlockArgs&);
template <class F, int... ROWS> MultiplyBlock choose_gguf_block(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr MultiplyBlock table[] = {multiply_gguf_block<F, ROWS + 1>...};
  return table[rows - 1];
}

template <class F> void multiply_gguf_panel(const Chunk& chunk, const uint8_t* w, float* sums) {
  const QuantizedRows& q = chunk.quantized;
  const Input& input = chunk.input;
  for (int g = 0; g < q.groups; g++) {
    const int first = g * kGroupUnits, slice = first / input.most_slice_units();
    const int begin = (first - slice * input.most_slice_units()) * input.blocks.width;
    const int units = std::min(q.units - first, kGroupUnits);
    for (int block = 0; block < input.blocks.count; block++) {
      const int row = input.blocks.first(block);
      const BlockArgs args{w, input.at(slice, block) + begin, units,
                           q.sums + (row * q.groups + g) * 8, q.scales + row * q.groups + g, q.groups,
                           sums + row * kColumns, block == 0};
      choose_gguf_block<F>(input.blocks.size(block), std::make_integer_sequence<int, kMaxBlockRows>())(args);
    }
    w += F::block_bytes(units);
  }
}

// How chunks are computed whose weights are a file's blocks.
template <class T> struct FromGguf {
  static void pack(std::vector<Chunk>& chunks) {
    quantize_rows<T>(chunks, 16);
    const int units = chunks[0].quantized.units;
    pack_inputs<float, OneLine>(chunks, units, [&](const Chunk& chunk, int64_t row) {
      return (const float*)chunk.quantized.codes + row * units;
    });
  }
  static void multiply(const Chunk& chunk, int64_t panel) {
    const Packed& p = *chunk.a->weight;
    alignas(64) float sums[kChunkRows * kColumns];
    memset(sums, 0, sizeof(float) * chunk.rows * kColumns);
    with_gguf_form(p.kinds[panel], [&](auto form) {
      multiply_gguf_panel<decltype(form)>(chunk, (const uint8_t*)p.data + p.places[panel], sums);
    });
    finish<T>(chunk, panel, sums);
  }
};

// ---- the weights

// Where the bits of one code are in a block, behind its scales.
template <class F> struct CodePlace {
  uint8_t *low, *high;
  int low_shift, high_shift;
  CodePlace(uint8_t* codes, int input, int column) {
    const int line = input / 4 % 2, at = column % 16 * 4 + input % 4;
    uint8_t* pair = codes + input / 8 * F::kPairBytes;
    low = F::kBits == 8 ? pair + line * 128 + column * 4 + input % 4 : pair + line * 64 + at;
    low_shift = F::kBits == 8 ? 0 : column / 16 * 4;
    high = pair + 128 + at;
    high_shift = 2 * (2 * line + column / 16);
  }
  void write(int code) const {  // where there are zeros
    *low |= uint8_t((F::kBits == 8 ? code : code & 15) << low_shift);
    if (F::kBits == 6) *high |= uint8_t(code >> 4 << high_shift);
  }
  int read() const {
    if (F::kBits == 8) return *low;
    return (*low >> low_shift & 15) | (F::kBits == 6 ? (*high >> high_shift & 3) << 4 : 0);
  }
};

template <class F> void pack_gguf_of(const PackGgufArgs& a) {
  constexpr int kInputs = F::kGroupUnits * 4, kNumParts = 1 + F::kHasMinimums;
  const int64_t groups = a.inputs / kInputs;
  pool::run(int((a.outputs + a.columns - 1) / a.columns), [&](int number) {
    for (int c = 0; c < a.columns; c++) {
      const int64_t output = int64_t(number) * a.columns + c;
      const int column = a.first_column + c;
      if (output >= a.outputs) break;
      uint8_t* w = a.data + a.places[a.first_panel + number];
      const uint8_t* codes = a.codes + output * a.inputs;
      for (int64_t first = 0; first < a.inputs; first += kGroup) {
        const int units = int(std::min<int64_t>(a.inputs - first, kGroup)) / 4;
        for (int part = 0; part < kNumParts; part++) {
          uint8_t* scales = w + part * F::scale_bytes(units);
          uint16_t* halves = (uint16_t*)scales + column;
          const uint8_t* small = (part ? a.minimums : a.scales) + output * groups + first / kInputs;
          if (F::kIsNested) *halves = a.halves[(output * (a.inputs / F::kSuper) + first / F::kSuper) * kNumParts + part];
          for (int i = 0; i < units / F::kGroupUnits; i++) {
            if (F::kIsNested) scales[64 + i * kColumns + column] = small[i];
            else halves[i * kColumns] = a.halves[output * groups + first / kInputs + i];
          }
        }
        for (int i = 0; i < units * 4; i++) CodePlace<F>(w + F::header_bytes(units), i, column).write(codes[first + i]);
        w += F::block_bytes(units);
      }
    }
  });
}

template <class T> void gguf_lookup_of(const LookupArgs& a) {
  const Packed& p = *a.weight;
  pool::run(int(a.rows), [&](int row) {
    const int64_t panel = a.ids[row] / kColumns;
    const int column = int(a.ids[row] % kColumns), v = column / kLanes, lane = column % kLanes;
    T* out = (T*)a.out + row * p.inputs;
    with_gguf_form(p.kinds[panel], [&](auto form) {
      using F = decltype(form);
      uint8_t* w = (uint8_t*)p.data + p.places[panel];
      for (int64_t first = 0; first < p.inputs; first += kGroup) {
        const int units = int(std::min<int64_t>(p.inputs - first, kGroup)) / 4;
        for (int i = 0; i < units * 4; i += 16) {
          const int group = i / 4 / F::kGroupUnits;
          const float scale = gguf_scales_at<F>(w, units, group, v)[lane];
          const float minimum = F::kHasMinimums ? gguf_scales_at<F>(w, units, group, v, 1)[lane] : 0.0f;
          f32x16 values;
          for (int j = 0; j < 16; j++) {
            values[j] = float(CodePlace<F>(w + F::header_bytes(units), i + j, column).read() - F::kOffset);
          }
          values = values * scale;
          store(out + first + i, F::kHasMinimums ? values - minimum : values);
        }
        w += F::block_bytes(units);
      }
    });
  });
}
