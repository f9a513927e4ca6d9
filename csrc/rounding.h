// Rows of activations rounded to int8: symmetric, with one scale for the row or for a part of it.
#pragma once

#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

constexpr float kLevels = 127.0f;        // values are -127 .. 127
constexpr float kMinMagnitude = 1e-30f;  // lower bound of the largest magnitude: zeros stay zero

// The scale of n values: the largest magnitude over 127, NaN if any value is not finite.  load(i): sixteen of them from
// i on, zeros past the last.
template <class Load>
TOKSERVE_INLINE float scale_of(int64_t n, Load load, float& inverse) {
  f32x16 magnitudes = zeros(), not_finite = zeros();  // x - x is zero only for finite x
  for (int64_t i = 0; i < n; i += kLanes) {
    const f32x16 value = load(i);
    magnitudes = vmax(as_f32(as_u32(value) & broadcast_u32(0x7fffffff)), magnitudes);
    not_finite = not_finite + (value - value);
  }
  if (reduce_sum(not_finite) != 0.0f) {
    inverse = 0.0f;
    return __builtin_nanf("");
  }
  const float magnitude = max(reduce_max(magnitudes), kMinMagnitude);
  inverse = kLevels / magnitude;
  return magnitude / kLevels;
}

// Calls put(i, values) for every sixteen quantized values, from i on; returns the scale.  Without a finite scale all
// values are zero.
template <class Load, class Put>
TOKSERVE_INLINE float quantize_loaded(int64_t n, Load load, Put put) {
  float inverse;
  const float scale = scale_of(n, load, inverse);
  for (int64_t i = 0; i < n; i += kLanes) {
    int32_t values[kLanes];
    const f32x16 scaled = load(i) * broadcast(inverse);
    store(reinterpret_cast<uint32_t*>(values), scale == scale ? round_to_i32(scaled) : broadcast_u32(0));
    put(i, values);
  }
  return scale;
}

// The same of n values at x.
template <class T, class Put>
TOKSERVE_INLINE float quantize(const T* x, int64_t n, Put put) {
  return quantize_loaded(n, [x, n](int64_t i) { return load_partial(x + i, n - i); }, put);
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
