// linear: x [M, K] times packed weights, plus bias, rounded once; and, where the weight is gated, an activation of it.
// K is never split between threads or sums; the panel's stretch of K that fits the first-level cache is used by all
// rows before the next stretch is read.
#include "activation.h"
#include "table.h"
#include "tile.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Rows of x as the format wants them: in place if they are so already, else in scratch [rows][padded K].
template <class T>
const T* rows_of(const T* x, int64_t& stride, int64_t rows, int64_t k, int64_t padded, T* scratch) {
  if (k == padded) return x;
  for (int64_t r = 0; r < rows; r++) {
    std::memcpy(scratch + r * padded, x + r * stride, k * sizeof(T));
    std::memset(scratch + r * padded + k, 0, (padded - k) * sizeof(T));
  }
  stride = padded;
  return scratch;
}

template <class T>
const float* widened_rows(const T* x, int64_t& stride, int64_t rows, int64_t k, int64_t padded, float* scratch) {
  for (int64_t r = 0; r < rows; r++) {
    float* to = scratch + r * padded;
    for (int64_t i = 0; i < k; i += kLanes) store_part(to + i, load_part(x + r * stride + i, k - i), least(kLanes, k - i));
    for (int64_t i = k; i < padded; i++) to[i] = 0.0f;
  }
  stride = padded;
  return scratch;
}
[[maybe_unused]] const float* rows_of(const bf16* x, int64_t& stride, int64_t rows, int64_t k, int64_t padded, float* scratch) {
  return widened_rows(x, stride, rows, k, padded, scratch);
}
[[maybe_unused]] const float* rows_of(const f16* x, int64_t& stride, int64_t rows, int64_t k, int64_t padded, float* scratch) {
  return widened_rows(x, stride, rows, k, padded, scratch);
}

template <class T, class Out>
void write_out(const LinearArgs& a, const float* sums, int64_t row0, int64_t rows, int64_t column0) {
  const int64_t columns = least(kPanel, a.n - column0);
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + column0 : nullptr;
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int64_t n = least(kLanes, columns - c);
    const F shift = bias ? load_part(bias + c, n) : fzero();
    Out* out = static_cast<Out*>(a.out) + row0 * a.n + column0 + c;
    for (int64_t r = 0; r < rows; r++) {
      const F value = load(sums + r * kPanel + c);
      store_part(out + r * a.n, bias ? value + shift : value, n);
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
template <class T, class Activation>
void write_gated(const LinearArgs& a, const float* sums, int64_t row0, int64_t rows, int64_t column0) {
  const Activation activation;
  const int64_t columns = least(kGatedPanel, a.n - column0);
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + column0 : nullptr;
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int64_t n = least(kLanes, columns - c);
    const F gate_shift = bias ? load_part(bias + c, n) : fzero(), up_shift = bias ? load_part(bias + a.n + c, n) : fzero();
    T* out = static_cast<T*>(a.out) + row0 * a.n + column0 + c;
    for (int64_t r = 0; r < rows; r++) {
      const F gate = load(sums + r * kPanel + c), up = load(sums + r * kPanel + kGatedPanel + c);
      const F shifted_gate = rounded<T>(bias ? gate + gate_shift : gate), shifted_up = rounded<T>(bias ? up + up_shift : up);
      store_part(out + r * a.n, activation(shifted_gate) * shifted_up, n);
    }
  }
}

// A panel's sums [rows][gate | up] go where the gate's outputs and, behind all of them, what they gate lie.
template <class T>
void write_both(const LinearArgs& a, const float* sums, int64_t row0, int64_t rows, int64_t column0) {
  const int64_t columns = least(kGatedPanel, a.n - column0);
  for (int64_t half = 0; half < 2; half++) {
    const int64_t first = half * a.n + column0;
    const T* bias = a.bias ? static_cast<const T*>(a.bias) + first : nullptr;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int64_t n = least(kLanes, columns - c);
      const F shift = bias ? load_part(bias + c, n) : fzero();
      T* out = static_cast<T*>(a.out) + row0 * 2 * a.n + first + c;
      for (int64_t r = 0; r < rows; r++) {
        const F value = load(sums + r * kPanel + half * kGatedPanel + c);
        store_part(out + r * 2 * a.n, bias ? value + shift : value, n);
      }
    }
  }
}

template <class Format, class T>
void linear_typed(const LinearArgs& a, int64_t row0, int64_t begin, int64_t end, char* scratch) {
  const int64_t rows = least(kRowBlock, a.m - row0), padded = rounded_up(a.k, Format::kDepth);
  float* sums = reinterpret_cast<float*>(scratch);
  int64_t stride = a.x_stride;
  const T* x = static_cast<const T*>(a.x) + row0 * stride;
  const typename Format::Row* ready =
      rows_of(x, stride, rows, a.k, padded, reinterpret_cast<typename Format::Row*>(sums + kRowBlock * kPanel));
  for (int64_t panel = begin; panel < end; panel++) {
    const auto* w = static_cast<const typename Format::Weight*>(a.packed) + panel * padded * kPanel;
    multiply_panel<Format>(ready, stride, rows, w, padded, sums);
    if (a.gate == Gate::silu) write_gated<T, Silu>(a, sums, row0, rows, panel * kGatedPanel);
    else if (a.gate == Gate::gelu) write_gated<T, Gelu>(a, sums, row0, rows, panel * kGatedPanel);
    else if (a.gate == Gate::both) write_both<T>(a, sums, row0, rows, panel * kGatedPanel);
    else if (a.out_dtype == DType::f32) write_out<T, float>(a, sums, row0, rows, panel * kPanel);
    else write_out<T, T>(a, sums, row0, rows, panel * kPanel);
  }
}

}  // namespace

int64_t linear_scratch(const LinearArgs& a) {
  const int64_t rows = least(kRowBlock, a.m);
  return (kRowBlock * kPanel + rows * rounded_up(a.k, 2)) * static_cast<int64_t>(sizeof(float));
}

void linear(const LinearArgs& a, int64_t row0, int64_t begin, int64_t end, char* scratch) {
  switch (a.dtype) {
    case DType::f32: return linear_typed<Plain<float>, float>(a, row0, begin, end, scratch);
    case DType::bf16: return linear_typed<Pairs, bf16>(a, row0, begin, end, scratch);
    case DType::f16: return linear_typed<Plain<f16>, f16>(a, row0, begin, end, scratch);
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
