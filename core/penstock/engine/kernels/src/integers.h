// Numbers that become integers of 8 bits: the inputs of quantized weights, and K and V.
#pragma once
#include <algorithm>
#include <cstring>

#include "vec.h"

namespace ISA {
namespace {

INLINE f32x16 as_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }

// To the nearest integer, ties to even, of values below 2^22: the sum's low bits are the integer.
INLINE i32x16 nearest(f32x16 v) { return (i32x16)(v + 12582912.0f) - 0x4b400000; }

// A group of numbers as int8: codes that are multiplied by one scale. `room` codes are written, zeros behind `count`;
// `sum` is theirs. A group whose values are not all finite has a scale that is not a number, and with it all results
// that it is part of.
template <class T> void quantize_group(const T* x, int count, int room, int8_t* codes, float* scale, int32_t* sum) {
  f32x16 most = {}, broken = {};
  for (int i = 0; i < count; i += 16) {
    const f32x16 v = load_first(x + i, count - i);
    most = max(most, max(v, -v));
    broken = by_parts([](f32xn x, f32xn found) INLINED { return x - x != 0.0f ? f32xn{} + 1.0f : found; }, v, broken);
  }
  const float top = max(most), inverse = top > 0 ? 127.0f / top : 0.0f;
  if (max(broken) > 0 || !(inverse <= 3e38f)) {
    *scale = max(broken) > 0 ? __builtin_nanf("") : 0.0f;  // else it is too small to be told from zero
    *sum = 0;
    memset(codes, 0, room);
    return;
  }
  *scale = top / 127.0f;
  i32x16 total = {};
  for (int i = 0; i < count; i += 16) {
    const i32x16 code = nearest(load_first(x + i, count - i) * inverse);
    total += code;
    const i8x16 bytes = __builtin_convertvector(code, i8x16);
    memcpy(codes + i, &bytes, std::min(room - i, 16));
  }
  *sum = 0;
  for (int j = 0; j < 16; j++) *sum += total[j];
}

}  // namespace
}  // namespace ISA
