// AMX tiles in plain C++, for processors without them: included before a kernel's source, it takes the intrinsics' place.
#pragma once
#include <immintrin.h>

#include <cstring>

namespace emulated {

inline thread_local float tiles[8][16][16];
inline thread_local int rows[8];

inline void configure(const void* config) {
  for (int tile = 0; tile < 8; tile++) rows[tile] = ((const unsigned char*)config)[48 + tile];
}

inline void load(int tile, const void* from, long stride) {
  for (int row = 0; row < rows[tile]; row++) memcpy(tiles[tile][row], (const char*)from + row * stride, 64);
}
inline void save(int tile, void* to, long stride) {
  for (int row = 0; row < rows[tile]; row++) memcpy((char*)to + row * stride, tiles[tile][row], 64);
}
// For each row, the products of even and of odd elements have sums of their own, in the order of k, which are added
// first; numbers below the normal ones are zeros.
inline void multiply(int sum, int a, int b) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  for (int row = 0; row < rows[sum]; row++) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int k = 0; k < 16; k++) {
      unsigned unit;
      memcpy(&unit, &tiles[a][row][k], 4);
      const __m512i units = _mm512_loadu_si512(tiles[b][k]), upper = _mm512_set1_epi32(int(0xffff0000));
      const __m512 low = (__m512)_mm512_set1_epi32(int(unit << 16)), high = (__m512)_mm512_set1_epi32(int(unit & 0xffff0000));
      even = _mm512_fmadd_ps(low, (__m512)_mm512_slli_epi32(units, 16), even);
      odd = _mm512_fmadd_ps(high, (__m512)_mm512_and_si512(units, upper), odd);
    }
    _mm512_storeu_ps(tiles[sum][row], _mm512_add_ps(_mm512_loadu_ps(tiles[sum][row]), _mm512_add_ps(even, odd)));
  }
  _mm_setcsr(before);
}

}  // namespace emulated

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_zero(t) memset(emulated::tiles[t], 0, 1024)
#define _tile_loadd(t, from, stride) emulated::load(t, from, stride)
#define _tile_stored(t, to, stride) emulated::save(t, to, stride)
#define _tile_dpbf16ps(sum, a, b) emulated::multiply(sum, a, b)
#define _tile_loadconfig(config) emulated::configure(config)
#define _tile_release() ((void)0)
