// Activations of gated products, one vector at a time: shared by the elementwise ops, attention and the
// epilogue of linear.
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
// x times the normal distribution function at x.  W. H. Press et al., Numerical Recipes, section 6.2 (erfcc): the
// relative error of the tail is 1.2e-7.
struct GeluErf {
  TOKSERVE_INLINE f32x16 operator()(f32x16 x) const {
    const mask16 negative = x < zeros();
    const f32x16 one = broadcast(1.0f), size = select(negative, zeros() - x, x) * broadcast(0.70710678118654752f);
    const f32x16 t = one / (one + broadcast(0.5f) * size);
    f32x16 p = broadcast(0.17087277f);
    constexpr float rest[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                              0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    for (int i = 0; i < 9; i++) p = p * t + broadcast(rest[i]);
    const f32x16 tail = broadcast(0.5f) * t * exp(p - size * size);
    return x * select(negative, tail, one - tail);
  }
};

struct Relu {
  TOKSERVE_INLINE f32x16 operator()(f32x16 x) const { return select(x < zeros(), zeros(), x); }
};

struct SquaredRelu {
  TOKSERVE_INLINE f32x16 operator()(f32x16 x) const {
    const f32x16 positive = Relu()(x);
    return positive * positive;
  }
};

// Near zero by a polynomial (S. L. Moshier, Cephes, tanhf), else by one exponential.
TOKSERVE_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 square = x * x, one = broadcast(1.0f);
  f32x16 p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const f32x16 near = fma(p * square, x, x);
  const mask16 negative = x < zeros();
  const f32x16 size = select(negative, zeros() - x, x), power = exp(size * broadcast(-2.0f));
  const f32x16 far = (one - power) / (one + power);
  return select(size < broadcast(0.625f), near, select(negative, zeros() - far, far));
}

// limit * tanh(x / limit).
TOKSERVE_INLINE f32x16 capped(f32x16 x, float limit) { return tanh(x / broadcast(limit)) * broadcast(limit); }

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
