// The inner product of a few rows with a panel of 64 columns: what linear and attention's scores have in common.
// Each output element is one chain over K in ascending order whatever the tile's shape, so every shape gives the same
// bits; sums may rest in memory between two stretches of K, which loses nothing.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

// Rows and vectors of columns that fit into the registers at once.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTileVectors = 1;
#else
constexpr int kTileRows = 2, kTileVectors = 1;
#endif
constexpr int kPanelVectors = kPanel / kLanes;
constexpr int64_t kStretchBytes = 16384;  // of a panel, held in the first-level cache while several row tiles use them
constexpr int kShared = 2;                // cache lines a step that these tiles fetch of the next stretch

// How a panel holds its weights, what a row of x looks like to be multiplied with it, and what a sum is (in registers
// Sum, in memory Element).  One step of the chain takes kDepth elements of K.
template <class T>
struct Plain {  // [K][64]
  using Weight = T;
  using Row = float;
  using Sum = F;
  using Element = float;
  static constexpr int64_t kDepth = 1;
  TOKSERVE_INLINE static F load_weight(const T* w) { return load(w); }
  TOKSERVE_INLINE static F add(const float* x, F w, F sum) { return fma(fset(*x), w, sum); }
};

struct Pairs {  // [ceil(K / 2)][64][2]: two elements of K side by side
  using Weight = bf16;
  using Sum = F;
  using Element = float;
  static constexpr int64_t kDepth = 2;
  TOKSERVE_INLINE static I load_weight(const bf16* w) { return iload(reinterpret_cast<const uint32_t*>(w)); }
#if defined(__AVX512BF16__)
  using Row = bf16;
  TOKSERVE_INLINE static F add(const bf16* x, I w, F sum) {
    int pair;
    std::memcpy(&pair, x, sizeof pair);
    return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)), reinterpret_cast<__m512bh>(w.v))};
  }
#else
  using Row = float;
  TOKSERVE_INLINE static F add(const float* x, I w, F sum) {
    const F even = fma(fset(x[0]), as_float(shl<16>(w)), sum);
    return fma(fset(x[1]), as_float(w & iset(0xffff0000)), even);
  }
#endif
};

// The format of a floating element.
template <class T>
struct FormatOf {
  using Format = Plain<T>;
};
template <>
struct FormatOf<bf16> {
  using Format = Pairs;
};

TOKSERVE_INLINE void set_zero(F& sum) { sum = fzero(); }
TOKSERVE_INLINE void set_zero(I& sum) { sum = iset(0); }
TOKSERVE_INLINE void load_sum(const float* p, F& sum) { sum = load(p); }
TOKSERVE_INLINE void load_sum(const uint32_t* p, I& sum) { sum = iload(p); }
TOKSERVE_INLINE void store_sum(float* p, F sum) { store(p, sum); }
TOKSERVE_INLINE void store_sum(uint32_t* p, I sum) { istore(p, sum); }

// sums [ROWS][64] (+)= x [ROWS][K] times w, in VECTORS vectors of columns; `steps` steps of K.
// Meanwhile AHEAD cache lines a step are fetched from `ahead`, which will be needed soon.  They go to the second
// level: what the first would hold besides what is at work there, it would drop again before it is used.  A stream of
// several rows works on little, and slowly enough to gain from the first.
template <class Format, int ROWS, int VECTORS, int AHEAD>
TOKSERVE_INLINE void multiply_tile(const typename Format::Row* x, int64_t x_stride, const typename Format::Weight* w,
                                   int64_t steps, typename Format::Element* sums, bool begin, const char* ahead) {
  typename Format::Sum sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) {
      if (begin) set_zero(sum[r][v]);
      else load_sum(sums + r * kPanel + v * kLanes, sum[r][v]);
    }
  }
  for (int64_t step = 0; step < steps; step++) {
    decltype(Format::load_weight(w)) weight[VECTORS];
    for (int v = 0; v < VECTORS; v++) weight[v] = Format::load_weight(w + v * kLanes * Format::kDepth);
    for (int i = 0; i < AHEAD; i++) __builtin_prefetch(ahead + i * 64, 0, AHEAD > kShared && ROWS > 1 ? 3 : 2);
    ahead += AHEAD * 64;
    for (int r = 0; r < ROWS; r++) {
      for (int v = 0; v < VECTORS; v++) sum[r][v] = Format::add(x + r * x_stride, weight[v], sum[r][v]);
    }
    x += Format::kDepth;
    w += kPanel * Format::kDepth;
  }
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) store_sum(sums + r * kPanel + v * kLanes, sum[r][v]);
  }
}

template <class Format, int ROWS, int AHEAD>
void multiply_rows(const typename Format::Row* x, int64_t x_stride, const typename Format::Weight* w, int64_t steps,
                   typename Format::Element* sums, bool begin, const char* ahead) {
  constexpr int vectors = ROWS == 1 ? kPanelVectors : kTileVectors;  // one row: several chains at once hide latency
  for (int v = 0; v < kPanelVectors; v += vectors) {
    multiply_tile<Format, ROWS, vectors, AHEAD>(x, x_stride, w + v * kLanes * Format::kDepth, steps,
                                                sums + v * kLanes, begin, ahead);
  }
}

// The same for 1 <= rows <= kTileRows.
template <class Format, int AHEAD, int ROWS = kTileRows>
TOKSERVE_INLINE void multiply_up_to(int64_t rows, const typename Format::Row* x, int64_t x_stride,
                                    const typename Format::Weight* w, int64_t steps, typename Format::Element* sums,
                                    bool begin, const char* ahead) {
  if (rows == ROWS) multiply_rows<Format, ROWS, AHEAD>(x, x_stride, w, steps, sums, begin, ahead);
  else if constexpr (ROWS > 1) multiply_up_to<Format, AHEAD, ROWS - 1>(rows, x, x_stride, w, steps, sums, begin, ahead);
}

// sums [rows][64] = x times one panel of `padded` (a multiple of kDepth) elements of K.
template <class Format>
void multiply_panel(const typename Format::Row* x, int64_t stride, int64_t rows, const typename Format::Weight* panel,
                    int64_t padded, typename Format::Element* sums) {
  using Weight = typename Format::Weight;
  constexpr int64_t step_lines = kPanel * Format::kDepth * sizeof(Weight) / 64;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  if (tiles == 1) {  // a stream: each weight is used once, so fetch well ahead
    const char* ahead = reinterpret_cast<const char*>(panel) + 6144;
    return multiply_up_to<Format, step_lines>(rows, x, stride, panel, padded / Format::kDepth, sums, true, ahead);
  }
  constexpr int64_t stretch = kStretchBytes / (kPanel * sizeof(Weight));
  for (int64_t k = 0; k < padded; k += stretch) {
    const int64_t steps = least(stretch, padded - k) / Format::kDepth, lines = steps * step_lines;
    const Weight* now = panel + k * kPanel;
    const char* ahead = reinterpret_cast<const char*>(now) + lines * 64;
    for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
      const int64_t count = (rows - row) / (tiles - tile);  // tiles of nearly equal height
      const typename Format::Row* from = x + row * stride + k;
      const int64_t at = tile * kShared * steps;
      if (at < lines) multiply_up_to<Format, kShared>(count, from, stride, now, steps, sums + row * kPanel, k == 0, ahead + at * 64);
      else multiply_up_to<Format, 0>(count, from, stride, now, steps, sums + row * kPanel, k == 0, ahead);
      row += count;
    }
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
