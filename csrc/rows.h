// A row of elements in vectors.  Included only by files compiled for an instruction set.
#pragma once

#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// 1 / sqrt(mean square + eps) of a row of n floats: four partial sums, added in a fixed tree.
template <class T>
float norm_scale(const T* x, int64_t n, float eps) {
  f32x16 part[4] = {zeros(), zeros(), zeros(), zeros()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; j++) {
      const f32x16 value = load(x + i + j * kLanes);
      part[j] = fma(value, value, part[j]);
    }
  }
  for (int j = 0; i < n; i += kLanes, j++) {
    const f32x16 value = load_partial(x + i, n - i);
    part[j] = fma(value, value, part[j]);
  }
  const float square = reduce_sum((part[0] + part[1]) + (part[2] + part[3])) / static_cast<float>(n);
  return 1.0f / __builtin_sqrtf(square + eps);
}

// Calls f(i, count) for vectors of a row of n elements: count is kLanes, or less for the last.
template <class F>
TOKSERVE_INLINE void over_vectors(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, n - i);
}

}  // namespace

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
