// Gated activations, one vector at a time: for the op of that name and for the product that ends in one.
#pragma once

#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

struct Silu {
  TOKSERVE_INLINE F operator()(F x) const { return x / (fset(1.0f) + exp(fzero() - x)); }
};

// x (1 + tanh(z)) / 2 = x / (1 + e^-2z): no cancellation where tanh is near -1.
struct Gelu {
  TOKSERVE_INLINE F operator()(F x) const {
    const F z = (x + x * x * x * fset(0.044715f)) * fset(0.7978845608028654f);
    return x / (fset(1.0f) + exp(z * fset(-2.0f)));
  }
};

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
