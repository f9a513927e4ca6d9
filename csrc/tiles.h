// AMX tile registers, twice: the processor's instructions, and software tiles that define their bits. A tile has up to
// 16 rows of 64 bytes. Registers are template arguments because the instructions encode them. The instructions are
// written as assembly: GCC 12's intrinsics are assembly too, but their loads do not declare that they read memory, and
// the compiler may move a store to that memory behind them.
#pragma once

#include "vec.h"

#if defined(__AVX512F__)

namespace tokserve {
namespace TOKSERVE_ISA {

// The operand of ldtilecfg.
struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64);

#if defined(__AMX_BF16__)
struct HardwareTiles {
  ~HardwareTiles() { asm volatile("tilerelease" ::: "memory"); }
  TOKSERVE_INLINE void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  template <int T>
  TOKSERVE_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  TOKSERVE_INLINE void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  TOKSERVE_INLINE void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  TOKSERVE_INLINE void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};
#endif

using Tile = uint32_t[16][16];

// TDPBF16PS as its operation is written in Intel's Software Developer's Manual, volume 2. For each row m and column n:
//   even = odd = 0
//   for each pair k:  even = fma(a[m][2k], b[k][2n], even);  odd = fma(a[m][2k + 1], b[k][2n + 1], odd)
//   c[m][n] = c[m][n] + (even + odd)
// in float32, every operation rounded to nearest even, denormal operands taken as zero, denormal results flushed to
// zero, whatever MXCSR says. Here MXCSR is set to do just that. The assembly keeps the arithmetic between the two
// settings, because the tiles are memory that a caller passed.
[[gnu::noinline]] inline void multiply_in_software(Tile& c, const Tile& a, const Tile& b, int rows) {
  const uint32_t flush = 0x9fc0;  // FTZ, DAZ, no exception trapped, nearest even
  uint32_t before;
  asm volatile("stmxcsr %0" : "=m"(before));
  asm volatile("ldmxcsr %0" ::"m"(flush) : "memory");
  for (int m = 0; m < rows; m++) {
    f32x16 even = zeros(), odd = zeros();
    for (int k = 0; k < 16; k++) {
      const u32x16 x = broadcast_u32(a[m][k]), w = load(b[k]);
      even = fma(as_f32(shl<16>(x)), as_f32(shl<16>(w)), even);
      odd = fma(as_f32(x & broadcast_u32(0xffff0000)), as_f32(w & broadcast_u32(0xffff0000)), odd);
    }
    store(c[m], as_u32(as_f32(load(c[m])) + (even + odd)));
  }
  asm volatile("ldmxcsr %0" ::"m"(before) : "memory");
}

struct SoftwareTiles {
  TileShapes shapes;
  alignas(64) Tile tiles[8];

  void configure(const TileShapes& to) {
    shapes = to;
    std::memset(tiles, 0, sizeof tiles);
  }
  template <int T>
  void zero() {
    std::memset(tiles[T], 0, sizeof tiles[T]);
  }
  template <int T>
  void load(const void* p, int64_t stride) {
    zero<T>();
    for (int r = 0; r < shapes.rows[T]; r++)
      std::memcpy(tiles[T][r], static_cast<const char*>(p) + r * stride, shapes.row_bytes[T]);
  }
  template <int T>
  void store(void* p, int64_t stride) {
    for (int r = 0; r < shapes.rows[T]; r++)
      std::memcpy(static_cast<char*>(p) + r * stride, tiles[T][r], shapes.row_bytes[T]);
  }
  template <int C, int A, int B>
  void multiply() {
    multiply_in_software(tiles[C], tiles[A], tiles[B], shapes.rows[C]);
  }
};

}  // namespace TOKSERVE_ISA
}  // namespace tokserve

#endif
