// linear: x [M, K] times packed weights, plus bias, rounded once; for a gated weight, followed by its activation.
// K is never split between threads or sums; all rows use a panel's block of K, which fits the L1 cache, before the next
// block is read.
#include "epilogue.h"
#include "table.h"
#include "tile.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// Rows of x as the format reads them: in place where possible, else converted into scratch [rows][padded K].
template <class T>
const T* rows_in_format(const T* x, int64_t& stride, int64_t rows, int64_t k, int64_t padded, T* scratch) {
  if (k == padded) return x;
  for (int64_t r = 0; r < rows; r++) {
    std::memcpy(scratch + r * padded, x + r * stride, k * sizeof(T));
    std::memset(scratch + r * padded + k, 0, (padded - k) * sizeof(T));
  }
  stride = padded;
  return scratch;
}

template <class T>
const float* widen_rows(const T* x, int64_t& stride, int64_t rows, int64_t k, int64_t padded, float* scratch) {
  for (int64_t r = 0; r < rows; r++) {
    float* to = scratch + r * padded;
    for (int64_t i = 0; i < k; i += kLanes)
      store_partial(to + i, load_partial(x + r * stride + i, k - i), min(kLanes, k - i));
    for (int64_t i = k; i < padded; i++) to[i] = 0.0f;
  }
  stride = padded;
  return scratch;
}
[[maybe_unused]] const float* rows_in_format(const bf16* x, int64_t& stride, int64_t rows, int64_t k, int64_t padded,
                                             float* scratch) {
  return widen_rows(x, stride, rows, k, padded, scratch);
}
[[maybe_unused]] const float* rows_in_format(const f16* x, int64_t& stride, int64_t rows, int64_t k, int64_t padded,
                                             float* scratch) {
  return widen_rows(x, stride, rows, k, padded, scratch);
}

template <class T>
void linear_typed(const LinearArgs& a, int64_t row0, int64_t begin, int64_t end, char* scratch) {
  using Format = typename FormatOf<T>::Format;
  const int64_t rows = min(kRowBlock, a.m - row0), padded = round_up(a.k, Format::kDepth);
  float* sums = reinterpret_cast<float*>(scratch);
  int64_t stride = a.x_stride;
  const T* x = static_cast<const T*>(a.x) + row0 * stride;
  float* widened = sums + kRowBlock * kPanel;
  const bool shares = kTileVectors == 1 || !a.cheap_widening;  // with few registers, sharing also avoids spills
  const typename Format::Row* format_rows = rows_in_format(
      x, stride, rows, a.k, padded, reinterpret_cast<typename Format::Row*>(widened + kDepthBlock<Plain<float>>));
  for (int64_t panel = begin; panel < end; panel++) {
    const auto* w = static_cast<const typename Format::Weight*>(a.packed) + panel * padded * kPanel;
    multiply_panel<Format>(format_rows, stride, rows, w, padded, sums, shares ? widened : nullptr);
    write_panel<T>(a, FloatSums{sums}, row0, rows, panel);
  }
}

}  // namespace

int64_t linear_scratch(const LinearArgs& a) {
  const int64_t rows = min(kRowBlock, a.m);
  return (kRowBlock * kPanel + kDepthBlock<Plain<float>> + rows * round_up(a.k, 2)) *
         static_cast<int64_t>(sizeof(float));
}

int64_t linear_panels(const LinearArgs& a) {
  int64_t panels = 1;
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    if (sizeof(typename FormatOf<T>::Format::Row) != sizeof(T)) panels = 4;
  });
  return panels;
}

void linear(const LinearArgs& a, int64_t row0, int64_t begin, int64_t end, char* scratch) {
  with_type(a.dtype, [&](auto x) { linear_typed<decltype(x)>(a, row0, begin, end, scratch); });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
