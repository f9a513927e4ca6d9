// Groups of inputs that share a scale, and rows of x, as the products of packed integer weights read them.
#pragma once

#include "kernels.h"
#include "table.h"
#include "tile.h"
#include "unpack.h"

namespace tokserve {
namespace TOKSERVE_ISA {

inline int64_t groups_of(const Wna16Args& a) { return (a.k + a.group - 1) / a.group; }
inline int64_t padded(const Wna16Args& a) { return round_up(a.k, kCodeDepth); }

constexpr int64_t kScalesAhead = 16;  // groups whose scales are prefetched ahead of their use

// A panel's scales or minima of `count` groups from `first` on, as float32 [count][64].
inline void expand(const GroupScales& s, int64_t panel, int64_t groups, int64_t first, int64_t count, float* out) {
  const int64_t shared = (groups + s.ratio - 1) / s.ratio;
  const int8_t* parts = s.parts ? s.parts + (panel * groups + first) * kPanel : nullptr;
  with_type(s.dtype, [&](auto type) {
    const auto* values = static_cast<const decltype(type)*>(s.values) + (panel * shared + first / s.ratio) * kPanel;
    for (int64_t i = 0, of_value = first % s.ratio; i < count; i++, out += kPanel) {
      if (parts) __builtin_prefetch(parts + kScalesAhead * kPanel, 0, 2);
      for (int64_t v = 0; v < kPanel; v += kLanes) {
        if (v % (64 / sizeof type) == 0) __builtin_prefetch(values + v + kScalesAhead * kPanel / s.ratio, 0, 2);
        const f32x16 value = load(values + v);
        store(out + v, parts ? value * load_i8(parts + v) : value);
      }
      if (parts) parts += kPanel;
      if (++of_value == s.ratio) of_value = 0, values += kPanel;
    }
  });
}

template <class T>
using RowOf = typename UnpackedFor<T>::Format::Row;

// Whether products read x where it is.
template <class T>
bool reads_in_place(const Wna16Args& a) {
  return sizeof(RowOf<T>) == sizeof(T) && !a.order && a.k == padded(a);
}

template <class T, class Row>
void convert_row(const Wna16Args& a, const T* x, Row* to) {
  T gathered[kLanes];
  for (int64_t i = 0; i < padded(a); i += kLanes) {
    const int64_t n = max(int64_t{0}, min(kLanes, a.k - i));
    const T* from = x + i;
    if (a.order) {
      for (int64_t j = 0; j < n; j++) gathered[j] = x[a.order[i + j]];
      from = gathered;
    }
    store_partial(to + i, load_partial(from, n), min(kLanes, padded(a) - i));
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
