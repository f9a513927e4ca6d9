// difference: which elements of a tensor change when it becomes another one, rounded to its type.  Bits are compared,
// those of NaN too.
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr int64_t kBlock = 4 * kLanes;  // elements that are rounded before they are compared

TOKSERVE_INLINE uint16_t bits_of(bf16 x) { return x.bits; }
TOKSERVE_INLINE uint16_t bits_of(f16 x) { return x.bits; }
TOKSERVE_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

template <class Old, class New>
TOKSERVE_INLINE void round_block(const New* from, Old* to) {
  for (int64_t i = 0; i < kBlock; i += kLanes) store(to + i, load(from + i));
}
template <class Old>
TOKSERVE_INLINE void round_block(const Old* from, Old* to) {  // not through float, which would quiet a signalling NaN
  std::memcpy(to, from, kBlock * sizeof(Old));
}

// Appends what differs between a block and `fresh`; returns the new count.  Both have kBlock elements.
template <class Old, class Bits>
TOKSERVE_INLINE int64_t compare_block(const Old* old, const Old* fresh, int64_t first, uint32_t* places, Bits* values,
                                      int64_t count) {
  constexpr int64_t kEach = 8 / sizeof(Old);  // elements in a word
  for (int64_t i = 0; i < kBlock; i += kEach) {
    uint64_t one, other;
    std::memcpy(&one, old + i, 8);
    std::memcpy(&other, fresh + i, 8);
    if (one == other) continue;
    for (int64_t j = i; j < i + kEach; j++) {  // without branches: the next element overwrites one that is equal
      places[count] = static_cast<uint32_t>(first + j);
      values[count] = bits_of(fresh[j]);
      count += bits_of(old[j]) != bits_of(fresh[j]);
    }
  }
  return count;
}

template <class Old, class New>
int64_t compare(const DifferenceArgs& a) {
  using Bits = decltype(bits_of(Old{}));
  const Old* old = static_cast<const Old*>(a.old);
  const New* from = static_cast<const New*>(a.fresh);
  Bits* values = static_cast<Bits*>(a.values);
  int64_t count = 0, first = 0;
  Old fresh[kBlock];
  for (; first + kBlock <= a.n; first += kBlock) {
    round_block(from + first, fresh);
    count = compare_block(old + first, fresh, first, a.places, values, count);
  }
  if (first < a.n) {
    const int64_t rest = a.n - first;
    New last[kBlock];
    Old was[kBlock];
    std::memset(last, 0, sizeof last);
    std::memset(was, 0, sizeof was);
    std::memcpy(last, from + first, rest * sizeof(New));
    std::memcpy(was, old + first, rest * sizeof(Old));
    round_block(last, fresh);
    uint32_t places[kBlock];
    Bits bits[kBlock];
    const int64_t more = compare_block(was, fresh, first, places, bits, 0);
    std::memcpy(a.places + count, places, more * sizeof places[0]);
    std::memcpy(values + count, bits, more * sizeof bits[0]);
    count += more;
  }
  return count;
}

}  // namespace

int64_t difference(const DifferenceArgs& a) {
  int64_t count = 0;
  with_type(a.dtype, [&](auto old) {
    with_type(a.fresh_dtype, [&](auto fresh) { count = compare<decltype(old), decltype(fresh)>(a); });
  });
  return count;
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
