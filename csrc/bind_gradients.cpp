// Bindings of the gradients of norms and activations.  The caller allocates the outputs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <vector>

#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

constexpr int64_t kSummedRows = 128;  // whose parts of a weight's gradient are added before they meet the others'

void activation_gradients(const Tensor& grad, const Tensor& x, const std::string& name, bool gated, const Tensor& out) {
  const char* op = "activation_gradients";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense() && (!gated || x.size(1) % 2 == 0), op, "x must be contiguous [T,I] or [T,2I]");
  const int64_t rows = x.size(0), width = gated ? x.size(1) / 2 : x.size(1);
  require(grad, x.kind(), {rows, width}, op, "the gradient must be [T,I] of x's dtype");
  require(out, x.kind(), {rows, x.size(1)}, op, "out must be like x");
  const ActivationGradientsArgs a{dtype,          activation_of(name), gated, grad.data<void>(),
                                  x.data<void>(), out.data<void>(),    width};
  launch([=] {
    over_rows(rows, 10 + 1.2 * width,
              [&](int64_t begin, int64_t end) { kernels().activation_gradients(a, begin, end); });
  });
}

void norm_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight, float eps,
                    const std::optional<Tensor>& carried, const Tensor& out, const Tensor& grad_weight) {
  const char* op = "norm_gradients";
  require(!capturing.into, op, "cannot be captured");
  const DType dtype = float_type(x, op), grad_dtype = float_type(grad, op);
  require(x.ndim() == 2 && x.dense(), op, "x must be contiguous [T,H]");
  const int64_t rows = x.size(0), width = x.size(1);
  require(grad_dtype == dtype || grad_dtype == DType::f32, op, "the gradient must be float32 or have x's dtype");
  require(grad, grad.kind(), {rows, width}, op, "the gradient must be contiguous [T,H]");
  require(weight, Kind::f32, {width}, op, "weight must be float32 [H]");
  if (carried) require(*carried, x.kind(), {rows, width}, op, "carried must be like x");
  require(out, x.kind(), {rows, width}, op, "out must be like x");
  require(grad_weight, Kind::f32, {width}, op, "grad_weight must be float32 [H]");
  const NormGradientsArgs a{dtype,
                            grad_dtype,
                            grad.data<void>(),
                            x.data<void>(),
                            weight.data<float>(),
                            carried ? carried->data<void>() : nullptr,
                            out.data<void>(),
                            width,
                            eps};
  const int64_t blocks = (rows + kSummedRows - 1) / kSummedRows;
  std::vector<float> sums(blocks * width);
  over_rows(blocks, kSummedRows * (20.0 + 0.5 * width), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) {
      const int64_t first = block * kSummedRows;
      kernels().norm_gradients(a, first, std::min(first + kSummedRows, rows), sums.data() + block * width);
    }
  });
  float* total = grad_weight.data<float>();
  for (int64_t i = 0; i < width; i++) total[i] = 0.0f;
  for (int64_t block = 0; block < blocks; block++) {
    for (int64_t i = 0; i < width; i++) total[i] += sums[block * width + i];
  }
}

}  // namespace

void bind_gradients(nb::module_& m) {
  m.def("activation_gradients", activation_gradients);
  m.def("norm_gradients", norm_gradients, nb::arg("grad"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"),
        nb::arg("carried").none(), nb::arg("out"), nb::arg("grad_weight"));
}

}  // namespace tokserve
