// The epilogue of a product: a panel's sums [rows][64] get their bias and are rounded once, or go through a gated
// activation.  Args are the arguments of the product: bias, out, n, gate, out_dtype.  Sums converts the sums to
// float32: at(row, column, output, n) returns up to sixteen of a row, from `column` of the panel on, which belong to
// the weight's rows from `output` on.
#pragma once

#include "activation.h"
#include "kernels.h"

namespace tokserve {
namespace TOKSERVE_ISA {

// Sums in float32.
struct FloatSums {
  const float* sums;  // [rows][64]
  TOKSERVE_INLINE f32x16 at(int64_t row, int64_t column, int64_t, int64_t) const {
    return load(sums + row * kPanel + column);
  }
};

// Elements between rows of out that are `width` wide.
template <class Args>
TOKSERVE_INLINE int64_t row_stride(const Args&, int64_t width) {
  return width;
}
TOKSERVE_INLINE int64_t row_stride(const Wna16Args& a, int64_t) { return a.out_stride; }
TOKSERVE_INLINE int64_t row_stride(const LinearArgs& a, int64_t width) { return a.out_stride ? a.out_stride : width; }

// Writes `columns` of the panel's sums, from `column` on, to rows of `width` outputs, from `first` on.
template <class T, class Out, class Args, class Sums>
void write_out(const Args& a, const Sums& sums, int64_t row0, int64_t rows, int64_t column, int64_t columns,
               int64_t first, int64_t width) {
  const T* bias = static_cast<const T*>(a.bias);
  const int64_t stride = row_stride(a, width);
  Out* out = static_cast<Out*>(a.out) + row0 * stride + first;
  for (int64_t r = 0; r < rows; r++, out += stride) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int64_t n = min(kLanes, columns - c);
      const f32x16 value = sums.at(r, column + c, first + c, n);
      store_partial(out + c, bias ? value + load_partial(bias + first + c, n) : value, n);
    }
  }
}

// x as it would be after a store and a load of T.
template <class T>
TOKSERVE_INLINE f32x16 rounded(f32x16 x) {
  T words[kLanes];
  store(words, x);
  return load(words);
}
template <>
TOKSERVE_INLINE f32x16 rounded<float>(f32x16 x) {
  return x;
}

// A panel's sums [rows][gate | up] become activation(gate) * up.
template <class T, class Activation, class Args, class Sums>
void write_gated(const Args& a, const Sums& sums, int64_t row0, int64_t rows, int64_t columns, int64_t first) {
  const T* bias = static_cast<const T*>(a.bias);
  T* out = static_cast<T*>(a.out) + row0 * a.n + first;
  for (int64_t r = 0; r < rows; r++, out += a.n) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int64_t n = min(kLanes, columns - c);
      f32x16 gate = sums.at(r, c, first + c, n), up = sums.at(r, kGatedPanel + c, a.n + first + c, n);
      if (a.bias) gate = gate + load_partial(bias + first + c, n), up = up + load_partial(bias + a.n + first + c, n);
      store_partial(out + c, gated<Activation>(rounded<T>(gate), rounded<T>(up)), n);
    }
  }
}

template <class T, class Args, class Sums>
void write_panel(const Args& a, const Sums& sums, int64_t row0, int64_t rows, int64_t panel) {
  const int64_t first = panel * (a.gate == Gate::none ? kPanel : kGatedPanel);
  const int64_t columns = min(a.gate == Gate::none ? kPanel : kGatedPanel, a.n - first);
  switch (a.gate) {
    case Gate::silu: return write_gated<T, Silu>(a, sums, row0, rows, columns, first);
    case Gate::gelu: return write_gated<T, Gelu>(a, sums, row0, rows, columns, first);
    case Gate::clamped: return write_gated<T, Clamped>(a, sums, row0, rows, columns, first);
    case Gate::both:  // all of the gate, then all of the up projection
      write_out<T, T>(a, sums, row0, rows, 0, columns, first, 2 * a.n);
      return write_out<T, T>(a, sums, row0, rows, kGatedPanel, columns, a.n + first, 2 * a.n);
    case Gate::none: break;
  }
  if (a.out_dtype == DType::f32) write_out<T, float>(a, sums, row0, rows, 0, columns, first, a.n);
  else write_out<T, T>(a, sums, row0, rows, 0, columns, first, a.n);
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
