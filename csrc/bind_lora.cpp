// Binding of what low-rank adapters add to a projection.
#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

void add_lora(const Tensor& out, const Tensor& x, const Tensor& adapters, const Tensor& down, const Tensor& up,
              const Tensor& ranks, const Tensor& scales) {
  const char* op = "add_lora";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(1), op, "x must be [T,K] with dense rows");
  require(out.ndim() == 2 && out.dense(1) && out.size(0) == x.size(0) && out.kind() == x.kind(), op,
          "out must be [T,N] of x's dtype with dense rows");
  require(down, x.kind(), {-1, -1, x.size(1)}, op, "down must be contiguous [S,R,K] of x's dtype");
  const int64_t rows = x.size(0), slots = down.size(0), r = down.size(1);
  require(up, x.kind(), {slots, r, out.size(1)}, op, "up must be contiguous [S,R,N] of x's dtype");
  require(adapters, Kind::i32, {rows}, op, "adapters must be int32 [T]");
  require(ranks, Kind::i32, {slots}, op, "ranks must be int32 [S]");
  require(scales, Kind::f32, {slots}, op, "scales must be float32 [S]");
  const LoraArgs a{dtype, x.data<void>(), adapters.data<int32_t>(), down.data<void>(), up.data<void>(),
                   ranks.data<int32_t>(), scales.data<float>(), out.data<void>(), x.size(1), out.size(1), r,
                   x.stride(0), out.stride(0)};
  int64_t largest = 0;
  for (int64_t s = 0; s < slots; s++) {
    require(a.ranks[s] >= 0 && a.ranks[s] <= r, op, "a rank is above R");
    largest = std::max<int64_t>(largest, a.ranks[s]);
  }
  for (int64_t t = 0; t < rows; t++) require(a.adapters[t] < slots, op, "an adapter has no slot");
  const Kernels& kernel = kernels();
  const int64_t scratch = kernel.lora_scratch(a);
  constexpr int64_t together = 4;  // neighbours of one adapter share the reading of its weights: keep them with one thread
  over_rows((rows + together - 1) / together, together * (20.0 + 0.05 * largest * (a.k + a.n)), [&](int64_t begin, int64_t end) {
    kernel.add_lora(a, begin * together, std::min(end * together, rows), thread_scratch(scratch));
  });
}

}  // namespace

void bind_lora(nb::module_& m) {
  m.def("add_lora", add_lora, nb::arg("out"), nb::arg("x"), nb::arg("adapters"), nb::arg("down"), nb::arg("up"),
        nb::arg("ranks"), nb::arg("scales"));
}

}  // namespace tokserve
