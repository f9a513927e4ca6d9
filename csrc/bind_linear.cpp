// Bindings of the packed matrix product, and the packing itself, which is the same for all instruction sets.
#include <nanobind/stl/optional.h>

#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

// Elements of a packed weight: N padded to panels of 64; bfloat16 takes K in pairs.
int64_t packed_size(int64_t n, int64_t k, bool pairs) {
  return (n + kPanel - 1) / kPanel * kPanel * (pairs ? (k + 1) / 2 * 2 : k);
}

// Reading a weight is what decoding waits for: huge pages spare it most address translations.
void advise_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t huge = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + huge - 1) / huge * huge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / huge * huge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: may be refused
#else
  (void)memory, (void)bytes;
#endif
}

// One panel: element (row r, column c of K) goes to [c / depth][r][c % depth].
template <class T>
void pack_panel(const T* weight, int64_t stride, int64_t rows, int64_t k, int64_t depth, T* panel) {
  const int64_t padded = (k + depth - 1) / depth * depth;
  if (rows < kPanel || padded != k) std::memset(static_cast<void*>(panel), 0, padded * kPanel * sizeof(T));
  constexpr int64_t stretch = 64;  // of K at a time, so that the lines written stay in the cache
  for (int64_t begin = 0; begin < k; begin += stretch) {
    const int64_t end = std::min(begin + stretch, k);
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = begin; c < end; c++) panel[(c / depth * kPanel + r) * depth + c % depth] = weight[r * stride + c];
    }
  }
}

void pack(const Tensor& weight, const Tensor& packed) {
  const char* op = "pack_linear";
  float_type(weight, op);
  require(weight.ndim() == 2 && weight.dense(1), op, "weight must be [N,K] with dense rows");
  const int64_t n = weight.size(0), k = weight.size(1);
  const bool pairs = weight.kind() == Kind::bf16;
  require(packed, weight.kind(), {packed_size(n, k, pairs)}, op, "packed has the wrong size or dtype");
  nb::gil_scoped_release unlocked;
  advise_huge_pages(packed.data<void>(), packed.elements() * packed.item());
  const int64_t panel = packed_size(kPanel, k, pairs);
  parallel((n + kPanel - 1) / kPanel, [&](int64_t i) {
    const int64_t rows = std::min(kPanel, n - i * kPanel), from = i * kPanel * weight.stride(0);
    if (weight.item() == 2) {
      pack_panel(weight.data<uint16_t>() + from, weight.stride(0), rows, k, pairs ? 2 : 1, packed.data<uint16_t>() + i * panel);
    } else {
      pack_panel(weight.data<uint32_t>() + from, weight.stride(0), rows, k, 1, packed.data<uint32_t>() + i * panel);
    }
  });
}

void linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, const Tensor& out) {
  const char* op = "linear";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(1), op, "x must be [T,K] with dense rows");
  require(out.ndim() == 2 && out.dense() && out.size(0) == x.size(0), op, "out must be contiguous [T,N]");
  require(out.kind() == x.kind() || out.kind() == Kind::f32, op, "out must be float32 or have x's dtype");
  const int64_t m = x.size(0), k = x.size(1), n = out.size(1);
  require(packed, x.kind(), {packed_size(n, k, dtype == DType::bf16)}, op, "the weight was packed for another shape or dtype");
  if (bias) require(*bias, x.kind(), {n}, op, "bias must be [N] of x's dtype");
  const LinearArgs a{dtype,         float_type(out, op), x.data<void>(), packed.data<void>(), bias ? bias->data<void>() : nullptr,
                     out.data<void>(), m, n, k, x.stride(0)};
  if (m == 0 || n == 0) return;
  const Kernels& kernel = kernels();
  const int64_t scratch = kernel.linear_scratch(a), panels = (n + kPanel - 1) / kPanel;
  const double cost = static_cast<double>(n) * k * std::max(0.04, 0.005 * m);  // ns of one core, about
  if (cost < 6000.0 || pool().threads() == 1) {
    std::optional<nb::gil_scoped_release> unlocked;
    if (cost > 20000.0) unlocked.emplace();
    for (int64_t row = 0; row < m; row += kRowBlock) kernel.linear(a, row, 0, panels, thread_scratch(scratch));
    return;
  }
  nb::gil_scoped_release unlocked;
  // Pieces of about 8 us: small enough to balance, large enough to share what a piece prepares.
  const int64_t blocks = (m + kRowBlock - 1) / kRowBlock;
  const int64_t wanted = std::max<int64_t>(pool().threads(), static_cast<int64_t>(cost / blocks / 8000.0));
  const int64_t pieces = std::min(panels, wanted);
  parallel(blocks * pieces, [&](int64_t i) {
    const int64_t block = i / pieces, piece = i % pieces;
    kernel.linear(a, block * kRowBlock, panels * piece / pieces, panels * (piece + 1) / pieces, thread_scratch(scratch));
  });
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("packed_size", packed_size, nb::arg("rows"), nb::arg("columns"), nb::arg("pairs"));
  m.def("pack_linear", pack);
  m.def("linear", linear, nb::arg("x"), nb::arg("packed"), nb::arg("bias").none(), nb::arg("out"));
}

}  // namespace tokserve
