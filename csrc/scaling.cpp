// Rows and heads times factors of their own, heads of values with a norm, gates of inputs.
#include <cstring>

#include "activation.h"
#include "rows.h"
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

template <class T>
void scale_row(const T* x, T* out, int64_t n, float factor) {
  const f32x16 all = broadcast(factor);
  over_vectors(n, [&](int64_t i, int64_t count) { store_partial(out + i, load_partial(x + i, count) * all, count); });
}

template <class T, class Function>
void gate_input_rows(const GatedInputArgs& a, int64_t begin, int64_t end) {
  const Function function;
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    const T* inputs = static_cast<const T*>(a.inputs) + row * a.stride;
    T* out = static_cast<T*>(a.out) + row * a.width;
    over_vectors(a.width, [&](int64_t i, int64_t count) {
      store_partial(out + i, function(load_partial(x + i, count)) * load_partial(inputs + i, count), count);
    });
  }
}

}  // namespace

void scale_by_position(const PositionScaleArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    for (int64_t row = begin; row < end; row++) {
      const auto whole = static_cast<double>((a.positions[row] + a.first) / a.period);
      const auto factor = static_cast<float>(1.0 + static_cast<double>(a.growth) * __builtin_log(1.0 + whole));
      scale_row(static_cast<const T*>(a.x) + row * a.width, static_cast<T*>(a.out) + row * a.width, a.width, factor);
    }
  });
}

void scale_rows(const RowScaleArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    for (int64_t row = begin; row < end; row++) {
      const float factor = a.factors[a.one ? 0 : row];
      scale_row(static_cast<const T*>(a.x) + row * a.width, static_cast<T*>(a.out) + row * a.width, a.width, factor);
    }
  });
}

void norm_values(const ValueNormArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    const int64_t kept = a.copied ? a.width : a.width - a.size;
    for (int64_t row = begin; row < end; row++) {
      const T* from = static_cast<const T*>(a.x) + row * a.width;
      T* to = static_cast<T*>(a.out) + row * (kept + a.size);
      std::memcpy(to, from, kept * sizeof(T));
      for (int64_t i = 0; i < a.size; i += a.dim) {
        const T* head = from + a.width - a.size + i;
        scale_row(head, to + kept + i, a.dim, norm_scale(head, a.dim, a.eps));
      }
    }
  });
}

void gate_inputs(const GatedInputArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    switch (a.activation) {
      case Activation::silu: return gate_input_rows<T, Silu>(a, begin, end);
      case Activation::gelu_tanh: return gate_input_rows<T, Gelu>(a, begin, end);
      case Activation::gelu: return gate_input_rows<T, GeluErf>(a, begin, end);
      case Activation::relu: return gate_input_rows<T, Relu>(a, begin, end);
      case Activation::relu2: return gate_input_rows<T, SquaredRelu>(a, begin, end);
    }
  });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
