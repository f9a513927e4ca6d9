// The inner product of a few rows with a panel of 64 columns: the common part of linear, linear_int8 and attention.
// Each output element is one chain over K in ascending order, whatever the shape of the tile, so every shape gives the
// same bits.  Sums may be stored and reloaded between two stretches of K, which is exact.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

// Rows and vectors of columns whose sums fit into the registers at once.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;
#elif defined(__AVX2__) || defined(TOKSERVE_NEON)
constexpr int kTileRows = 6, kTileVectors = 1;
#else
constexpr int kTileRows = 2, kTileVectors = 1;
#endif
constexpr int kPanelVectors = kPanel / kLanes;
constexpr int64_t kStretchBytes = 16384;  // of a panel: stays in the first-level cache while all row tiles use it
constexpr int64_t kWidenTiles = 3;  // from so many row tiles on, the first stores the weights widened for the rest
constexpr int kShared = 2;          // cache lines of the next stretch that a row tile prefetches per step

// A format says how a panel stores its weights, what a row of x looks like, and what a sum is: Sum in registers,
// Element in memory.  One step of the chain takes kDepth elements of K in kParts operations on each sum: the weights of
// one part fill one register per vector of columns.
template <class T>
struct Plain {  // [K][64]
  using Weight = T;
  using Row = float;
  using Sum = F;
  using Element = float;
  static constexpr int64_t kDepth = 1;
  static constexpr int kParts = 1;
  TOKSERVE_INLINE static F load_weight(const T* w, int) { return load(w); }
  TOKSERVE_INLINE static F add(const float* x, int, F w, F sum) { return fma(*x, w, sum); }
};

struct Pairs {  // [ceil(K / 2)][64][2]: two elements of K side by side
  using Weight = bf16;
  using Sum = F;
  using Element = float;
  static constexpr int64_t kDepth = 2;
#if defined(__AVX512BF16__)
  using Row = bf16;
  static constexpr int kParts = 1;
  TOKSERVE_INLINE static I load_weight(const bf16* w, int) { return iload(reinterpret_cast<const uint32_t*>(w)); }
  TOKSERVE_INLINE static F add(const bf16* x, int, I w, F sum) {
    int pair;
    std::memcpy(&pair, x, sizeof pair);
    return {
        _mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)), reinterpret_cast<__m512bh>(w.v))};
  }
#else
  using Row = float;
  static constexpr int kParts = 2;  // the first elements of the pairs, then the second: each part is float32
  TOKSERVE_INLINE static F load_weight(const bf16* w, int part) {
    const I pair = iload(reinterpret_cast<const uint32_t*>(w));
    return as_float(part == 0 ? shl<16>(pair) : pair & iset(0xffff0000));
  }
  TOKSERVE_INLINE static F add(const float* x, int part, F w, F sum) { return fma(x[part], w, sum); }
#endif
};

// The format of a floating-point element.
template <class T>
struct FormatOf {
  using Format = Plain<T>;
};
template <>
struct FormatOf<bf16> {
  using Format = Pairs;
};

// Whether a format multiplies float32 weights that it widens as it loads them.
template <class Format>
constexpr bool kWidens = false;
template <>
inline constexpr bool kWidens<Plain<f16>> = true;
template <>
inline constexpr bool kWidens<Pairs> = Pairs::kParts == 2;

// Elements of K times columns in a stretch; widened weights take twice the memory.
template <class Format>
constexpr int64_t kStretch =
    kStretchBytes / static_cast<int64_t>(kWidens<Format> ? sizeof(float) : sizeof(typename Format::Weight));

TOKSERVE_INLINE void set_zero(F& sum) { sum = fzero(); }
TOKSERVE_INLINE void set_zero(I& sum) { sum = iset(0); }
TOKSERVE_INLINE void load_sum(const float* p, F& sum) { sum = load(p); }
TOKSERVE_INLINE void load_sum(const uint32_t* p, I& sum) { sum = iload(p); }
TOKSERVE_INLINE void store_sum(float* p, F sum) { store(p, sum); }
TOKSERVE_INLINE void store_sum(uint32_t* p, I sum) { istore(p, sum); }

// sums [ROWS][64] (+)= x [ROWS][K] times w, in VECTORS vectors of columns; `steps` steps of K.
// Meanwhile it prefetches AHEAD cache lines a step from `ahead`, into the second level: the first level would evict
// them before their use.  A stream of several rows works on little data, slowly enough to profit from the first. With
// STORE, the weights as float32 go to `widened`, as Plain<float> reads them.
template <class Format, int ROWS, int VECTORS, int AHEAD, bool STORE>
TOKSERVE_INLINE void multiply_tile(const typename Format::Row* x, int64_t x_stride, const typename Format::Weight* w,
                                   int64_t steps, typename Format::Element* sums, bool begin, const char* ahead,
                                   [[maybe_unused]] float* widened) {
  typename Format::Sum sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) {
      if (begin) set_zero(sum[r][v]);
      else load_sum(sums + r * kPanel + v * kLanes, sum[r][v]);
    }
  }
  for (int64_t step = 0; step < steps; step++) {
    for (int i = 0; i < AHEAD; i++) __builtin_prefetch(ahead + i * 64, 0, AHEAD > kShared && ROWS > 1 ? 3 : 2);
    ahead += AHEAD * 64;
    for (int part = 0; part < Format::kParts; part++) {
      decltype(Format::load_weight(w, part)) weight[VECTORS];
      for (int v = 0; v < VECTORS; v++) weight[v] = Format::load_weight(w + v * kLanes * Format::kDepth, part);
      if constexpr (STORE) {
        for (int v = 0; v < VECTORS; v++) store(widened + v * kLanes, weight[v]);
        widened += kPanel;
      }
      for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < VECTORS; v++) sum[r][v] = Format::add(x + r * x_stride, part, weight[v], sum[r][v]);
      }
    }
    x += Format::kDepth;
    w += kPanel * Format::kDepth;
  }
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) store_sum(sums + r * kPanel + v * kLanes, sum[r][v]);
  }
}

template <class Format, int ROWS, int AHEAD, bool STORE>
void multiply_rows(const typename Format::Row* x, int64_t x_stride, const typename Format::Weight* w, int64_t steps,
                   typename Format::Element* sums, bool begin, const char* ahead, float* widened) {
  constexpr int vectors = ROWS == 1 ? kPanelVectors : kTileVectors;  // one row: several chains at once hide latency
  for (int v = 0; v < kPanelVectors; v += vectors) {
    multiply_tile<Format, ROWS, vectors, AHEAD, STORE>(x, x_stride, w + v * kLanes * Format::kDepth, steps,
                                                       sums + v * kLanes, begin, ahead, widened + v * kLanes);
  }
}

// The same for 1 <= rows <= kTileRows.
template <class Format, int AHEAD, bool STORE = false, int ROWS = kTileRows>
TOKSERVE_INLINE void multiply_up_to(int64_t rows, const typename Format::Row* x, int64_t x_stride,
                                    const typename Format::Weight* w, int64_t steps, typename Format::Element* sums,
                                    bool begin, const char* ahead, float* widened = nullptr) {
  if (rows == ROWS)
    return multiply_rows<Format, ROWS, AHEAD, STORE>(x, x_stride, w, steps, sums, begin, ahead, widened);
  if constexpr (ROWS > 1)
    multiply_up_to<Format, AHEAD, STORE, ROWS - 1>(rows, x, x_stride, w, steps, sums, begin, ahead, widened);
}

// sums [rows][64] = x times one panel of `padded` (a multiple of kDepth) elements of K.  `widened`, for formats that
// widen: scratch of kStretch<Plain<float>> floats, to widen a stretch once where several row tiles share it, or null.
template <class Format>
void multiply_panel(const typename Format::Row* x, int64_t stride, int64_t rows, const typename Format::Weight* panel,
                    int64_t padded, typename Format::Element* sums, [[maybe_unused]] float* widened) {
  constexpr int64_t step_lines = kPanel * Format::kDepth * sizeof(typename Format::Weight) / 64;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  if (tiles == 1) {  // a stream: each weight is used once, so prefetch well ahead
    const char* ahead = reinterpret_cast<const char*>(panel) + 6144;
    return multiply_up_to<Format, step_lines>(rows, x, stride, panel, padded / Format::kDepth, sums, true, ahead);
  }
  constexpr int64_t stretch = kStretch<Format> / kPanel;
  for (int64_t k = 0; k < padded; k += stretch) {
    const int64_t depth = least(stretch, padded - k), steps = depth / Format::kDepth, lines = steps * step_lines;
    const auto* now = panel + k * kPanel;
    const char* ahead =
        reinterpret_cast<const char*>(now) + lines * 64;  // the next stretch, shared out among the tiles
    for (int64_t tile = 0, row = 0, fetched = 0; tile < tiles; tile++) {
      const int64_t count = (rows - row) / (tiles - tile);  // tiles of nearly equal height
      const auto* from = x + row * stride + k;
      auto* to = sums + row * kPanel;
      const char* next = ahead + fetched * 64;
      row += count;
      if constexpr (kWidens<Format>) {
        if (widened && tiles >= kWidenTiles) {
          if (tile == 0)
            multiply_up_to<Format, kShared, true>(count, from, stride, now, steps, to, k == 0, next, widened);
          else if (fetched < lines)
            multiply_up_to<Plain<float>, 1>(count, from, stride, widened, depth, to, k == 0, next);
          else multiply_up_to<Plain<float>, 0>(count, from, stride, widened, depth, to, k == 0, next);
          fetched += tile == 0 ? kShared * steps : depth;
          continue;
        }
      }
      if (fetched < lines) multiply_up_to<Format, kShared>(count, from, stride, now, steps, to, k == 0, next);
      else multiply_up_to<Format, 0>(count, from, stride, now, steps, to, k == 0, next);
      fetched += kShared * steps;
    }
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
