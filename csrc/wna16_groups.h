// Groups of inputs that share a scale, as the products of packed integer weights read them.
#pragma once

#include "kernels.h"
#include "table.h"
#include "tile.h"
#include "unpack.h"

namespace tokserve {
namespace TOKSERVE_ISA {

inline int64_t groups_of(const Wna16Args& a) { return (a.k + a.group - 1) / a.group; }
inline int64_t padded(const Wna16Args& a) { return round_up(a.k, kCodeDepth); }

// A panel's scales or minima of a group, as float32.
inline void expand(const GroupScales& s, int64_t panel, int64_t groups, int64_t group, float* out) {
  const int64_t shared = (groups + s.ratio - 1) / s.ratio;
  const int64_t at = (panel * shared + group / s.ratio) * kPanel;
  const int8_t* parts = s.parts ? s.parts + (panel * groups + group) * kPanel : nullptr;
  with_type(s.dtype, [&](auto type) {
    const auto* values = static_cast<const decltype(type)*>(s.values) + at;
    for (int64_t v = 0; v < kPanel; v += kLanes) {
      const f32x16 value = load(values + v);
      store(out + v, parts ? value * load_i8(parts + v) : value);
    }
  });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
