// Sixteen float lanes, the same on every instruction set, and the few operations that need to know which one.
//
// Every kernel is compiled once for each instruction set, into a namespace of that name (the macro ISA). The order
// of all sums is written out and floating-point contraction is off, so that a result depends on the operands and
// the instruction set alone.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of a lambda

namespace ISA {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef f32x16 f32x16_any __attribute__((aligned(4), may_alias));
typedef u32x16 u32x16_any __attribute__((aligned(4), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef u16x16 u16x16_any __attribute__((aligned(2), may_alias));

typedef uint16_t bf16;  // the upper half of a float

// Vectors as wide as the instruction set's own, for sums that are to stay in registers: GCC keeps wider ones in memory.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float f32xn __attribute__((vector_size(kLanes * 4)));
typedef int32_t i32xn __attribute__((vector_size(kLanes * 4)));
typedef uint32_t u32xn __attribute__((vector_size(kLanes * 4)));
typedef f32xn f32xn_any __attribute__((aligned(4), may_alias));
typedef u32xn u32xn_any __attribute__((aligned(4), may_alias));

// f(0), f(1) ... f(N - 1), written out: only then does GCC keep an array of sums in registers all along.
template <int N, class F> INLINE void unroll(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) { (f(i), ...); }(std::make_integer_sequence<int, N>());
}
// The same in large functions, where GCC makes a call of it otherwise. In the others it costs registers: up to a tenth.
template <int N, class F> INLINE void unroll_large(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) INLINED { (f(i), ...); }(std::make_integer_sequence<int, N>());
}

template <class V>
using PartOf = std::conditional_t<std::is_same_v<V, f32x16>, f32xn, std::conditional_t<std::is_same_v<V, i32x16>, i32xn, u32xn>>;
template <class V> union Parts {
  V whole;
  PartOf<V> part[16 / kLanes];
};
constexpr int kParts = 16 / kLanes;
// The whole of an array of parts. What a loop changes is such an array: GCC keeps wider vectors than the registers in
// memory, writes them in halves, and a read of what was written in halves has to wait.
template <class V> INLINE V joined(const PartOf<V>* parts) {
  Parts<V> v;
  unroll<kParts>([&](int i) INLINED { v.part[i] = parts[i]; });
  return v.whole;
}
// What `f` makes of vectors, part by part: comparisons of wide vectors are made lane by lane.
template <class R, class F, class... V> INLINE R by_parts_of(const F& f, const Parts<V>&... v) {
  Parts<R> out;
  unroll<16 / kLanes>([&](int i) INLINED { out.part[i] = f(v.part[i]...); });
  return out.whole;
}
template <class R = f32x16, class F, class... V> INLINE R by_parts(const F& f, V... v) {
  return by_parts_of<R>(f, Parts<V>{v}...);
}
template <class V> INLINE V select(i32x16 mask, V a, V b) {
  return by_parts<V>([](auto chosen, auto x, auto y) INLINED { return chosen ? x : y; }, mask, a, b);
}
INLINE i32x16 is_greater(f32x16 a, f32x16 b) {
  return by_parts<i32x16>([](f32xn x, f32xn y) INLINED { return (i32xn)(x > y); }, a, b);
}
INLINE f32x16 max(f32x16 a, f32x16 b) { return by_parts([](f32xn x, f32xn y) INLINED { return x > y ? x : y; }, a, b); }

INLINE f32x16 load(const float* p) { return *(const f32x16_any*)p; }
INLINE u32x16 load(const uint32_t* p) { return *(const u32x16_any*)p; }
INLINE void store(float* p, f32x16 v) { *(f32x16_any*)p = v; }
INLINE void store(uint32_t* p, u32x16 v) { *(u32x16_any*)p = v; }
INLINE f32x16 all(float x) { return f32x16{} + x; }
INLINE u32x16 all(uint32_t x) { return u32x16{} + x; }

INLINE f32x16 load(const bf16* p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  Parts<f32x16> v;
  for (int i = 0; i < 2; i++)
    v.part[i] = (f32xn)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + i)), 16);
  return v.whole;
#else
  return (f32x16)(__builtin_convertvector(*(const u16x16_any*)p, u32x16) << 16);
#endif
}

typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef i8x16 i8x16_any __attribute__((aligned(1), may_alias));

INLINE f32x16 load(const int8_t* p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  return __builtin_convertvector(__builtin_convertvector(*(const i8x16_any*)p, i32x16), f32x16);
#endif
}

// Integers of -128 to 127 as bytes.
INLINE i8x16 as_bytes(i32x16 v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const Parts<i32x16> ints{v};
  const __m256i mixed = _mm256_packs_epi32((__m256i)ints.part[0], (__m256i)ints.part[1]);
  const __m256i shorts = _mm256_permute4x64_epi64(mixed, 0xd8);
  return (i8x16)_mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
#else
  return __builtin_convertvector(v, i8x16);
#endif
}

// Float16 that are finite, and integers of 8 bits, as floats: exactly.
INLINE f32xn load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return (f32xn)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (f32xn)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  typedef uint16_t u16xn_any __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
  const u32xn bits = __builtin_convertvector(*(const u16xn_any*)p, u32xn);
  return (f32xn)((u32xn)((f32xn)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
#endif
}
template <class B> INLINE f32xn load_bytes(const B* p) {
#if defined(__AVX512F__)
  constexpr bool has_sign = std::is_same_v<B, int8_t>;
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return (f32xn)_mm512_cvtepi32_ps(has_sign ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  constexpr bool has_sign = std::is_same_v<B, int8_t>;
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
  return (f32xn)_mm256_cvtepi32_ps(has_sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  typedef B bytes_any __attribute__((vector_size(kLanes), aligned(1), may_alias));
  return __builtin_convertvector(*(const bytes_any*)p, f32xn);
#endif
}

// To the nearest bf16, ties to even; what is not a number stays one.
INLINE u32x16 bits_of_bf16(f32x16 v) {
  return by_parts<u32x16>([](f32xn x) INLINED {
    u32xn bits = (u32xn)x;
    u32xn rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x == x ? rounded : (bits >> 16) | 0x40;
  }, v);
}

INLINE void store(bf16* p, f32x16 v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const Parts<u32x16> bits{bits_of_bf16(v)};
  const __m256i mixed = _mm256_packus_epi32((__m256i)bits.part[0], (__m256i)bits.part[1]);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
#else
  *(u16x16_any*)p = __builtin_convertvector(bits_of_bf16(v), u16x16);
#endif
}

// What a value becomes when it is stored as T and loaded again.
template <class T> INLINE f32x16 rounded(f32x16 v);
template <> INLINE f32x16 rounded<float>(f32x16 v) { return v; }
template <> INLINE f32x16 rounded<bf16>(f32x16 v) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
#else
  return (f32x16)(bits_of_bf16(v) << 16);
#endif
}

INLINE float scalar(float x) { return x; }
INLINE float scalar(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// The first `count` (1 to 16) lanes of memory; the others are zero and their memory is not touched.
template <class T> INLINE f32x16 load_first(const T* p, int count) {
  T copy[16];
  if (count < 16) {  // a choice of memory: one of vectors goes through memory where they are wider than registers
    memset(copy, 0, sizeof copy);
    memcpy(copy, p, count * sizeof(T));
    p = copy;
  }
  return load(p);
}
template <class T> INLINE void store_first(T* p, f32x16 v, int count) {
  if (count >= 16) return store(p, v);
  T copy[16];
  store(copy, v);
  memcpy(p, copy, count * sizeof(T));
}

// a * b + c, rounded once where the instruction set can.
INLINE f32xn multiply_add(f32xn a, f32xn b, f32xn c) {
#if defined(__AVX512F__)
  return (f32xn)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (f32xn)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return by_parts(multiply_add, a, b, c); }

// Units are what kernels multiply: four bytes, either one float or two consecutive bf16.
template <class T> struct Unit;
template <> struct Unit<float> {
  static constexpr int width = 1;
};
template <> struct Unit<bf16> {
  static constexpr int width = 2;
};
template <class T> INLINE f32xn madd(u32xn a, u32xn b, f32xn c) {
  if constexpr (Unit<T>::width == 1) return multiply_add((f32xn)a, (f32xn)b, c);
#if defined(__AVX512BF16__)
  return (f32xn)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
  f32xn odd = multiply_add((f32xn)(a & 0xffff0000u), (f32xn)(b & 0xffff0000u), c);
  return multiply_add((f32xn)(a << 16), (f32xn)(b << 16), odd);
#endif
}

// Units at any address: a row of bf16 may begin between two of them.
INLINE u32x16 load_units(const void* p) {
  u32x16 v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Sixteen units of a row that has `left` elements more; zeros after its end, whose memory is not touched.
template <class T> INLINE u32x16 load_units(const T* row, int64_t left) {
  if (left >= 16 * Unit<T>::width) return load_units(row);
  T copy[16 * Unit<T>::width] = {};
  if (left > 0) memcpy(copy, row, left * sizeof(T));
  return load_units(copy);
}

// Sixteen units of T of a row that has `left` elements more. Elements are T, or int8, which T has exactly.
template <class T> INLINE u32x16 load_units_as(const T* row, int64_t left) { return load_units(row, left); }
template <class T> INLINE u32x16 load_units_as(const int8_t* row, int64_t left) {
  constexpr int count = 16 * Unit<T>::width;
  int8_t copy[count] = {};
  if (left < count) {
    if (left > 0) memcpy(copy, row, left);
    row = copy;
  }
  if constexpr (Unit<T>::width == 1) return (u32x16)load(row);
#if defined(__AVX512BF16__)
  return (u32x16)_mm512_cvtne2ps_pbh((__m512)load(row + 16), (__m512)load(row));
#else
  u16x16 pairs;
  memcpy(&pairs, row, sizeof pairs);
  const i32x16 both = __builtin_convertvector(pairs, i32x16);
  const f32x16 even = __builtin_convertvector(both << 24 >> 24, f32x16);
  const f32x16 odd = __builtin_convertvector(both << 16 >> 24, f32x16);
  return (u32x16)even >> 16 | (u32x16)odd;
#endif
}

INLINE float sum(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = v[i] + v[i + 8];
  for (int i = 0; i < 4; i++) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
#endif
}
INLINE float max(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
  const Parts<f32x16> parts{v};
  const __m256 eight = _mm256_max_ps((__m256)parts.part[0], (__m256)parts.part[1]);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float m = v[0];
  for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

INLINE int32_t sum(i32x16 v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const Parts<i32x16> parts{v};
  const __m256i eight = _mm256_add_epi32((__m256i)parts.part[0], (__m256i)parts.part[1]);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
#else
  int32_t total = 0;
  for (int i = 0; i < 16; i++) total += v[i];
  return total;
#endif
}

// e^x to about one unit in the last place; 0 below -87. The polynomial is the one of the Cephes library.
INLINE f32xn exp_part(f32xn x) {
  auto all = [](float c) INLINED { return f32xn{} + c; };
  f32xn above = x > -87.3f ? x : all(-87.3f), clamped = above < 88.3f ? above : all(88.3f);
  f32xn shifted = multiply_add(clamped, all(1.44269504f), all(12582912.0f));  // 1.5 * 2^23: the sum's low bits are the integer
  f32xn n = shifted - 12582912.0f;
  f32xn r = multiply_add(n, all(-0.693359375f), clamped);
  r = multiply_add(n, all(2.12194440e-4f), r);
  f32xn y = multiply_add(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
  y = multiply_add(y, r, all(8.3334519073e-3f));
  y = multiply_add(y, r, all(4.1665795894e-2f));
  y = multiply_add(y, r, all(1.6666665459e-1f));
  y = multiply_add(y, r, all(5.0000001201e-1f));
  y = multiply_add(y, r * r, r + 1.0f);
  f32xn scaled = (f32xn)((u32xn)y + (((u32xn)shifted - 0x4b400000) << 23));
  return x < -87.3f ? all(0.0f) : scaled;
}
INLINE f32x16 exp(f32x16 x) { return by_parts(exp_part, x); }

INLINE f32x16 tanh(f32x16 x) {
  return by_parts([](f32xn x) INLINED {
    auto all = [](float c) INLINED { return f32xn{} + c; };
    f32xn a = x > -x ? x : -x;
    f32xn e = exp_part(a * -2.0f);
    f32xn large = (1.0f - e) / (1.0f + e);
    f32xn square = x * x;  // near zero the difference above cancels
    f32xn small = a * multiply_add(square, multiply_add(square, all(0.13333334f), all(-0.33333334f)), all(1.0f));
    f32xn y = a < 0.03f ? small : large;
    return x < 0.0f ? -y : y;
  }, x);
}

// Rows become columns, in place: sixteen rows of sixteen units.
INLINE void transpose(u32x16 rows[16]) {
#if defined(__AVX512F__)
  __m512i* r = (__m512i*)rows;
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512i x = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), y = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    __m512i z = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88), w = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    r[i] = _mm512_shuffle_i32x4(x, z, 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(y, w, 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(x, z, 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(y, w, 0xdd);
  }
#elif defined(__AVX2__)
  // Squares of eight; the two off the diagonal change places.
  __m256i* half = (__m256i*)rows;  // [row][half]
  auto turn = [&](int row, int side, __m256i out[8]) INLINED {
    __m256i a[8], b[8];
    unroll<4>([&](int i) INLINED {
      const __m256i x = half[2 * (row + 2 * i) + side], y = half[2 * (row + 2 * i + 1) + side];
      a[2 * i] = _mm256_unpacklo_epi32(x, y);
      a[2 * i + 1] = _mm256_unpackhi_epi32(x, y);
    });
    unroll<2>([&](int i) INLINED {
      b[4 * i] = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
      b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
      b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
      b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    });
    unroll<4>([&](int i) INLINED {
      out[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
      out[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    });
  };
  __m256i squares[4][8];
  unroll<4>([&](int i) INLINED { turn(i / 2 * 8, i % 2, squares[i]); });
  for (int i = 0; i < 8; i++) {
    half[2 * i] = squares[0][i];
    half[2 * i + 1] = squares[2][i];
    half[2 * (i + 8)] = squares[1][i];
    half[2 * (i + 8) + 1] = squares[3][i];
  }
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < i; j++) {
      uint32_t x = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = x;
    }
#endif
}

// Into the first cache, or into the second for what is wanted later.
INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace ISA
