// The two products of attention on one block of keys: scores = Q K^T and acc += P V, read from KV pages in place.
#pragma once

#include "pages.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// Stores sixteen softmax weights as the product takes them; returns the values that the product computes with.
[[maybe_unused]] TOKSERVE_INLINE f32x16 store_probs(float* to, f32x16 probs) {
  store(to, probs);
  return probs;
}
#if defined(__AVX512BF16__)
TOKSERVE_INLINE f32x16 store_probs(bf16* to, f32x16 probs) {
  const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(probs.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
#endif

// Addresses of a block's keys, or of its values: a pointer per vector of sixteen positions, laid out as in pages.h.
template <class T>
struct KvVectors {
  const T* vector[kKeyBlock / kLanes];
  int64_t step;  // elements from one step of the product to the next
};

// scores [ROWS][64] = queries [ROWS][steps * depth] times the keys of VECTORS vectors from `vector` on.
// Pages are scattered, so hardware prefetching does not reach the next ones: the same vectors of `ahead`, where given,
// are prefetched here.
template <class Format, int ROWS, int VECTORS, class T>
TOKSERVE_INLINE void score(const typename Format::Row* queries, int64_t stride, const KvVectors<T>& keys, int vector,
                           int64_t steps, float* scores, const KvVectors<T>* ahead) {
  f32x16 sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) sum[r][v] = zeros();
  }
  for (int64_t i = 0; i < steps; i++) {
    for (int v = 0; v < VECTORS; v++) {
      if (ahead) __builtin_prefetch(ahead->vector[vector + v] + i * kLanes * Format::kDepth, 0, 2);
    }
    for (int part = 0; part < Format::kParts; part++) {
      decltype(Format::load_weight(keys.vector[0], part)) key[VECTORS];
      for (int v = 0; v < VECTORS; v++) key[v] = Format::load_weight(keys.vector[vector + v] + i * keys.step, part);
      for (int r = 0; r < ROWS; r++) {
        const auto* query = queries + r * stride + i * Format::kDepth;
        for (int v = 0; v < VECTORS; v++) sum[r][v] = Format::add(query, part, key[v], sum[r][v]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) store(scores + r * kKeyBlock + (vector + v) * kLanes, sum[r][v]);
  }
}

// The same for 1 <= rows <= kTileRows and at least the vectors that overlap [begin, end): with one row, several vectors
// at a time keep enough independent chains in flight to hide latency.
template <class Format, int ROWS = kTileRows, class T>
void score_up_to(int64_t rows, const typename Format::Row* queries, int64_t stride, const KvVectors<T>& keys,
                 int64_t begin, int64_t end, int64_t steps, float* scores, const KvVectors<T>* ahead) {
  if (rows != ROWS) {
    if constexpr (ROWS > 1)
      score_up_to<Format, ROWS - 1>(rows, queries, stride, keys, begin, end, steps, scores, ahead);
    return;
  }
  constexpr int vectors = ROWS == 1 ? kPanelVectors : kTileVectors;
  int vector = static_cast<int>(begin / kLanes);
  const int stop = static_cast<int>((end + kLanes - 1) / kLanes);
  if constexpr (vectors == kPanelVectors) {
    if (stop - vector > 2) return score<Format, ROWS, 4>(queries, stride, keys, 0, steps, scores, ahead);
    return score<Format, ROWS, 2>(queries, stride, keys, min(vector, 2), steps, scores, ahead);
  }
  for (; vector < stop; vector++) score<Format, ROWS, 1>(queries, stride, keys, vector, steps, scores, ahead);
}

// One part of the values of a step of positions, for sixteen elements of the head, or for its last n, padded
// with zeros.
template <class Format, bool WHOLE, class T>
TOKSERVE_INLINE auto load_values(const T* p, int part, int64_t n) {
  if (WHOLE || n >= kLanes) return Format::load_weight(p, part);
  T words[kLanes * Format::kDepth] = {};
  std::memcpy(words, p, n * Format::kDepth * sizeof(T));
  return Format::load_weight(words, part);
}

// Zeroes those of the positions [at, at + depth) that lie outside [begin, end).  Their memory may hold NaN, which a
// weight of zero would not cancel.
TOKSERVE_INLINE u32x16 mask_outside(u32x16 pair, int, int64_t at, int64_t begin, int64_t end) {
  if (at < begin) pair = pair & broadcast_u32(0xffff0000);
  if (at + 1 >= end) pair = pair & broadcast_u32(0x0000ffff);
  return pair;
}
TOKSERVE_INLINE f32x16 mask_outside(f32x16 values, int part, int64_t at, int64_t begin, int64_t end) {
  return at + part < begin || at + part >= end ? zeros() : values;
}

// acc [ROWS][width] += probs [ROWS][64] times values of positions [begin, end), for VECTORS vectors of the head from
// `column` on.  Prefetches as many keys of `ahead`, where given.
template <class Format, int ROWS, int VECTORS, class T>
TOKSERVE_INLINE void add_values(const typename Format::Row* probs, const KvVectors<T>& values, int64_t begin,
                                int64_t end, int64_t dim, int64_t column, float* acc, int64_t width,
                                const KvVectors<T>* ahead) {
  constexpr int64_t depth = Format::kDepth;
  f32x16 sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) sum[r][v] = load(acc + r * width + column + v * kLanes);
  }
  int64_t at = begin / depth * depth;
  for (int64_t vector = begin / kLanes; vector * kLanes < end; vector++) {
    const int64_t stop = min(end, (vector + 1) * kLanes);
    for (; at < stop; at += depth) {
      const int64_t row = at % kLanes / depth;
      const T* value = values.vector[vector] + row * values.step + column * depth;
      const bool edge = depth > 1 && (at < begin || at + depth > end);
      for (int v = 0; v < VECTORS; v++) {
        if (ahead) __builtin_prefetch(ahead->vector[vector] + ((row * dim + column) / kLanes + v) * ahead->step, 0, 2);
      }
      for (int part = 0; part < Format::kParts; part++) {
        decltype(Format::load_weight(value, part)) loaded[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
          loaded[v] = load_values<Format, (VECTORS > 1)>(value + v * kLanes * depth, part, dim - column);
          if (edge) loaded[v] = mask_outside(loaded[v], part, at, begin, end);
        }
        for (int r = 0; r < ROWS; r++) {
          const auto* prob = probs + r * kKeyBlock + at;
          for (int v = 0; v < VECTORS; v++) sum[r][v] = Format::add(prob, part, loaded[v], sum[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) store(acc + r * width + column + v * kLanes, sum[r][v]);
  }
}

template <class Format, int ROWS = kTileRows, class T>
void add_values_up_to(int64_t rows, const typename Format::Row* probs, const KvVectors<T>& values, int64_t begin,
                      int64_t end, int64_t dim, float* acc, int64_t width, const KvVectors<T>* ahead) {
  if (rows != ROWS) {
    if constexpr (ROWS > 1) add_values_up_to<Format, ROWS - 1>(rows, probs, values, begin, end, dim, acc, width, ahead);
    return;
  }
  int64_t column = 0;
  for (; column + kTileVectors * kLanes <= dim; column += kTileVectors * kLanes) {
    add_values<Format, ROWS, kTileVectors>(probs, values, begin, end, dim, column, acc, width, ahead);
  }
  if constexpr (kTileVectors > 2) {  // several chains for the remaining columns, too
    for (; column + 2 * kLanes <= dim; column += 2 * kLanes) {
      add_values<Format, ROWS, 2>(probs, values, begin, end, dim, column, acc, width, ahead);
    }
  }
  for (; column < dim; column += kLanes) {
    add_values<Format, ROWS, 1>(probs, values, begin, end, dim, column, acc, width, ahead);
  }
}

}  // namespace

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
