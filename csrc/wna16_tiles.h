// Products of a few rows of x with one panel of packed integer weights, as linear_wna16 adds them up: of weights that
// were unpacked into memory, or that are unpacked in registers.
#pragma once

#include "tile.h"
#include "unpack.h"
#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

// Rows whose totals are kept in registers beside a group's sums, if registers allow.
#if defined(__AVX512F__)
constexpr int kGroupRows = 4;
#else
constexpr int kGroupRows = kTileRows;
#endif

// f(ROWS) with 1 <= rows <= the largest ROWS as a constant.
template <int ROWS, class F>
TOKSERVE_INLINE void with_rows(int64_t rows, const F& f) {
  if (rows == ROWS) return f(std::integral_constant<int, ROWS>());
  if constexpr (ROWS > 1) with_rows<ROWS - 1>(rows, f);
}

// f(row, count) for tiles of nearly equal height, at most ROWS.
template <int ROWS, class F>
TOKSERVE_INLINE void for_tiles(int64_t rows, const F& f) {
  const int64_t tiles = (rows + ROWS - 1) / ROWS;
  for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
    const int64_t count = (rows - row) / (tiles - tile);
    f(row, count);
    row += count;
  }
}

// What the sums of consecutive groups are multiplied by, and what is added for them.
struct GroupTerms {
  const float* scales;    // [groups][64]
  const float* mins;      // [groups][64], or null
  const float* row_sums;  // of the groups' x, rows row_stride apart
  int64_t row_stride;

  TOKSERVE_INLINE GroupTerms at(int64_t row, int64_t group) const {
    return {scales + group * kPanel, mins ? mins + group * kPanel : nullptr, row_sums + row * row_stride + group,
            row_stride};
  }
  // The total of a row and sixteen columns after the first group, whose sum is `sum`.
  TOKSERVE_INLINE f32x16 add(int64_t row, int64_t column, f32x16 sum, f32x16 total) const {
    total = fma(load(scales + column), sum, total);
    return mins ? fma(row_sums[row * row_stride], load(mins + column), total) : total;
  }
  // The same of a tile from column `first` on, whose totals are in memory.
  template <int ROWS, int VECTORS>
  TOKSERVE_INLINE void add_to(int64_t first, const f32x16 (&sum)[ROWS][VECTORS], float* totals) const {
    for (int r = 0; r < ROWS; r++) {
      for (int v = 0; v < VECTORS; v++) {
        const int64_t column = first + v * kLanes;
        float* to = totals + r * kPanel + column;
        store(to, add(r, column, sum[r][v], load(to)));
      }
    }
  }
};

template <int ROWS, int VECTORS>
TOKSERVE_INLINE void load_tile(const float* from, f32x16 (&tile)[ROWS][VECTORS]) {
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) tile[r][v] = load(from + r * kPanel + v * kLanes);
  }
}
template <int ROWS, int VECTORS>
TOKSERVE_INLINE void store_tile(const f32x16 (&tile)[ROWS][VECTORS], float* to) {
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) store(to + r * kPanel + v * kLanes, tile[r][v]);
  }
}
template <int ROWS, int VECTORS>
TOKSERVE_INLINE void set_zero(f32x16 (&tile)[ROWS][VECTORS]) {
  for (auto& row : tile) {
    for (auto& sum : row) sum = zeros();
  }
}

// sum += x [ROWS][K] times w, `steps` steps of K.
template <class Format, int ROWS, int VECTORS>
TOKSERVE_INLINE void add_products(const typename Format::Row* x, int64_t x_stride, const typename Format::Weight* w,
                                  int64_t steps, f32x16 (&sum)[ROWS][VECTORS]) {
  for (int64_t step = 0; step < steps; step++) {
    for (int part = 0; part < Format::kParts; part++) {
      decltype(Format::load_weight(w, part)) weight[VECTORS];
      for (int v = 0; v < VECTORS; v++) weight[v] = Format::load_weight(w + v * kLanes * Format::kDepth, part);
      for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < VECTORS; v++) sum[r][v] = Format::add(x + r * x_stride, part, weight[v], sum[r][v]);
      }
    }
    x += Format::kDepth;
    w += kPanel * Format::kDepth;
  }
}

// A tile of sums times `ratios` [64], or zeros if there are none.
template <int ROWS, int VECTORS>
TOKSERVE_INLINE void load_scaled(const float* sums, const float* ratios, f32x16 (&tile)[ROWS][VECTORS]) {
  if (!ratios) return set_zero(tile);
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) tile[r][v] = load(sums + r * kPanel + v * kLanes) * load(ratios + v * kLanes);
  }
}

template <int ROWS>
constexpr int kVectorsOf = ROWS == 1 ? kPanelVectors : kTileVectors;

// sums [ROWS][64] += x [ROWS][K] times w, `depth` elements of K in groups of `group`, each scaled.
template <class Format, int ROWS>
[[gnu::noinline]] void add_groups(const typename Format::Row* x, int64_t x_stride, const typename Format::Weight* w,
                                  int64_t depth, int64_t group, float* sums, const GroupTerms& terms) {
  for (int64_t first = 0; first < kPanel; first += kVectorsOf<ROWS> * kLanes) {
    f32x16 total[ROWS][kVectorsOf<ROWS>], sum[ROWS][kVectorsOf<ROWS>];
    load_tile(sums + first, total);
    for (int64_t k = 0, g = 0; k < depth; k += group, g++) {
      set_zero(sum);
      add_products<Format>(x + k, x_stride, w + k * kPanel + first * Format::kDepth,
                           min(group, depth - k) / Format::kDepth, sum);
      const GroupTerms now = terms.at(0, g);
      for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < kVectorsOf<ROWS>; v++) total[r][v] = now.add(r, first + v * kLanes, sum[r][v], total[r][v]);
      }
    }
    store_tile(total, sums + first);
  }
}

// Vectors of columns whose sums, for so many rows, fit into the registers beside what unpacks weights.
template <int ROWS>
constexpr int kUnpackingVectors = kTileVectors == kPanelVectors || ROWS == 1 ? kPanelVectors
                                  : ROWS <= 3                                ? 2
                                                                             : 1;

// sum += x [ROWS][K] times `depth` elements of K of a panel, a multiple of kCodeDepth, in columns from `first` on: each
// vector is unpacked in registers, once for all rows.
template <class Format, int ROWS, int VECTORS, class Reader>
TOKSERVE_INLINE void add_packed(const typename Format::Row* x, int64_t x_stride, const uint8_t* panel,
                                const Reader& reader, int64_t depth, int64_t first, f32x16 (&sum)[ROWS][VECTORS]) {
  for (int64_t k = 0; k < depth; k += kCodeDepth) {
    for (int v = 0; v < VECTORS; v++) {
      reader.read(panel, first + v * kLanes, [&](int i, auto weight) {
        for (int r = 0; r < ROWS; r++) sum[r][v] = Format::add(x + r * x_stride + i, 0, weight, sum[r][v]);
      });
    }
    x += kCodeDepth;
    panel += kPanel * kCodeDepth * Reader::kBits / 8;
  }
}

// add_groups of a packed panel.  Inlined into a larger function, sums would not stay in registers.
template <class Format, int ROWS, class Reader>
[[gnu::noinline]] void add_packed_groups(const typename Format::Row* x, int64_t x_stride, const uint8_t* panel,
                                         const Reader& reader, int64_t depth, int64_t group, float* sums,
                                         const GroupTerms& terms) {
  constexpr int vectors = kUnpackingVectors<ROWS>;
  for (int64_t first = 0; first < kPanel; first += vectors * kLanes) {
    for (int64_t k = 0, g = 0; k < depth; k += group, g++) {
      f32x16 sum[ROWS][vectors];
      set_zero(sum);
      add_packed<Format>(x + k, x_stride, panel + k * kPanel * Reader::kBits / 8, reader, min(group, depth - k), first,
                         sum);
      terms.at(0, g).add_to(first, sum, sums);  // the registers do not hold totals as well
    }
  }
}

// sums [ROWS][64], times `ratios` [64] (null: from zero on), += x [ROWS][K] times `depth` elements of K of a panel.
template <class Format, int ROWS, class Reader>
[[gnu::noinline]] void continue_chain(const typename Format::Row* x, int64_t x_stride, const uint8_t* panel,
                                      const Reader& reader, int64_t depth, float* sums, const float* ratios) {
  constexpr int vectors = kUnpackingVectors<ROWS>;
  for (int64_t first = 0; first < kPanel; first += vectors * kLanes) {
    f32x16 sum[ROWS][vectors];
    load_scaled(sums + first, ratios ? ratios + first : nullptr, sum);
    add_packed<Format>(x, x_stride, panel, reader, depth, first, sum);
    store_tile(sum, sums + first);
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
