// How a page holds the keys and the values of one head: as attention multiplies them, so that reading moves nothing.
//   keys   [dim / depth][page][depth]: a vector is one step of the product with sixteen keys
//   values [page / depth][dim][depth]: a vector is one step of the weighted sum for sixteen elements of the head
// depth is 2 for bfloat16, whose products take pairs, else 1; it is the same in every instruction set, so that a page
// does not depend on who wrote it.  Pages without whole runs of sixteen tokens, and heads without whole pairs, lie as
// rows [page][dim] and are rearranged by each reader.
#pragma once

#include "tile.h"

namespace tokserve {
namespace TOKSERVE_ISA {

template <class T>
struct PageLayout {
  using Format = typename FormatOf<T>::Format;
  static constexpr int64_t kDepth = Format::kDepth;

  int64_t page, dim;

  bool arranged() const { return page % kLanes == 0 && dim % kDepth == 0; }

  // Elements from the start of a head's keys to its `depth` first of this token's; steps lie page * depth apart.
  int64_t key_at(int64_t token) const { return token * kDepth; }
  // Elements from the start of a head's values to those of the run of sixteen tokens that begins with `token`.
  int64_t value_at(int64_t token) const { return token * dim; }

  // One token's row of dim elements into the head's place in a page.  Threads may write tokens of one pair at a time:
  // nothing is written but the token's own elements.
  void put_key(T* keys, int64_t token, const T* row) const {
    if (arranged()) arrange_key(keys, token, row);
    else std::memcpy(keys + token * dim, row, dim * sizeof(T));
  }
  void put_value(T* values, int64_t token, const T* row) const {
    if (arranged()) arrange_value(values, token, row);
    else std::memcpy(values + token * dim, row, dim * sizeof(T));
  }

  // The same whether pages are arranged or not; the last pair of an odd row is filled up with zero.
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
