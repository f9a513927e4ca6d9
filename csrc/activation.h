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

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
