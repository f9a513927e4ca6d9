// Gradients of root mean square norms and of activations.  Every row is read in vectors of 16 from its start.
#include "activation.h"
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// An activation and its derivative.
struct WithSlope {
  f32x16 value, slope;
};

template <Activation activation>
TOKSERVE_INLINE WithSlope with_slope(f32x16 x) {
  const f32x16 one = broadcast(1.0f);
  if constexpr (activation == Activation::silu) {
    const f32x16 sigmoid = one / (one + exp(zeros() - x)), value = x * sigmoid;
    return {value, fma(value, one - sigmoid, sigmoid)};
  } else if constexpr (activation == Activation::gelu_tanh) {  // x u with u = 1 / (1 + e^-2z)
    const f32x16 square = x * x, scale = broadcast(0.7978845608028654f);
    const f32x16 z = fma(square * x, broadcast(0.044715f), x) * scale;
    const f32x16 u = one / (one + exp(z * broadcast(-2.0f)));
    const f32x16 slope_z = fma(square, broadcast(3.0f * 0.044715f), one) * scale;
    return {x * u, fma(x * (u * (one - u)) * broadcast(2.0f), slope_z, u)};
  } else if constexpr (activation == Activation::gelu) {  // x c with c the normal distribution function
    const f32x16 density = exp(x * x * broadcast(-0.5f)) * broadcast(0.3989422804014327f);
    const f32x16 value = GeluErf()(x), c = select(x == zeros(), broadcast(0.5f), value / x);
    return {value, fma(x, density, c)};
  } else {
    const f32x16 positive = Relu()(x);
    if constexpr (activation == Activation::relu2) return {positive * positive, positive * broadcast(2.0f)};
    else return {positive, select(zeros() < x, one, zeros())};
  }
}

template <class T, Activation activation>
void activation_rows(const ActivationGradientsArgs& a, int64_t begin, int64_t end) {
  const int64_t n = a.width, stride = a.gated ? 2 * n : n;
  for (int64_t row = begin; row < end; row++) {
    const T *grad = static_cast<const T*>(a.grad) + row * n, *x = static_cast<const T*>(a.x) + row * stride;
    T* out = static_cast<T*>(a.out) + row * stride;
    for (int64_t i = 0; i < n; i += kLanes) {
      const int64_t count = min(kLanes, n - i);
      const f32x16 upstream = load_partial(grad + i, count);
      const WithSlope active = with_slope<activation>(load_partial(x + i, count));
      if (!a.gated) {
        store_partial(out + i, upstream * active.slope, count);
        continue;
      }
      store_partial(out + i, upstream * active.slope * load_partial(x + n + i, count), count);
      store_partial(out + n + i, upstream * active.value, count);
    }
  }
}

template <class T, class G>
void norm_row(const NormGradientsArgs& a, int64_t row, float* weight_sum) {
  const int64_t n = a.width;
  const T* x = static_cast<const T*>(a.x) + row * n;
  const G* grad = static_cast<const G*>(a.grad) + row * n;
  f32x16 square = zeros(), dot = zeros();
  for (int64_t i = 0; i < n; i += kLanes) {
    const f32x16 value = load_partial(x + i, n - i), upstream = load_partial(grad + i, n - i);
    square = fma(value, value, square);
    dot = fma(upstream * load_partial(a.weight + i, n - i), value, dot);
  }
  const float count = static_cast<float>(n), inverse = 1.0f / __builtin_sqrtf(reduce_sum(square) / count + a.eps);
  const f32x16 scale = broadcast(inverse), along = broadcast(reduce_sum(dot) / count * inverse * inverse * inverse);
  T* out = static_cast<T*>(a.out) + row * n;
  for (int64_t i = 0; i < n; i += kLanes) {
    const f32x16 value = load_partial(x + i, n - i), upstream = load_partial(grad + i, n - i);
    f32x16 result = upstream * load_partial(a.weight + i, n - i) * scale - value * along;
    if (a.carried) result = result + load_partial(static_cast<const T*>(a.carried) + row * n + i, n - i);
    store_partial(out + i, result, n - i);
    const f32x16 sum = load_partial(weight_sum + i, n - i);
    store_partial(weight_sum + i, fma(upstream, value * scale, sum), n - i);
  }
}

}  // namespace

void activation_gradients(const ActivationGradientsArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    switch (a.activation) {
      case Activation::silu: return activation_rows<T, Activation::silu>(a, begin, end);
      case Activation::gelu_tanh: return activation_rows<T, Activation::gelu_tanh>(a, begin, end);
      case Activation::gelu: return activation_rows<T, Activation::gelu>(a, begin, end);
      case Activation::relu: return activation_rows<T, Activation::relu>(a, begin, end);
      case Activation::relu2: return activation_rows<T, Activation::relu2>(a, begin, end);
    }
  });
}

void norm_gradients(const NormGradientsArgs& a, int64_t begin, int64_t end, float* weight_sum) {
  std::memset(weight_sum, 0, a.width * sizeof(float));
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    for (int64_t row = begin; row < end; row++) {
      if (a.grad_dtype == a.dtype) norm_row<T, T>(a, row, weight_sum);
      else norm_row<T, float>(a, row, weight_sum);
    }
  });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
