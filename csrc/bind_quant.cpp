// Bindings of linear_int8, and the packing of its weights, which is the same for all instruction sets.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>

#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

constexpr int64_t kMaxColumns = 1 << 17;  // of K: 127 * 127 * 2^17 is below 2^31, so no sum overflows
constexpr int64_t kQuad = 4;              // elements of K that a panel groups

}  // namespace

int64_t packed_int8_size(int64_t panels, int64_t k) { return panels * kPanel * ((k + kQuad - 1) / kQuad * kQuad); }

namespace {

void quantize_rows(const Tensor& x, const Tensor& values, const Tensor& scales) {
  const char* op = "quantize_rows";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(1), op, "x must be [T,K] with dense rows");
  require(values, Kind::i8, {x.size(0), x.size(1)}, op, "values must be int8 [T,K]");
  require(scales, Kind::f32, {x.size(0)}, op, "scales must be float32 [T]");
  const QuantizeArgs a{.dtype = dtype,
                       .x = x.data<void>(),
                       .values = values.data<int8_t>(),
                       .scales = scales.data<float>(),
                       .k = x.size(1),
                       .x_stride = x.stride(0)};
  const int64_t rows = x.size(0);
  launch([=] {
    over_rows(rows, 0.15 * static_cast<double>(a.k),
              [&](int64_t begin, int64_t end) { kernels().quantize_rows(a, begin, end); });
  });
}

// Rows of a panel: element (row r, column c of K) goes to [c / 4][r][c % 4], plus 128.
void pack_rows(const int8_t* values, int64_t rows, int64_t k, uint8_t* panel) {
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t q = 0; q * kQuad < k; q++) {
      uint32_t quad = 0;
      std::memcpy(&quad, values + r * k + q * kQuad, std::min(kQuad, k - q * kQuad));
      quad ^= 0x80808080;  // the same as adding 128 to each
      std::memcpy(panel + (q * kPanel + r) * kQuad, &quad, sizeof quad);
    }
  }
}

// As put_rows of bind_linear.cpp, with the rows quantized.
void put_rows(const Tensor& weight, const Tensor& packed, const Tensor& scales, int64_t first, bool gated) {
  const char* op = "put_rows_int8";
  const DType dtype = float_type(weight, op);
  require(weight.ndim() == 2 && weight.dense(1), op, "weight must be [N,K] with dense rows");
  require(scales, Kind::f32, {-1}, op, "scales must be float32 [N]");
  const int64_t rows = scales.size(0), last = first + weight.size(0), n = rows / (gated ? 2 : 1), k = weight.size(1);
  require(!gated || rows % 2 == 0, op, "a gated weight has an even number of rows");
  require(first >= 0 && last <= rows, op, "the rows are not all within the packed weight");
  require(k <= kMaxColumns, op, "takes at most 131072 columns");
  require(packed, Kind::u8, {packed_int8_size(panels_of(n, gated), k)}, op, "packed has the wrong size or dtype");
  const int64_t width = gated ? kGatedPanel : kPanel, size = packed_int8_size(1, k);
  nb::gil_scoped_release unlocked;
  parallel(panels_of(n, gated), [&](int64_t i) {
    for (int64_t half = 0; half <= (gated ? 1 : 0); half++) {
      const int64_t top = half * n + i * width, lanes = std::min(width, n - i * width);
      const int64_t begin = std::max(top, first), end = std::min(top + lanes, last);
      if (begin >= end) continue;
      int8_t* values = reinterpret_cast<int8_t*>(thread_scratch((end - begin) * k));
      const char* from = weight.data<char>() + (begin - first) * weight.stride(0) * weight.item();
      const QuantizeArgs a{dtype, from, values, scales.data<float>() + begin, k, weight.stride(0)};
      kernels().quantize_rows(a, 0, end - begin);
      pack_rows(values, end - begin, k, packed.data<uint8_t>() + i * size + (half * width + begin - top) * kQuad);
    }
  });
}

// The product, in the calling thread or in all.
void multiply(Int8Args a, int64_t panels, int64_t sums) {
  const Kernels& kernel = kernels();
  const int64_t m = a.m;
  a.rows = thread_scratch(kernel.int8_rows_size(a));  // of this thread; linear_int8 takes no scratch, so it stays valid
  const double cost = static_cast<double>(sums) * a.k * std::max(0.02, 0.0025 * m);  // estimated ns of one core
  if (cost < 6000.0 || pool().threads() == 1) {
    const Unlocked unlocked(cost > 20000.0);
    kernel.int8_rows(a, 0, m);
    for (int64_t row = 0; row < m; row += kRowBlock) kernel.linear_int8(a, row, 0, panels);
    return;
  }
  const Unlocked unlocked;
  if (m * a.k < 100000) {
    kernel.int8_rows(a, 0, m);
  } else {
    const int64_t pieces = std::min<int64_t>(m, pool().threads() * 4);
    parallel(pieces, [&](int64_t i) { kernel.int8_rows(a, m * i / pieces, m * (i + 1) / pieces); });
  }
  over_panels(m, kernel.int8_rows_size(a), panels, 1, cost,
              [&](int64_t row, int64_t begin, int64_t end) { kernel.linear_int8(a, row, begin, end); });
}

void linear_int8(const Tensor& x, const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& bias,
                 const Tensor& out, Gate gate) {
  const char* op = gate == Gate::none ? "linear_int8" : "gated_linear_int8";
  const Product p = product_of(x, bias, out, gate, op);
  require(p.k <= kMaxColumns, op, "takes at most 131072 columns");
  require(packed, Kind::u8, {packed_int8_size(p.panels, p.k)}, op, "the weight was packed for another shape");
  require(scales, Kind::f32, {p.sums}, op, "scales must be float32 with an entry for each row of the weight");
  if (p.m == 0 || p.n == 0) return;
  const Int8Args a{.dtype = p.dtype,
                   .out_dtype = p.out_dtype,
                   .gate = gate,
                   .x = x.data<void>(),
                   .packed = packed.data<uint8_t>(),
                   .scales = scales.data<float>(),
                   .bias = bias ? bias->data<void>() : nullptr,
                   .out = out.data<void>(),
                   .m = p.m,
                   .n = p.n,
                   .k = p.k,
                   .x_stride = x.stride(0),
                   .rows = nullptr};
  launch([=] { multiply(a, p.panels, p.sums); });
}

}  // namespace

void bind_quant(nb::module_& m) {
  m.def(
      "packed_int8_size",
      [](int64_t outputs, int64_t k, bool gated) { return packed_int8_size(panels_of(outputs, gated), k); },
      nb::arg("outputs"), nb::arg("columns"), nb::arg("gated"));
  m.def("quantize_rows", quantize_rows);
  m.def("put_rows_int8", put_rows, nb::arg("weight"), nb::arg("packed"), nb::arg("scales"), nb::arg("first"),
        nb::arg("gated"));
  m.def(
      "linear_int8",
      [](const Tensor& x, const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& bias,
         const Tensor& out) { linear_int8(x, packed, scales, bias, out, Gate::none); },
      nb::arg("x"), nb::arg("packed"), nb::arg("scales"), nb::arg("bias").none(), nb::arg("out"));
  m.def(
      "gated_linear_int8",
      [](const Tensor& x, const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& bias,
         const std::optional<std::string>& activation,
         const Tensor& out) { linear_int8(x, packed, scales, bias, out, gate_of(activation)); },
      nb::arg("x"), nb::arg("packed"), nb::arg("scales"), nb::arg("bias").none(), nb::arg("activation").none(),
      nb::arg("out"));
}

}  // namespace tokserve
