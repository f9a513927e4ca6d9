// The product of a few rows of x with one panel of a packed weight, for linear and linear_int8; attention uses its
// formats. Each output element is one chain over K in ascending order, whatever the shape of the tile, so every shape
// gives the same bits.  Sums may be stored and reloaded between two blocks of K, which is exact.
//
// A packed weight [N][K] is a sequence of panels of 64 outputs (columns).  A panel is read front to back; one step has
// `depth` elements of K (1, 2 in bfloat16, 4 in int8) of every column:
//
//             | vector 0: columns 0 .. 15                | vector 1: 16 .. 31 | 2: 32 .. 47 | 3: 48 .. 63 |
//    step 0   | k 0 .. depth-1 | k 0 .. depth-1 |  ...   |        ...         |     ...     |     ...     |
//    step 1   | k depth ..     | k depth ..     |  ...   |        ...         |     ...     |     ...     |
//     ...     | zeros pad K to whole steps and N to whole panels                                          |
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
constexpr int64_t kDepthBlockBytes = 16384;  // of a panel: stays in the L1 cache while all row tiles use it
constexpr int64_t kWidenTiles = 3;  // from so many row tiles on, the first stores the weights widened for the others
constexpr int kSharedLines = 2;     // cache lines of the next block that a row tile prefetches per step, at most

// A format defines the element types of the panel (Weight), of a row of x (Row) and of a sum (Sum in registers, Element
// in memory).  One step of the chain takes kDepth elements of K in kParts operations on each sum; the weights of one
// part fill one register per vector of columns.
template <class T>
struct Plain {  // [K][64]
  using Weight = T;
  using Row = float;
  using Sum = f32x16;
  using Element = float;
  static constexpr int64_t kDepth = 1;
  static constexpr int kParts = 1;
  TOKSERVE_INLINE static f32x16 load_weight(const T* w, int) { return load(w); }
  TOKSERVE_INLINE static f32x16 add(const float* x, int, f32x16 w, f32x16 sum) { return fma(*x, w, sum); }
};

struct Pairs {  // [ceil(K / 2)][64][2]: pairs of elements of K
  using Weight = bf16;
  using Sum = f32x16;
  using Element = float;
  static constexpr int64_t kDepth = 2;
#if defined(__AVX512BF16__)
  using Row = bf16;
  static constexpr int kParts = 1;
  TOKSERVE_INLINE static u32x16 load_weight(const bf16* w, int) { return load(reinterpret_cast<const uint32_t*>(w)); }
  TOKSERVE_INLINE static f32x16 add(const bf16* x, int, u32x16 w, f32x16 sum) {
    int pair;
    std::memcpy(&pair, x, sizeof pair);
    return {
        _mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)), reinterpret_cast<__m512bh>(w.v))};
  }
#else
  using Row = float;
  static constexpr int kParts = 2;  // the first elements of the pairs, then the second: each part is float32
  TOKSERVE_INLINE static f32x16 load_weight(const bf16* w, int part) {
    const u32x16 pair = load(reinterpret_cast<const uint32_t*>(w));
    return as_f32(part == 0 ? shl<16>(pair) : pair & broadcast_u32(0xffff0000));
  }
  TOKSERVE_INLINE static f32x16 add(const float* x, int part, f32x16 w, f32x16 sum) { return fma(x[part], w, sum); }
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

// Whether a format widens its weights to float32 as it loads them.
template <class Format>
constexpr bool kWidens = false;
template <>
inline constexpr bool kWidens<Plain<f16>> = true;
template <>
inline constexpr bool kWidens<Pairs> = Pairs::kParts == 2;

// Elements of a panel in a block of K; widened weights take twice the memory.
template <class Format>
constexpr int64_t kDepthBlock =
    kDepthBlockBytes / static_cast<int64_t>(kWidens<Format> ? sizeof(float) : sizeof(typename Format::Weight));

TOKSERVE_INLINE void set_zero(f32x16& sum) { sum = zeros(); }
TOKSERVE_INLINE void set_zero(u32x16& sum) { sum = broadcast_u32(0); }
TOKSERVE_INLINE void load_sum(const float* p, f32x16& sum) { sum = load(p); }
TOKSERVE_INLINE void load_sum(const uint32_t* p, u32x16& sum) { sum = load(p); }
TOKSERVE_INLINE void store_sum(float* p, f32x16 sum) { store(p, sum); }
TOKSERVE_INLINE void store_sum(uint32_t* p, u32x16 sum) { store(p, sum); }

// sums [ROWS][64] (+)= x [ROWS][K] times w, in VECTORS vectors of columns; `steps` steps of K.
// Prefetches AHEAD cache lines a step from `ahead`, into L2: L1 would evict them before their use.  A stream of several
// rows works on little data, slowly enough to profit from L1.
// With STORE, writes the weights as float32 to `widened`, in the layout of Plain<float>.
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
    for (int i = 0; i < AHEAD; i++) __builtin_prefetch(ahead + i * 64, 0, AHEAD > kSharedLines && ROWS > 1 ? 3 : 2);
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

// One tile of 2 <= rows <= kTileRows where the registers hold the sums of fewer vectors than a panel has.  Vectors take
// turns on a block of K, which stays in the L1 cache, and each turn prefetches a part of the next block: memory is read
// while all of them are multiplied, and not during the first turn alone.
template <class Format, int ROWS = kTileRows>
void multiply_in_turns(int64_t rows, const typename Format::Row* x, int64_t stride,
                       const typename Format::Weight* panel, int64_t padded, typename Format::Element* sums) {
  if constexpr (ROWS > 2) {
    if (rows < ROWS) return multiply_in_turns<Format, ROWS - 1>(rows, x, stride, panel, padded, sums);
  }
  constexpr int64_t step_lines = kPanel * Format::kDepth * sizeof(typename Format::Weight) / 64;
  constexpr int64_t block = kDepthBlock<Format> / kPanel;
  constexpr int lines = step_lines * kTileVectors > kPanelVectors ? step_lines * kTileVectors / kPanelVectors : 1;
  for (int64_t k = 0; k < padded; k += block) {
    const int64_t steps = min(block, padded - k) / Format::kDepth;
    const auto* now = panel + k * kPanel;
    const char* ahead = reinterpret_cast<const char*>(now) + steps * step_lines * 64;
    for (int v = 0; v < kPanelVectors; v += kTileVectors, ahead += lines * steps * 64) {
      multiply_tile<Format, ROWS, kTileVectors, lines, false>(x + k, stride, now + v * kLanes * Format::kDepth, steps,
                                                              sums + v * kLanes, k == 0, ahead, nullptr);
    }
  }
}

// sums [rows][64] = x times one panel of `padded` (a multiple of kDepth) elements of K.  `widened`, for formats that
// widen: scratch of kDepthBlock<Plain<float>> floats, to widen a block once where several row tiles share it, or null.
template <class Format>
void multiply_panel(const typename Format::Row* x, int64_t stride, int64_t rows, const typename Format::Weight* panel,
                    int64_t padded, typename Format::Element* sums, [[maybe_unused]] float* widened) {
  constexpr int64_t step_lines = kPanel * Format::kDepth * sizeof(typename Format::Weight) / 64;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  if constexpr (kTileVectors < kPanelVectors && kTileRows > 1) {
    if (tiles == 1 && rows > 1) return multiply_in_turns<Format>(rows, x, stride, panel, padded, sums);
  }
  if (tiles == 1) {  // a stream: each weight is used once, so prefetch far ahead
    const char* ahead = reinterpret_cast<const char*>(panel) + 6144;
    return multiply_up_to<Format, step_lines>(rows, x, stride, panel, padded / Format::kDepth, sums, true, ahead);
  }
  constexpr int64_t block = kDepthBlock<Format> / kPanel;
  for (int64_t k = 0; k < padded; k += block) {
    const int64_t depth = min(block, padded - k), steps = depth / Format::kDepth, lines = steps * step_lines;
    const auto* now = panel + k * kPanel;
    const char* ahead = reinterpret_cast<const char*>(now) + lines * 64;  // the next block, divided among the tiles
    for (int64_t tile = 0, row = 0, fetched = 0; tile < tiles; tile++) {
      const int64_t count = (rows - row) / (tiles - tile);  // tiles of nearly equal height
      const auto* from = x + row * stride + k;
      auto* to = sums + row * kPanel;
      const char* next = ahead + fetched * 64;
      row += count;
      if constexpr (kWidens<Format>) {
        if (widened && tiles >= kWidenTiles) {
          if (tile == 0)
            multiply_up_to<Format, kSharedLines, true>(count, from, stride, now, steps, to, k == 0, next, widened);
          else if (fetched < lines)
            multiply_up_to<Plain<float>, 1>(count, from, stride, widened, depth, to, k == 0, next);
          else multiply_up_to<Plain<float>, 0>(count, from, stride, widened, depth, to, k == 0, next);
          fetched += tile == 0 ? kSharedLines * steps : depth;
          continue;
        }
      }
      const int64_t left = (tiles - tile) * steps;  // as evenly as whole lines a step allow
      const int64_t share = min<int64_t>(kSharedLines, (lines - fetched + left - 1) / left);
      if (share == 2) multiply_up_to<Format, 2>(count, from, stride, now, steps, to, k == 0, next);
      else if (share == 1) multiply_up_to<Format, 1>(count, from, stride, now, steps, to, k == 0, next);
      else multiply_up_to<Format, 0>(count, from, stride, now, steps, to, k == 0, next);
      fetched += share * steps;
    }
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
