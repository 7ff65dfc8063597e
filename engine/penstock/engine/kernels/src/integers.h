// Numbers that become integers of 8 bits: the inputs of quantized weights, and K and V.
#pragma once
#include <algorithm>
#include <cstring>

#include "vec.h"

namespace ISA {
namespace {

// To the nearest integer, ties to even, of values below 2^22: the sum's low bits are the integer.
INLINE i32x16 nearest(f32x16 v) { return (i32x16)(v + 12582912.0f) - 0x4b400000; }

// A group of numbers as int8: codes that are multiplied by one scale. `room` codes are written, zeros behind `count`;
// `sum` is theirs. A group whose values are not all finite has a scale that is not a number, and with it all results
// that it is part of.
template <class T> void quantize_group(const T* x, int count, int room, int8_t* codes, float* scale, int32_t* sum) {
  f32xn most[kParts] = {}, broken[kParts] = {};
  for (int i = 0; i < count; i += 16) {
    const Parts<f32x16> v{load_first(x + i, count - i)};
    unroll<kParts>([&](int j) INLINED {
      const f32xn value = v.part[j], size = value > -value ? value : -value;
      most[j] = most[j] > size ? most[j] : size;
      broken[j] = value - value != 0.0f ? f32xn{} + 1.0f : broken[j];
    });
  }
  const bool is_broken = max(joined<f32x16>(broken)) > 0;
  const float top = max(joined<f32x16>(most)), inverse = top > 0 ? 127.0f / top : 0.0f;
  if (is_broken || !(inverse <= 3e38f)) {
    *scale = is_broken ? __builtin_nanf("") : 0.0f;  // else it is too small to be told from zero
    *sum = 0;
    memset(codes, 0, room);
    return;
  }
  *scale = top / 127.0f;
  i32xn total[kParts] = {};
  for (int i = 0; i < count; i += 16) {
    const Parts<i32x16> code{nearest(load_first(x + i, count - i) * inverse)};
    unroll<kParts>([&](int j) INLINED { total[j] += code.part[j]; });
    const i8x16 bytes = as_bytes(code.whole);
    if (room - i >= 16) memcpy(codes + i, &bytes, 16);
    else memcpy(codes + i, &bytes, room - i);
  }
  *sum = ISA::sum(joined<i32x16>(total));
}

}  // namespace
}  // namespace ISA
