// Blocks of a few elements, rearranged in registers.  Internal linkage: each instruction set compiles its own.
#pragma once

#include <cstdint>
#include <cstring>

namespace tokserve {
namespace {

// Four rows of four 32-bit words: word j of row i, rows from_stride bytes apart, becomes word i of row j of `to`.
inline __attribute__((always_inline)) void transpose_words(const char* from, int64_t from_stride, char* to,
                                                           int64_t to_stride) {
#if __has_builtin(__builtin_shufflevector)
  using Words __attribute__((vector_size(16))) = uint32_t;
  Words row[4];
  for (int i = 0; i < 4; i++) std::memcpy(&row[i], from + i * from_stride, sizeof row[i]);
  const Words ab = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
  const Words cd = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
  const Words ef = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
  const Words gh = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
  const Words column[] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                          __builtin_shufflevector(ef, gh, 0, 1, 4, 5), __builtin_shufflevector(ef, gh, 2, 3, 6, 7)};
  for (int i = 0; i < 4; i++) std::memcpy(to + i * to_stride, &column[i], sizeof column[i]);
#else
  for (int i = 0; i < 4; i++) {
    for (int j = 0; j < 4; j++) std::memcpy(to + j * to_stride + 4 * i, from + i * from_stride + 4 * j, 4);
  }
#endif
}

// Two rows of n 16-bit elements become n pairs.
inline void interleave_halves(const uint16_t* first, const uint16_t* second, int64_t n, uint16_t* to) {
  int64_t i = 0;
#if __has_builtin(__builtin_shufflevector)
  using Halves __attribute__((vector_size(16))) = uint16_t;
  for (; i + 8 <= n; i += 8) {
    Halves a, b;
    std::memcpy(&a, first + i, sizeof a), std::memcpy(&b, second + i, sizeof b);
    const Halves low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    const Halves high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    std::memcpy(to + 2 * i, &low, sizeof low), std::memcpy(to + 2 * i + 8, &high, sizeof high);
  }
#endif
  for (; i < n; i++) to[2 * i] = first[i], to[2 * i + 1] = second[i];
}

}  // namespace
}  // namespace tokserve
