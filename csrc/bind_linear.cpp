// Bindings of linear, and the packing of its weights, which is the same for all instruction sets.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>

#include "bind.h"
#include "cpu.h"

namespace nb = nanobind;

namespace tokserve {

Gate gate_of(const std::optional<std::string>& activation) {
  if (!activation) return Gate::both;
  require(*activation == "silu" || *activation == "gelu_tanh", "gated_linear", "activation must be silu or gelu_tanh");
  return *activation == "silu" ? Gate::silu : Gate::gelu;
}

Product product_of(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& out, Gate gate, const char* op) {
  const bool gated = gate != Gate::none;
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(1), op, "x must be [T,K] with dense rows");
  require(out.ndim() == 2 && out.dense() && out.size(0) == x.size(0), op, "out must be contiguous [T,N]");
  require(out.kind() == x.kind() || (out.kind() == Kind::f32 && !gated), op, "out must be float32 or have x's dtype");
  require(gate != Gate::both || out.size(1) % 2 == 0, op, "a gated product has an even number of columns");
  const int64_t n = gate == Gate::both ? out.size(1) / 2 : out.size(1), sums = gated ? 2 * n : n;
  if (bias) require(*bias, x.kind(), {sums}, op, "bias must have x's dtype and an entry for each row of the weight");
  return {dtype, float_type(out, op), x.size(0), n, x.size(1), panels_of(n, gated), sums};
}

int64_t packed_size(int64_t panels, int64_t k, bool pairs) { return panels * kPanel * (pairs ? (k + 1) / 2 * 2 : k); }

namespace {

// Rows of one panel: element (row r, column c of K) goes to [c / depth][r][c % depth].
template <class T>
void pack_rows(const T* weight, int64_t stride, int64_t rows, int64_t k, int64_t depth, T* panel) {
  constexpr int64_t block = 64 / sizeof(T);  // of K at a time: a cache line of each row; the output stays in the cache
  for (int64_t begin = 0; begin < k; begin += block) {
    const int64_t end = std::min(begin + block, k);
    for (int64_t r = 0; r < rows; r++) {
      const T* from = weight + r * stride;
      if (depth == 1) {
        for (int64_t c = begin; c < end; c++) panel[c * kPanel + r] = from[c];
      } else {
        for (int64_t c = begin; c < end; c++) panel[(c / 2 * kPanel + r) * 2 + c % 2] = from[c];
      }
    }
  }
}

using Pair __attribute__((may_alias)) = uint32_t;

// pack_rows, moving each pair as one word where pairs are aligned.
template <class T>
void pack_words(const T* weight, int64_t stride, int64_t rows, int64_t k, int64_t depth, T* panel) {
  if (depth == 2 && k % 2 == 0 && stride % 2 == 0 && reinterpret_cast<uintptr_t>(weight) % 4 == 0) {
    const auto* words = reinterpret_cast<const Pair*>(weight);
    return pack_rows(words, stride / 2, rows, k / 2, 1, reinterpret_cast<Pair*>(panel));
  }
  pack_rows(weight, stride, rows, k, depth, panel);
}

template <class T>
void pack_panels(const Tensor& weight, const Tensor& packed, bool gated, int64_t depth) {
  const int64_t k = weight.size(1), n = weight.size(0) / (gated ? 2 : 1), size = packed_size(1, k, depth == 2);
  const int64_t width = gated ? kGatedPanel : kPanel, stride = weight.stride(0);
  parallel(panels_of(n, gated), [&](int64_t i) {
    const int64_t rows = std::min(width, n - i * width);
    T* panel = packed.data<T>() + i * size;
    if (rows < width || k % depth != 0) std::memset(static_cast<void*>(panel), 0, size * sizeof(T));
    const T* from = weight.data<T>() + i * width * stride;
    pack_words(from, stride, rows, k, depth, panel);
    if (gated) pack_words(from + n * stride, stride, rows, k, depth, panel + width * depth);
  });
}

void pack(const Tensor& weight, const Tensor& packed, bool gated) {
  const char* op = gated ? "pack_gated" : "pack_linear";
  float_type(weight, op);
  require(weight.ndim() == 2 && weight.dense(1), op, "weight must be [N,K] with dense rows");
  require(!gated || weight.size(0) % 2 == 0, op, "a gated weight has an even number of rows");
  const bool pairs = weight.kind() == Kind::bf16;
  const int64_t panels = panels_of(weight.size(0) / (gated ? 2 : 1), gated);
  require(packed, weight.kind(), {packed_size(panels, weight.size(1), pairs)}, op,
          "packed has the wrong size or dtype");
  nb::gil_scoped_release unlocked;
  if (weight.item() == 2) pack_panels<uint16_t>(weight, packed, gated, pairs ? 2 : 1);
  else pack_panels<uint32_t>(weight, packed, gated, 1);
}

// Gathers a row of a panel, whose groups of `depth` elements are 64 * depth elements apart.
template <class T>
void unpack_row(const T* panel, int64_t row, int64_t k, int64_t depth, T* out) {
  const T* from = panel + row * depth;
  for (int64_t c = 0; c < k; c += depth, from += kPanel * depth) {
    for (int64_t i = 0; i < std::min(depth, k - c); i++) out[c + i] = from[i];
  }
}

template <class T>
void unpack_rows(const int64_t* ids, int64_t count, const T* packed, int64_t k, int64_t depth, T* out) {
  const int64_t size = packed_size(1, k, depth == 2);
  over_rows(count, 50 + 3.0 * k, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      unpack_row(packed + ids[t] / kPanel * size, ids[t] % kPanel, k, depth, out + t * k);
    }
  });
}

void embedding(const Tensor& ids, const Tensor& packed, int64_t n, float multiplier, const Tensor& out) {
  const char* op = "embedding";
  const DType dtype = float_type(packed, op);
  require(ids, Kind::i64, {-1}, op, "ids must be int64 [T]");
  require(out, packed.kind(), {ids.size(0), -1}, op, "out must be [T,K] of the weight's dtype");
  const bool pairs = packed.kind() == Kind::bf16, words = packed.item() == 2;
  const int64_t count = ids.size(0), k = out.size(1);
  require(packed, packed.kind(), {packed_size(panels_of(n, false), k, pairs)}, op,
          "the weight was packed for another shape");
  const int64_t* id = ids.data<int64_t>();
  const void* from = packed.data<void>();
  void* to = out.data<void>();
  launch([=] {
    for (int64_t t = 0; t < count; t++) require(id[t] >= 0 && id[t] < n, op, "an id is outside the weight's rows");
    if (words) unpack_rows(id, count, static_cast<const uint16_t*>(from), k, pairs ? 2 : 1, static_cast<uint16_t*>(to));
    else unpack_rows(id, count, static_cast<const uint32_t*>(from), k, 1, static_cast<uint32_t*>(to));
    if (multiplier == 1.0f) return;
    const CapArgs scaled{dtype, to, to, k, multiplier, 0.0f};
    over_rows(count, 10 + 0.1 * k, [&](int64_t begin, int64_t end) { kernels().cap(scaled, begin, end); });
  });
}

// The product, in the calling thread or in all.
void multiply(const LinearArgs& a, int64_t panels, int64_t sums) {
  const Kernels& kernel = kernels();
  const int64_t scratch = kernel.linear_scratch(a);
  const double cost = static_cast<double>(sums) * a.k * std::max(0.04, 0.005 * a.m);  // estimated ns of one core
  if (cost < 6000.0 || pool().threads() == 1) {
    const Unlocked unlocked(cost > 20000.0);
    for (int64_t row = 0; row < a.m; row += kRowBlock) kernel.linear(a, row, 0, panels, thread_scratch(scratch));
    return;
  }
  const Unlocked unlocked;
  over_panels(a.m, panels, kernel.linear_panels(a), cost, [&](int64_t row, int64_t begin, int64_t end) {
    kernel.linear(a, row, begin, end, thread_scratch(scratch));
  });
}

void linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, const Tensor& out, Gate gate) {
  const char* op = gate == Gate::none ? "linear" : "gated_linear";
  const Product p = product_of(x, bias, out, gate, op);
  const int64_t size = packed_size(p.panels, p.k, p.dtype == DType::bf16);
  require(packed, x.kind(), {size}, op, "the weight was packed for another shape or dtype");
  const LinearArgs a{.dtype = p.dtype,
                     .out_dtype = p.out_dtype,
                     .gate = gate,
                     .x = x.data<void>(),
                     .packed = packed.data<void>(),
                     .bias = bias ? bias->data<void>() : nullptr,
                     .out = out.data<void>(),
                     .m = p.m,
                     .n = p.n,
                     .k = p.k,
                     .x_stride = x.stride(0),
                     .cheap_widening = has_cheap_widening()};
  if (p.m == 0 || p.n == 0) return;
  launch([=] { multiply(a, p.panels, p.sums); });
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def(
      "packed_size",
      [](int64_t outputs, int64_t k, bool pairs, bool gated) {
        return packed_size(panels_of(outputs, gated), k, pairs);
      },
      nb::arg("outputs"), nb::arg("columns"), nb::arg("pairs"), nb::arg("gated"));
  m.def("pack_linear", pack, nb::arg("weight"), nb::arg("packed"), nb::arg("gated"));
  m.def("embedding", embedding, nb::arg("ids"), nb::arg("packed"), nb::arg("rows"), nb::arg("multiplier"),
        nb::arg("out"));
  m.def(
      "linear",
      [](const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, const Tensor& out) {
        linear(x, packed, bias, out, Gate::none);
      },
      nb::arg("x"), nb::arg("packed"), nb::arg("bias").none(), nb::arg("out"));
  m.def(
      "gated_linear",
      [](const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
         const std::optional<std::string>& activation,
         const Tensor& out) { linear(x, packed, bias, out, gate_of(activation)); },
      nb::arg("x"), nb::arg("packed"), nb::arg("bias").none(), nb::arg("activation").none(), nb::arg("out"));
}

}  // namespace tokserve
