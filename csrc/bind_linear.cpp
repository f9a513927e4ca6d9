// Bindings of linear, and the packing of its weights, which is the same for all instruction sets.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>

#include "bind.h"
#include "cpu.h"
#include "transpose.h"

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

// Rows of one panel: element (row r, column c of K) goes to [c / depth][r][c % depth]; the last pair is filled with
// zero.
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
  if (k % depth != 0) {
    for (int64_t r = 0; r < rows; r++) panel[(k / 2 * kPanel + r) * 2 + 1] = T(0);
  }
}

using Word __attribute__((may_alias)) = uint32_t;

// pack_rows for words.  Sixteen rows at a time are as many streams as a processor fetches ahead, and fill cache lines.
void transpose_rows(const Word* weight, int64_t stride, int64_t rows, int64_t k, Word* panel) {
  const int64_t whole = rows / 4 * 4, columns = k / 4 * 4;
  const int64_t bytes = sizeof(Word);
  for (int64_t block = 0; block < whole; block += 16) {
    for (int64_t c = 0; c < columns; c += 4) {
      for (int64_t r = block; r < std::min(block + 16, whole); r += 4) {
        transpose_words(reinterpret_cast<const char*>(weight + r * stride + c), stride * bytes,
                        reinterpret_cast<char*>(panel + c * kPanel + r), kPanel * bytes);
      }
    }
  }
  if (columns < k) pack_rows(weight + columns, stride, whole, k - columns, 1, panel + columns * kPanel);
  if (whole < rows) pack_rows(weight + whole * stride, stride, rows - whole, k, 1, panel + whole);
}

// pack_rows, moving elements of 32 bits, and pairs that are aligned, as words.
template <class T>
void pack_words(const T* weight, int64_t stride, int64_t rows, int64_t k, int64_t depth, T* panel) {
  const int64_t ratio = sizeof(Word) / sizeof(T);  // elements of a word
  const bool aligned = k % ratio == 0 && stride % ratio == 0 && reinterpret_cast<uintptr_t>(weight) % sizeof(Word) == 0;
  if (depth == ratio && aligned) {
    const auto* words = reinterpret_cast<const Word*>(weight);
    transpose_rows(words, stride / ratio, rows, k / ratio, reinterpret_cast<Word*>(panel));
  } else {
    pack_rows(weight, stride, rows, k, depth, panel);
  }
}

// The same of a weight whose columns are adjacent, `stride` elements apart: the rows of a panel lie as they shall.
template <class T>
void pack_columns(const T* weight, int64_t stride, int64_t rows, int64_t k, int64_t depth, T* panel) {
  for (int64_t c = 0; c < k; c += depth) {
    const T* from = weight + c * stride;
    T* to = panel + c * kPanel;
    if (depth == 1) {
      std::memcpy(to, from, rows * sizeof(T));
      continue;
    }
    const T* then = c + 1 < k ? from + stride : nullptr;
    for (int64_t i = 0; i < rows; i++) {
      to[2 * i] = from[i];
      to[2 * i + 1] = then ? then[i] : T{0};
    }
  }
}

// Puts a weight's rows into the panels of one with n outputs, `first` before them; of a gated one there are 2 * n rows,
// those of the gate above those that they gate.
template <class T>
void put_panels(const Tensor& weight, const Tensor& packed, int64_t n, int64_t first, bool gated, int64_t depth) {
  const int64_t k = weight.size(1), size = packed_size(1, k, depth == 2), last = first + weight.size(0);
  const int64_t width = gated ? kGatedPanel : kPanel, panels = panels_of(n, gated);
  const bool by_columns = !weight.dense(1);
  const int64_t stride = weight.stride(by_columns ? 1 : 0), row_stride = weight.stride(0);
  const int64_t begin = gated ? 0 : first / kPanel, end = gated ? panels : panels_of(last, false);
  parallel(end - begin, [&](int64_t i) {
    const int64_t index = begin + i, lanes = std::min(width, n - index * width);
    for (int64_t half = 0; half <= (gated ? 1 : 0); half++) {
      const int64_t top = half * n + index * width, from = std::max(top, first), to = std::min(top + lanes, last);
      if (from >= to) continue;
      T* lane = packed.data<T>() + index * size + (half * width + from - top) * depth;
      const T* rows = weight.data<T>() + (from - first) * row_stride;
      if (by_columns) pack_columns(rows, stride, to - from, k, depth, lane);
      else pack_words(rows, stride, to - from, k, depth, lane);
    }
  });
}

void put_rows(const Tensor& weight, const Tensor& packed, int64_t rows, int64_t first, bool gated) {
  const char* op = "put_rows";
  float_type(weight, op);
  require(weight.ndim() == 2 && (weight.dense(1) || weight.stride(0) == 1), op,
          "weight must be [N,K] with dense rows or columns");
  require(!gated || rows % 2 == 0, op, "a gated weight has an even number of rows");
  require(first >= 0 && first + weight.size(0) <= rows, op, "the rows are not all within the packed weight");
  const bool pairs = weight.kind() == Kind::bf16;
  const int64_t n = rows / (gated ? 2 : 1);
  require(packed, weight.kind(), {packed_size(panels_of(n, gated), weight.size(1), pairs)}, op,
          "packed has the wrong size or dtype");
  if (weight.size(0) == 0 || weight.size(1) == 0) return;
  nb::gil_scoped_release unlocked;
  if (weight.item() == 2) put_panels<uint16_t>(weight, packed, n, first, gated, pairs ? 2 : 1);
  else put_panels<uint32_t>(weight, packed, n, first, gated, 1);
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
  over_panels(
      a.m, a.m * a.k * (a.dtype == DType::f32 ? 4 : 2), panels, kernel.linear_panels(a), cost,
      [&](int64_t row, int64_t begin, int64_t end) { kernel.linear(a, row, begin, end, thread_scratch(scratch)); });
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
  m.def("put_rows", put_rows, nb::arg("weight"), nb::arg("packed"), nb::arg("rows"), nb::arg("first"),
        nb::arg("gated"));
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
