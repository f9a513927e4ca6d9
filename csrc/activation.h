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
// x times the normal distribution function at x, which is 1/2 + x p(x^2) up to 5.5 and rounds to 0 or 1 beyond: p is
// the polynomial of degree 15 through the Chebyshev nodes of x^2 in [0, 5.5^2], in s = 2 x^2 / 5.5^2 - 1.  The error is
// below 2e-7 of x.
struct GeluErf {
  TOKSERVE_INLINE f32x16 operator()(f32x16 x) const {
    constexpr float limit = 5.5f;
    const f32x16 at = vmax(broadcast(-limit), vmin(broadcast(limit), x));
    const f32x16 s = fma(at * at, broadcast(2.0f / (limit * limit)), broadcast(-1.0f));
    constexpr float rest[] = {0.00065514818f, -0.0004001958f, 0.0006437078f, -0.0025937106f, 0.0047183563f,
                              -0.006700172f,  0.010167755f,   -0.01504235f,  0.020383572f,   -0.02604037f,
                              0.03206743f,    -0.038793407f,  0.047737785f,  -0.06417233f,   0.12855193f};
    f32x16 p = broadcast(-0.000274066f);
    for (const float coefficient : rest) p = fma(p, s, broadcast(coefficient));
    return select(x < broadcast(-limit), zeros(), x * fma(at, p, broadcast(0.5f)));
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
