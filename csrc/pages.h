// The layout of one head's keys and values in a page of the KV cache: as attention multiplies them, so that it reads
// them in place.
//   keys   [dim / depth][page][depth]: a vector is one step of the product with sixteen keys
//   values [page / depth][dim][depth]: a vector is one step of the weighted sum for sixteen elements of the head
//
//   keys         token 0  ..  15 | 16  ..  31       values        element 0  ..  15 | 16 .. dim - 1
//   element 0    [ a vector ]      [ ... ]          token 0       [ a vector ]        [ ... ]
//   element 1    [ ... ]                            token 1       [ ... ]
//
// In bfloat16, whose products take pairs, depth is 2: each entry is a pair of elements, or of tokens; otherwise it
// is 1. The depth is the same in every instruction set, so pages are interchangeable.  Pages whose size is no multiple
// of sixteen tokens, and bfloat16 heads of odd size, are stored as plain rows [page][dim], which each reader
// rearranges.
#pragma once

#include "tile.h"
#include "transpose.h"

namespace tokserve {
namespace TOKSERVE_ISA {

template <class T>
struct PageLayout {
  using Format = typename FormatOf<T>::Format;
  static constexpr int64_t kDepth = Format::kDepth;

  int64_t page, dim;

  bool arranged() const { return page % kLanes == 0 && dim % kDepth == 0; }

  // Offset of a token's first `depth` elements in a head's keys; the next ones are page * depth elements further on.
  int64_t key_at(int64_t token) const { return token * kDepth; }
  // Offset of a token's values in a head's values, for a token that begins a vector of sixteen.
  int64_t value_at(int64_t token) const { return token * dim; }

  // Write one token's row of dim elements into a head's part of a page.  Only the token's own elements are written, so
  // threads may write the two tokens of a pair concurrently.
  void put_key(T* keys, int64_t token, const T* row) const {
    if (arranged()) arrange_key(keys, token, row);
    else std::memcpy(keys + token * dim, row, dim * sizeof(T));
  }
  void put_value(T* values, int64_t token, const T* row) const {
    if (arranged()) arrange_value(values, token, row);
    else std::memcpy(values + token * dim, row, dim * sizeof(T));
  }

  // The same for `count` tokens of one page, from `token` on; their rows are `stride` elements apart.
  void put_keys(T* keys, int64_t token, int64_t count, const T* rows, int64_t stride) const {
    constexpr int64_t word = kDepth * sizeof(T);
    int64_t i = 0;
    if constexpr (word == 4) {
      for (; i + 4 <= count && arranged(); i += 4) {
        const T* from = rows + i * stride;
        T* to = keys + key_at(token + i);
        int64_t c = 0;
        for (; c + 4 * kDepth <= dim; c += 4 * kDepth) {
          transpose_words(reinterpret_cast<const char*>(from + c), stride * static_cast<int64_t>(sizeof(T)),
                          reinterpret_cast<char*>(to + c * page), page * word);
        }
        for (; c < dim; c += kDepth) {
          for (int64_t j = 0; j < 4; j++) std::memcpy(to + c * page + j * kDepth, from + j * stride + c, word);
        }
      }
    }
    for (; i < count; i++) put_key(keys, token + i, rows + i * stride);
  }
  void put_values(T* values, int64_t token, int64_t count, const T* rows, int64_t stride) const {
    for (int64_t i = 0; i < count; i++) {
      const T* row = rows + i * stride;
      if constexpr (kDepth == 2) {
        if ((token + i) % 2 == 0 && i + 1 < count && arranged()) {
          interleave_halves(&row->bits, &row[stride].bits, dim, &values[value_at(token + i)].bits);
          i++;
          continue;
        }
      }
      put_value(values, token + i, row);
    }
  }

  // Fetches the cache lines that put_keys and put_values are going to write: pages are scattered.
  void prefetch(const T* keys, const T* values, int64_t token, int64_t count) const {
    if (!arranged()) return;
    for (int64_t c = 0; c < dim; c += kDepth) __builtin_prefetch(keys + c * page + key_at(token), 1);
    const T *from = values + value_at(token - token % kDepth), *to = values + value_at(token + count);
    for (; from < to; from += 64 / sizeof(T)) __builtin_prefetch(from, 1);
  }

  // The arranged layout, whatever arranged() says; the last pair of an odd row is padded with zero.
  void arrange_key(T* keys, int64_t token, const T* row) const {
    T* to = keys + key_at(token);
    int64_t i = 0;
    for (; i + kDepth <= dim; i += kDepth, to += page * kDepth) std::memcpy(to, row + i, kDepth * sizeof(T));
    if (i < dim) to[0] = row[i], to[1] = T{};
  }
  void arrange_value(T* values, int64_t token, const T* row) const {
    T* to = values + value_at(token - token % kDepth) + token % kDepth;
    for (int64_t i = 0; i < dim; i++) to[i * kDepth] = row[i];
  }
};

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
