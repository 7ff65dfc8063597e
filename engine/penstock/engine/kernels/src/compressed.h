// Linear layers with bf16 weights in 12 bits, without loss; part of linear.cpp.
//
// The high bytes of weights, sign and seven bits of the exponent, are few: a panel has a palette of 16, and a weight is its
// low byte and a nibble. A pair of units, 64 weights each, is 192 bytes: 64 with the nibbles (the low ones of the first
// unit), 64 low bytes of the first unit and 64 of the second. A weight whose high byte is not in the palette is in the
// panel's list of exceptions: pair << 16 | byte of the pair's 256 bytes << 8 | high byte, in order, with ~0 at the end.
//
// In its 64 bytes a unit's weight k (0 or 1) of column c is at c % 16 / 4 * 16 + c / 16 * 8 + c % 4 * 2 + k: there the
// instructions that interleave bytes, 16 at a time, find it.
//
// Weights are decoded into the lines that they were packed from, and multiplied as those are: the same bits.
#pragma once

constexpr int kPairBytes = 192;

INLINE int place_of(int column, int k) { return column % 16 / 4 * 16 + column / 16 * 8 + column % 4 * 2 + k; }

#if defined(__AVX512BW__)
struct Palette {
  __m512i table;
  explicit Palette(const uint8_t* bytes) : table(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes))) {}

  // The lines of a unit of the pair at `w`: the first 16 columns, and the others.
  INLINE void decode_unit(const uint8_t* w, int unit, u32x16& left, u32x16& right) const {
    const __m512i nibbles = _mm512_loadu_si512(w), bytes = _mm512_loadu_si512(w + 64 + 64 * unit);
    const __m512i index = _mm512_and_si512(unit ? _mm512_srli_epi16(nibbles, 4) : nibbles, _mm512_set1_epi8(15));
    const __m512i high = _mm512_shuffle_epi8(table, index);
    left = (u32x16)_mm512_unpacklo_epi8(bytes, high);
    right = (u32x16)_mm512_unpackhi_epi8(bytes, high);
  }
  INLINE void decode_to(const uint8_t* w, uint32_t* lines) const {
    for (int unit = 0; unit < 2; unit++, lines += 32) {
      u32x16 left, right;
      decode_unit(w, unit, left, right);
      store(lines, left);
      store(lines + 16, right);
    }
  }
};
#elif defined(__AVX2__)
struct Palette {
  __m256i table;
  explicit Palette(const uint8_t* bytes) : table(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes))) {}

  INLINE void decode_to(const uint8_t* w, uint32_t* lines) const {
    const __m256i low = _mm256_set1_epi8(15);
    for (int part = 0; part < 2; part++, w += 32) {
      const __m256i nibbles = _mm256_loadu_si256((const __m256i*)w);
      for (int unit = 0; unit < 2; unit++) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)(w + 64 + 64 * unit));
        const __m256i index = _mm256_and_si256(unit ? _mm256_srli_epi16(nibbles, 4) : nibbles, low);
        const __m256i high = _mm256_shuffle_epi8(table, index);
        uint32_t* line = lines + 32 * unit + 8 * part;
        _mm256_storeu_si256((__m256i*)line, _mm256_unpacklo_epi8(bytes, high));
        _mm256_storeu_si256((__m256i*)(line + 16), _mm256_unpackhi_epi8(bytes, high));
      }
    }
  }
};
#else
struct Palette {
  const uint8_t* table;
  explicit Palette(const uint8_t* bytes) : table(bytes) {}

  INLINE void decode_to(const uint8_t* w, uint32_t* lines) const {
    for (int unit = 0; unit < 2; unit++) {
      for (int column = 0; column < kColumns; column++) {
        uint32_t both = 0;
        for (int k = 0; k < 2; k++) {
          const int at = place_of(column, k);
          both |= uint32_t(table[w[at] >> 4 * unit & 15] << 8 | w[64 + 64 * unit + at]) << 16 * k;
        }
        lines[32 * unit + column] = both;
      }
    }
  }
};
#endif

struct CompressedPanel {
  const uint8_t* w;
  Palette palette;
  const uint32_t* exception;  // the next one
  int pair;                   // at `w`

  CompressedPanel(const Packed& p, int64_t panel)
      : w((const uint8_t*)p.data + panel * (p.inputs / 4) * kPairBytes),
        palette(p.palettes + panel * 16), exception(p.exceptions + p.first_exception[panel]), pair(0) {}

  // Decode the next `count` pairs, 64 units of memory each.
  void decode(int count, uint32_t* lines) {
    const int first = pair;
    for (int i = 0; i < count; i++, w += kPairBytes) {
      for (int at = 0; at < kPairBytes; at += 64) prefetch_far(w + kAheadBytes + at);
      palette.decode_to(w, lines + 64 * i);
    }
    pair += count;
    for (; int(*exception >> 16) < pair; exception++) {
      ((uint8_t*)(lines + (int(*exception >> 16) - first) * 64))[*exception >> 8 & 255] = uint8_t(*exception);
    }
  }
};

#if defined(__AVX512BW__)
// Decoded within the product. As `multiply`, of pairs of units; ONCE: the block is the only one of its panel.
template <int ROWS, bool ONCE>
void multiply_compressed(CompressedPanel& panel, const uint32_t* x, int units, bool begins, float* c, Ahead ahead) {
  const Palette palette = panel.palette;
  const uint8_t* w = panel.w;
  const uint32_t* exception = panel.exception;
  f32x16 left[ROWS], right[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    left[r] = begins ? f32x16{} : load(c + r * kColumns);
    right[r] = begins ? f32x16{} : load(c + r * kColumns + 16);
  }
  auto add_unit = [&](u32x16 a, u32x16 b) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const u32x16 both = all(x[r]);
      left[r] = madd<bf16>(a, both, left[r]);
      right[r] = madd<bf16>(b, both, right[r]);
    }
    x += 16;
  };
  const int end = panel.pair + units / 2;
  int pair = panel.pair;
  for (;;) {
    const int next = int(*exception >> 16), stop = next < end ? next : end;
    for (; pair < stop; pair++, w += kPairBytes) {
      if (ONCE) {
        for (int at = 0; at < kPairBytes; at += 64) prefetch_far(w + kAheadBytes + at);
      } else {
        for (int at = 0; at < ahead.step; at += 64) prefetch(ahead.address + at);
        ahead.address += ahead.step;
      }
#pragma GCC unroll 2
      for (int unit = 0; unit < 2; unit++) {  // one after the other: more lines at a time would not fit into registers
        u32x16 a, b;
        palette.decode_unit(w, unit, a, b);
        add_unit(a, b);
      }
    }
    if (pair == end) break;
    alignas(64) uint32_t lines[64];
    palette.decode_to(w, lines);
    for (; int(*exception >> 16) == pair; exception++) {
      ((uint8_t*)lines)[*exception >> 8 & 255] = uint8_t(*exception);
    }
    add_unit(load(lines), load(lines + 16));
    add_unit(load(lines + 32), load(lines + 48));
    pair++;
    w += kPairBytes;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    store(c + r * kColumns, left[r]);
    store(c + r * kColumns + 16, right[r]);
  }
  panel.w = w;
  panel.exception = exception;
  panel.pair = pair;
}

using MultiplyCompressed = void (*)(CompressedPanel&, const uint32_t*, int, bool, float*, Ahead);
template <bool ONCE, int... ROWS>
MultiplyCompressed choose_compressed(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr MultiplyCompressed table[] = {multiply_compressed<ROWS + 1, ONCE>...};
  return table[rows - 1];
}

// Each block of rows decodes the slice anew: a decoded slice would fill a cache that the inputs need.
void multiply_slice(CompressedPanel& panel, const Input& input, int slice, float* sums) {
  const int units = input.slice_units(slice), count = input.blocks.count;
  const std::make_integer_sequence<int, kMaxBlockRows> all_rows;
  if (count == 1) {
    choose_compressed<true>(input.blocks.rows, all_rows)(panel, input.at(slice, 0), units, slice == 0, sums, {});
    return;
  }
  const CompressedPanel begun = panel;
  const int64_t bytes = int64_t(units) / 2 * kPairBytes;
  for (int block = 0; block < count; block++) {
    panel = begun;
    // The first blocks fetch what follows, a share each: the three lines of the cache that a pair has are shared by three.
    const int shares = count < 3 ? count : 3;
    const Ahead ahead{(const char*)begun.w + bytes + bytes * block / shares, block < shares ? kPairBytes / shares : 0};
    choose_compressed<false>(input.blocks.size(block), all_rows)(
        panel, input.at(slice, block), units, slice == 0, sums + input.blocks.first(block) * kColumns, ahead);
  }
}
#endif

void compressed_panel(const Chunk& chunk, int64_t number) {
  alignas(64) float sums[kChunkRows * kColumns];
  const Input& input = chunk.input;
  CompressedPanel panel(*chunk.a->weight, number);
  const TileScope scope(input.blocks.tiles);
  for (int slice = 0; slice < input.num_slices(); slice++) {
#if defined(__AVX512BW__)
    if (!input.blocks.tiles) {
      multiply_slice(panel, input, slice, sums);
      continue;
    }
#endif
    alignas(64) uint32_t lines[kSliceUnits * kColumns];
    panel.decode(input.slice_units(slice) / 2, lines);
    for (int block = 0; block < input.blocks.count; block++) {
      multiply_block<bf16>(lines, input, slice, block, sums, Ahead{(const char*)lines, 0});
    }
  }
  finish<bf16>(chunk, number, sums);
}

// How chunks are computed whose weights are compressed.
struct Compressed {
  static void pack(std::vector<Chunk>& chunks) { Stored<bf16>::pack(chunks); }
  static void multiply(const Chunk& chunk, int64_t panel) { compressed_panel(chunk, panel); }
};

// ---- the weights

// The 16 most frequent high bytes of a panel, the most frequent first, and of equal ones the lowest.
inline void choose_palette(const uint32_t* lines, int64_t units, uint8_t* palette) {
  uint32_t counts[256] = {};
  for (int64_t i = 0; i < units * kColumns; i++) {
    counts[lines[i] >> 8 & 255]++;
    counts[lines[i] >> 24]++;
  }
  for (int i = 0; i < 16; i++) {
    int best = 0;
    for (int byte = 1; byte < 256; byte++) best = counts[byte] > counts[best] ? byte : best;
    palette[i] = uint8_t(best);
    counts[best] = 0;
  }
}

// Compress panels of stored bf16. Without room for exceptions they are counted; otherwise they are written where
// `first_exception` says.
void compress_panels(const CompressArgs& a) {
  const int64_t units = a.inputs / 2;
  pool::run(int(a.num_panels), [&](int panel) {
    const uint32_t* lines = a.stored + panel * units * kColumns;
    uint8_t *out = a.data + panel * (units / 2) * kPairBytes, *palette = a.palettes + panel * 16;
    if (!a.exceptions) choose_palette(lines, units, palette);
    uint8_t index[256];
    memset(index, 255, sizeof index);
    for (int i = 15; i >= 0; i--) index[palette[i]] = uint8_t(i);
    uint32_t* exception = a.exceptions ? a.exceptions + a.first_exception[panel] : nullptr;
    uint32_t count = 0;
    for (int64_t pair = 0; pair < units / 2; pair++, lines += 2 * kColumns, out += kPairBytes) {
      uint8_t nibbles[64] = {};
      for (int unit = 0; unit < 2; unit++) {
        for (int column = 0; column < kColumns; column++) {
          for (int k = 0; k < 2; k++) {
            const uint32_t weight = lines[unit * kColumns + column] >> 16 * k & 0xffff;
            const int at = place_of(column, k), number = index[weight >> 8];
            if (number == 255) {
              const int byte = unit * 128 + column * 4 + k * 2 + 1;
              if (exception) exception[count] = uint32_t(pair) << 16 | uint32_t(byte) << 8 | weight >> 8;
              count++;
            }
            nibbles[at] |= uint8_t((number & 15) << 4 * unit);
            out[64 + 64 * unit + at] = uint8_t(weight);
          }
        }
      }
      memcpy(out, nibbles, 64);
    }
    if (exception) exception[count] = ~0u;
    else a.counts[panel] = count;
  });
}

void compressed_lookup(const LookupArgs& a) {
  const Packed& p = *a.weight;
  const int64_t pairs = p.inputs / 4;
  pool::run(int(a.rows), [&](int row) {
    const int64_t panel = a.ids[row] / kColumns;
    const int column = int(a.ids[row] % kColumns);
    const uint8_t *w = (const uint8_t*)p.data + panel * pairs * kPairBytes, *palette = p.palettes + panel * 16;
    bf16* out = (bf16*)a.out + row * p.inputs;
    for (int64_t pair = 0; pair < pairs; pair++, w += kPairBytes) {
      for (int unit = 0; unit < 2; unit++) {
        for (int k = 0; k < 2; k++) {
          const int at = place_of(column, k);
          out[pair * 4 + unit * 2 + k] = bf16(palette[w[at] >> 4 * unit & 15] << 8 | w[64 + 64 * unit + at]);
        }
      }
    }
    for (const uint32_t* e = p.exceptions + p.first_exception[panel]; *e != ~0u; e++) {
      const int byte = *e >> 8 & 255;
      if (byte % 128 / 4 != column) continue;
      bf16& weight = out[(*e >> 16) * 4 + byte / 128 * 2 + byte % 4 / 2];
      weight = bf16((weight & 255) | (*e & 255) << 8);
    }
  });
}
