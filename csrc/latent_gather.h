// A block of rows of a latent cache, rearranged as the two products of attention take keys and values (pages.h): both
// come from the same row, so a page cannot hold it as either takes it.
#pragma once

#include "pages.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// x[i], lane j, becomes x[j], lane i.
[[maybe_unused]] TOKSERVE_INLINE void transpose(u32x16* x) {
#if defined(__AVX512F__)
  __m512i y[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i].v, x[i + 1].v);
    y[i + 1] = _mm512_unpackhi_epi32(x[i].v, x[i + 1].v);
  }
  __m512i z[kLanes];  // z[4 g + c]: column 4 lane + c of rows 4 g .. 4 g + 3, for the four 128-bit lanes
  for (int i = 0; i < kLanes; i += 4) {
    z[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    z[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    z[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    z[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int c = 0; c < 4; c++) {
    const __m512i a = _mm512_shuffle_i32x4(z[c], z[4 + c], 0x88), b = _mm512_shuffle_i32x4(z[8 + c], z[12 + c], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(z[c], z[4 + c], 0xdd), e = _mm512_shuffle_i32x4(z[8 + c], z[12 + c], 0xdd);
    x[c].v = _mm512_shuffle_i32x4(a, b, 0x88);
    x[8 + c].v = _mm512_shuffle_i32x4(a, b, 0xdd);
    x[4 + c].v = _mm512_shuffle_i32x4(d, e, 0x88);
    x[12 + c].v = _mm512_shuffle_i32x4(d, e, 0xdd);
  }
#else
  uint32_t rows[kLanes][kLanes], columns[kLanes][kLanes];
  for (int i = 0; i < kLanes; i++) store(rows[i], x[i]);
  for (int i = 0; i < kLanes; i++) {
    for (int j = 0; j < kLanes; j++) columns[j][i] = rows[i][j];
  }
  for (int i = 0; i < kLanes; i++) x[i] = load(columns[i]);
#endif
}

// Keys [begin, end) of the block, `row(i)` each, into keys [dim / depth][64][depth].
template <class T, class F>
void gather_keys(const F& row, int64_t begin, int64_t end, int64_t dim, T* keys) {
  const PageLayout<T> block{kKeyBlock, dim};
  if constexpr (PageLayout<T>::kDepth * sizeof(T) != sizeof(uint32_t)) {
    for (int64_t i = begin; i < end; i++) block.arrange_key(keys, i, row(i));
  } else {
    const int64_t words = dim / block.kDepth, whole = round_down_to_lanes(words);
    for (int64_t first = begin / kLanes * kLanes; first < end; first += kLanes) {
      const T* rows[kLanes];
      for (int64_t i = 0; i < kLanes; i++) rows[i] = row(first + i < begin || first + i >= end ? begin : first + i);
      uint32_t* to = reinterpret_cast<uint32_t*>(keys) + first;
      for (int64_t word = 0; word < whole; word += kLanes) {
        u32x16 x[kLanes];
        for (int64_t i = 0; i < kLanes; i++) x[i] = load(reinterpret_cast<const uint32_t*>(rows[i]) + word);
        transpose(x);
        for (int64_t i = 0; i < kLanes; i++) store(to + (word + i) * kKeyBlock, x[i]);
      }
      for (int64_t word = whole; word < words; word++) {
        for (int64_t i = 0; i < kLanes; i++)
          std::memcpy(to + word * kKeyBlock + i, rows[i] + word * block.kDepth, sizeof(uint32_t));
      }
    }
  }
}

// Values [begin, end) of the block, the first `dim` elements of `row(i)` each, into values [64 / depth][dim][depth].
template <class T, class F>
void gather_values(const F& row, int64_t begin, int64_t end, int64_t dim, T* values) {
  if constexpr (PageLayout<T>::kDepth == 1) {
    for (int64_t i = begin; i < end; i++) std::memcpy(values + i * dim, row(i), dim * sizeof(T));
  } else {
    for (int64_t i = begin / 2 * 2; i < end; i += 2) {  // a token outside is masked by the product
      const T *first = row(i < begin ? begin : i), *second = row(i + 1 < end ? i + 1 : i);
      uint32_t* to = reinterpret_cast<uint32_t*>(values + i * dim);
      int64_t at = 0;
      for (; at + kLanes <= dim; at += kLanes)
        store(to + at, as_u32(load(second + at)) ^ shr<16>(as_u32(load(first + at))));
      for (; at < dim; at++) to[at] = static_cast<uint32_t>(second[at].bits) << 16 | first[at].bits;
    }
  }
}

}  // namespace

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
