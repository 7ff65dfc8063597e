// The processor's tiles (AMX, bf16), of 16 rows of 16 units. A row's sums depend on that row alone, but they are added
// in another order than by vectors: over 16 units, even and odd elements apart.
#pragma once
#include <cstdint>

#include "vec.h"

namespace ISA {
namespace {

constexpr int kRowsOfTile = 16;

#if defined(__AMX_BF16__)

constexpr bool kHasTiles = true;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Gives the thread its tiles, if they are used, until this ends. Tiles 0 to 4 have so many rows, 5 to 7 have 16.
class TileScope {
 public:
  explicit TileScope(bool is_used, int rows = kRowsOfTile) : is_used_(is_used) {
    if (!is_used) return;
    TileConfig config;
    for (int i = 0; i < 5; i++) config.rows[i] = uint8_t(rows);
    _tile_loadconfig(&config);
  }
  ~TileScope() {
    if (is_used_) _tile_release();
  }

 private:
  const bool is_used_;
};

// Lets the thread's vectors take numbers below the normal ones as zeros until this ends, as tiles do.
class FlushScope {
 public:
  explicit FlushScope(bool is_used) : is_used_(is_used), before_(_mm_getcsr()) {
    if (is_used) _mm_setcsr(before_ | kFlushesResults | kFlushesInputs);
  }
  ~FlushScope() {
    if (is_used_) _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kFlushesResults = 0x8000, kFlushesInputs = 0x40;
  const bool is_used_;
  const unsigned before_;
};

#else

constexpr bool kHasTiles = false;

struct TileScope {
  explicit TileScope(bool, int = 0) {}
};
struct FlushScope {
  explicit FlushScope(bool) {}
};

#endif

}  // namespace
}  // namespace ISA
