// Activations of gated products, one vector at a time: shared by silu_mul, gelu_mul and the epilogue of linear.
#pragma once

#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

struct Silu {
  TOKSERVE_INLINE f32x16 operator()(f32x16 x) const { return x / (broadcast(1.0f) + exp(zeros() - x)); }
};

// x (1 + tanh(z)) / 2 = x / (1 + e^-2z): no cancellation where tanh is near -1.
struct Gelu {
  TOKSERVE_INLINE f32x16 operator()(f32x16 x) const {
    const f32x16 z = (x + x * x * x * broadcast(0.044715f)) * broadcast(0.7978845608028654f);
    return x / (broadcast(1.0f) + exp(z * broadcast(-2.0f)));
  }
};

template <class Activation>
TOKSERVE_INLINE f32x16 gated(f32x16 gate, f32x16 up) {
  return Activation()(gate) * up;
}

// SwiGLU as gpt-oss has it: (up + 1) gate sigmoid(1.702 gate), the gate at most 7, up between -7 and 7.
struct Clamped {};
template <>
TOKSERVE_INLINE f32x16 gated<Clamped>(f32x16 gate, f32x16 up) {
  const f32x16 limit = broadcast(7.0f), g = vmin(limit, gate), u = vmax(broadcast(-7.0f), vmin(limit, up));
  return (u + broadcast(1.0f)) * (g / (broadcast(1.0f) + exp(g * broadcast(-1.702f))));
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
