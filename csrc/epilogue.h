// How a product ends: a panel's sums [rows][64] get their bias and are rounded once, or become an activation of
// themselves where the weight is gated.  Args is what the product was called with: bias, out, n, gate, out_dtype.  Sums
// gives the sums as float32: columns(place, output, n)(row) are up to sixteen of a row from `place` of the panel on, of
// the weight's rows from `output` on.
#pragma once

#include "activation.h"
#include "kernels.h"

namespace tokserve {
namespace TOKSERVE_ISA {

// Sums that are float32 already.
struct FloatSums {
  const float* sums;  // [rows][64]
  TOKSERVE_INLINE auto columns(int64_t place, int64_t, int64_t) const {
    return [from = sums + place](int64_t row) { return load(from + row * kPanel); };
  }
};

// `columns` of the panel's sums from `place` on go to rows of `width` outputs, from `first` on.
template <class T, class Out, class Args, class Sums>
void write_out(const Args& a, const Sums& sums, int64_t row0, int64_t rows, int64_t place, int64_t columns,
               int64_t first, int64_t width) {
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + first : nullptr;
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int64_t n = least(kLanes, columns - c);
    const F shift = bias ? load_part(bias + c, n) : fzero();
    const auto values = sums.columns(place + c, first + c, n);
    Out* out = static_cast<Out*>(a.out) + row0 * width + first + c;
    for (int64_t r = 0; r < rows; r++) {
      const F value = values(r);
      store_part(out + r * width, bias ? value + shift : value, n);
    }
  }
}

// As if the product had been written and read again.
template <class T>
TOKSERVE_INLINE F rounded(F x) {
  T words[kLanes];
  store(words, x);
  return load(words);
}
template <>
TOKSERVE_INLINE F rounded<float>(F x) {
  return x;
}

// A panel's sums [rows][gate | up] become activation(gate) * up.
template <class T, class Activation, class Args, class Sums>
void write_gated(const Args& a, const Sums& sums, int64_t row0, int64_t rows, int64_t columns, int64_t first) {
  const Activation activation;
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + first : nullptr;
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int64_t n = least(kLanes, columns - c);
    const F gate_shift = bias ? load_part(bias + c, n) : fzero(),
            up_shift = bias ? load_part(bias + a.n + c, n) : fzero();
    const auto gates = sums.columns(c, first + c, n), ups = sums.columns(kGatedPanel + c, a.n + first + c, n);
    T* out = static_cast<T*>(a.out) + row0 * a.n + first + c;
    for (int64_t r = 0; r < rows; r++) {
      const F gate = gates(r), up = ups(r);
      const F shifted_gate = rounded<T>(bias ? gate + gate_shift : gate),
              shifted_up = rounded<T>(bias ? up + up_shift : up);
      store_part(out + r * a.n, activation(shifted_gate) * shifted_up, n);
    }
  }
}

template <class T, class Args, class Sums>
void write_panel(const Args& a, const Sums& sums, int64_t row0, int64_t rows, int64_t panel) {
  const int64_t first = panel * (a.gate == Gate::none ? kPanel : kGatedPanel);
  const int64_t columns = least(a.gate == Gate::none ? kPanel : kGatedPanel, a.n - first);
  switch (a.gate) {
    case Gate::silu: return write_gated<T, Silu>(a, sums, row0, rows, columns, first);
    case Gate::gelu: return write_gated<T, Gelu>(a, sums, row0, rows, columns, first);
    case Gate::both:  // what is gated lies behind all of the gate
      write_out<T, T>(a, sums, row0, rows, 0, columns, first, 2 * a.n);
      return write_out<T, T>(a, sums, row0, rows, kGatedPanel, columns, a.n + first, 2 * a.n);
    case Gate::none: break;
  }
  if (a.out_dtype == DType::f32) write_out<T, float>(a, sums, row0, rows, 0, columns, first, a.n);
  else write_out<T, T>(a, sums, row0, rows, 0, columns, first, a.n);
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
