// Bindings of linear_wna16, and the packing of its weights, which is the same for all instruction sets.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>

#include "wna16.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

constexpr int64_t kDepth = 8;  // elements of K that a panel groups

int64_t padded(int64_t k) { return (k + kDepth - 1) / kDepth * kDepth; }
int64_t panel_size(int64_t k, int bits) { return padded(k) * kPanel * bits / 8; }

// One output's codes: of 4 bits, nibble j of word (k / 8, k % 2) is that of k = 8 i + 2 j + k % 2; of 8 bits, bytes in
// pairs.  `to`: the output's first word or pair.
void pack_row(const uint8_t* codes, int64_t k, int bits, uint8_t* to) {
  if (bits == 8) {
    for (int64_t i = 0; i < k; i++) to[i / 2 * 2 * kPanel + i % 2] = codes[i];
    return;
  }
  for (int64_t i = 0; i < k; i += kDepth, to += kPanel * 4) {
    uint8_t eight[kDepth] = {};
    std::memcpy(eight, codes + i, std::min(kDepth, k - i));
    uint16_t words[2] = {};
    for (int j = 0; j < kDepth; j++) words[j % 2] |= static_cast<uint16_t>((eight[j] & 15) << (j / 2 * 4));
    std::memcpy(to, words, sizeof words);
  }
}

// packed: zero wherever no output or input is.
void pack(const Tensor& codes, int bits, const Tensor& packed, bool gated) {
  const char* op = "pack_wna16";
  require(bits == 4 || bits == 8, op, "takes 4 or 8 bits");
  require(codes, Kind::u8, {-1, -1}, op, "codes must be uint8 [N,K]");
  require(!gated || codes.size(0) % 2 == 0, op, "a gated weight has an even number of rows");
  const int64_t n = codes.size(0) / (gated ? 2 : 1), k = codes.size(1), size = panel_size(k, bits);
  require(packed, Kind::u8, {panels_of(n, gated) * size}, op, "packed has the wrong size or dtype");
  nb::gil_scoped_release unlocked;
  const int64_t width = gated ? kGatedPanel : kPanel;
  parallel(panels_of(n, gated), [&](int64_t i) {
    uint8_t* panel = packed.data<uint8_t>() + i * size;
    const int64_t rows = std::min(width, n - i * width);
    std::memset(panel, 0, size);
    for (int64_t column = 0; column < kPanel; column += width) {
      const uint8_t* from = codes.data<uint8_t>() + ((column > 0 ? n : 0) + i * width) * k;
      for (int64_t r = 0; r < rows; r++) pack_row(from + r * k, k, bits, panel + (column + r) * (bits == 4 ? 4 : 2));
    }
  });
}

// A word of a row of nibbles, low halves first, as the panel's: the low halves, then the high ones.
uint32_t by_parity(uint32_t word) {
  const auto gathered = [](uint32_t nibbles) {  // in the low half of each byte
    nibbles = (nibbles | nibbles >> 4) & 0x00ff00ff;
    return (nibbles | nibbles >> 8) & 0xffff;
  };
  return gathered(word & 0x0f0f0f0f) | gathered(word >> 4 & 0x0f0f0f0f) << 16;
}

// pack of rows of nibbles, whose words are those of the panel but for the order within.  Sixteen rows at a time are as
// many streams as a processor fetches ahead, and fill cache lines.
void pack_nibbles(const Tensor& codes, const Tensor& packed, bool gated) {
  const char* op = "pack_nibbles";
  require(codes, Kind::u8, {-1, -1}, op, "codes must be uint8 [N,K/2]");
  require(!gated || codes.size(0) % 2 == 0, op, "a gated weight has an even number of rows");
  require(codes.size(1) * 2 % kDepth == 0, op, "K must be a multiple of 8");
  const int64_t n = codes.size(0) / (gated ? 2 : 1), bytes = codes.size(1), size = panel_size(bytes * 2, 4);
  require(packed, Kind::u8, {panels_of(n, gated) * size}, op, "packed has the wrong size or dtype");
  nb::gil_scoped_release unlocked;
  const int64_t width = gated ? kGatedPanel : kPanel, word = sizeof(uint32_t);
  parallel(panels_of(n, gated), [&](int64_t i) {
    uint8_t* panel = packed.data<uint8_t>() + i * size;
    const int64_t rows = std::min(width, n - i * width);
    if (rows < width) std::memset(panel, 0, size);
    for (int64_t column = 0; column < kPanel; column += width) {
      const uint8_t* from = codes.data<uint8_t>() + ((column > 0 ? n : 0) + i * width) * bytes;
      for (int64_t first = 0; first < rows; first += 16) {
        for (int64_t at = 0; at < bytes; at += word) {
          for (int64_t r = first; r < std::min(first + 16, rows); r++) {
            uint32_t eight;
            std::memcpy(&eight, from + r * bytes + at, word);
            eight = by_parity(eight);
            std::memcpy(panel + at * kPanel + (column + r) * word, &eight, word);
          }
        }
      }
    }
  });
}

void quantize(const Tensor& weight, int64_t group, const Tensor& codes, const Tensor& scales) {
  const char* op = "quantize_int4";
  const DType dtype = float_type(weight, op);
  require(weight.ndim() == 2 && weight.dense(1), op, "weight must be [N,K] with dense rows");
  require(group > 0, op, "a group has at least one input");
  const int64_t rows = weight.size(0), k = weight.size(1);
  require(codes, Kind::u8, {rows, k}, op, "codes must be uint8 [N,K]");
  require(scales, Kind::bf16, {rows, (k + group - 1) / group}, op, "scales must be bfloat16 [N, ceil(K / group)]");
  const Int4Args a{dtype, weight.data<void>(), codes.data<uint8_t>(), scales.data<uint16_t>(), k, weight.stride(0),
                   group};
  over_rows(rows, 0.5 * static_cast<double>(k),
            [&](int64_t begin, int64_t end) { kernels().quantize_int4(a, begin, end); });
}

// As put_rows of bind_linear.cpp, with the rows rounded; scales [panels][G][64].
void put_rows(const Tensor& weight, int64_t group, const Tensor& packed, const Tensor& scales, int64_t rows,
              int64_t first, bool gated) {
  const char* op = "put_rows_int4";
  const DType dtype = float_type(weight, op);
  require(weight.ndim() == 2 && weight.dense(1), op, "weight must be [N,K] with dense rows");
  require(group > 0, op, "a group has at least one input");
  require(!gated || rows % 2 == 0, op, "a gated weight has an even number of rows");
  const int64_t n = rows / (gated ? 2 : 1), k = weight.size(1), last = first + weight.size(0);
  const int64_t panels = panels_of(n, gated), groups = (k + group - 1) / group, size = panel_size(k, 4);
  require(first >= 0 && last <= rows, op, "the rows are not all within the packed weight");
  require(packed, Kind::u8, {panels * size}, op, "packed has the wrong size or dtype");
  require(scales, Kind::bf16, {panels, groups, kPanel}, op, "scales must be bfloat16 [panels,G,64]");
  const int64_t width = gated ? kGatedPanel : kPanel;
  nb::gil_scoped_release unlocked;
  parallel(panels * (gated ? 2 : 1), [&](int64_t i) {
    const int64_t half = i / panels, index = i % panels, top = half * n + index * width;
    const int64_t begin = std::max(top, first), end = std::min(top + std::min(width, n - index * width), last);
    if (begin >= end) return;
    uint8_t* codes =
        reinterpret_cast<uint8_t*>(thread_scratch(k + groups * static_cast<int64_t>(sizeof(uint16_t)) + 2));
    uint16_t* rounded = reinterpret_cast<uint16_t*>(codes + (k + 1) / 2 * 2);
    uint16_t* to = scales.data<uint16_t>() + index * groups * kPanel;
    for (int64_t row = begin; row < end; row++) {
      const char* from = weight.data<char>() + (row - first) * weight.stride(0) * weight.item();
      kernels().quantize_int4({dtype, from, codes, rounded, k, weight.stride(0), group}, 0, 1);
      const int64_t lane = half * width + row - top;
      pack_row(codes, k, 4, packed.data<uint8_t>() + index * size + lane * 4);
      for (int64_t g = 0; g < groups; g++) to[g * kPanel + lane] = rounded[g];
    }
  });
}

GroupScales scales_of(const Tensor& values, const std::optional<Tensor>& parts, int64_t panels, int64_t groups,
                      int64_t ratio, const char* op) {
  const DType dtype = float_type(values, op);
  require(values, values.kind(), {panels, (groups + ratio - 1) / ratio, kPanel}, op, "scales have the wrong shape");
  if (parts) require(*parts, Kind::i8, {panels, groups, kPanel}, op, "parts of scales have the wrong shape or dtype");
  return {dtype, values.data<void>(), parts ? parts->data<int8_t>() : nullptr, ratio};
}

}  // namespace

Wna16Args weight_args(const Wna16Part& p, const char* op) {
  require(p.bits == 4 || p.bits == 8, op, "takes 4 or 8 bits");
  require(p.group > 0 && p.ratio > 0 && (p.group % kDepth == 0 || p.group >= p.columns), op,
          "groups must be multiples of 8 inputs");
  const int64_t panels = panels_of(p.gated ? p.rows / 2 : p.rows, p.gated);
  const int64_t groups = (p.columns + p.group - 1) / p.group;
  require(p.packed, Kind::u8, {panels * panel_size(p.columns, p.bits)}, op, "the weight was packed for another shape");
  require(p.factors, Kind::i8, {16}, op, "factors must be int8 [16]");
  require(!p.folded || !p.mins, op, "a folded weight has no minima");
  require(!p.float8 || (p.bits == 8 && !p.folded && !p.mins && !p.order && !p.sub_scales && p.ratio == 1), op,
          "a float8 weight has scales only");
  if (p.order) require(*p.order, Kind::i32, {p.columns}, op, "order must be int32 [K]");
  Wna16Args a{};
  a.packed = p.packed.data<uint8_t>();
  a.factors = p.factors.data<int8_t>();
  a.scales = scales_of(p.scales, p.sub_scales, panels, groups, p.ratio, op);
  if (p.mins) a.mins = scales_of(*p.mins, p.sub_mins, panels, groups, p.ratio, op);
  a.order = p.order ? p.order->data<int32_t>() : nullptr;
  a.n = p.gated ? p.rows / 2 : p.rows;
  a.k = p.columns;
  a.group = p.group;
  a.bits = p.bits;
  a.folded = p.folded;
  a.rounded = p.rounded;
  a.float8 = p.float8;
  return a;
}

namespace {

// The product, in the calling thread or in all.
void multiply(Wna16Args a, int64_t panels) {
  const Kernels& kernel = kernels();
  const int64_t m = a.m;
  a.rows = thread_scratch(kernel.wna16_rows_size(a));  // of this thread; linear_wna16 takes no scratch: it stays valid
  const double cost = static_cast<double>(panels) * kPanel * a.k * std::max(0.03, 0.005 * m);  // ns of one core
  if (cost < 6000.0 || pool().threads() == 1) {
    const Unlocked unlocked(cost > 20000.0);
    kernel.wna16_rows(a, 0, m);
    for (int64_t row = 0; row < m; row += kRowBlock) kernel.linear_wna16(a, row, 0, panels);
    return;
  }
  const Unlocked unlocked;
  if (m * a.k < 100000) {
    kernel.wna16_rows(a, 0, m);
  } else {
    const int64_t pieces = std::min<int64_t>(m, pool().threads() * 4);
    parallel(pieces, [&](int64_t i) { kernel.wna16_rows(a, m * i / pieces, m * (i + 1) / pieces); });
  }
  over_panels(m, std::max(kernel.wna16_rows_size(a), m * a.k * 2), panels, 1, cost,
              [&](int64_t row, int64_t begin, int64_t end) { kernel.linear_wna16(a, row, begin, end); });
}

// x times the weight, into the columns of out from `first` on.
void linear(const Tensor& x, const Wna16Part& p, const std::optional<Tensor>& bias, int64_t first, Gate gate,
            const Tensor& out) {
  const char* op = gate == Gate::none ? "linear_wna16" : "gated_linear_wna16";
  Wna16Args a = weight_args(p, op);
  require(x.ndim() == 2 && x.dense(1) && x.size(1) == p.columns, op, "x must be [T,K] with dense rows");
  require(out.ndim() == 2 && out.dense() && out.size(0) == x.size(0), op, "out must be contiguous [T,N]");
  require(out.kind() == x.kind() || (out.kind() == Kind::f32 && !p.gated), op, "out must be float32 or have x's dtype");
  const int64_t columns = gate == Gate::both || gate == Gate::none ? p.rows : p.rows / 2;
  require(first >= 0 && first + columns <= out.size(1) && (!p.gated || columns == out.size(1)), op,
          "out has too few columns");
  if (bias) {
    require(bias->kind() == x.kind() && bias->ndim() == 1 && bias->dense() && bias->size(0) >= first + p.rows, op,
            "bias must have x's dtype and an entry for each row of the weight");
  }
  if (x.size(0) == 0 || columns == 0) return;
  a.dtype = float_type(x, op);
  a.out_dtype = float_type(out, op);
  a.gate = gate;
  a.x = x.data<void>();
  a.bias = bias ? bias->data<char>() + first * bias->item() : nullptr;
  a.out = out.data<char>() + first * out.item();
  a.m = x.size(0);
  a.x_stride = x.stride(0);
  a.out_stride = out.size(1);
  const int64_t panels = panels_of(a.n, p.gated);
  if (!p.order) return launch([=] { multiply(a, panels); });
  launch([=] {
    for (int64_t i = 0; i < a.k; i++) require(a.order[i] >= 0 && a.order[i] < a.k, op, "order has an index outside K");
    multiply(a, panels);
  });
}

void embedding(const Tensor& ids, const Wna16Part& p, const Tensor& out) {
  const char* op = "embedding_wna16";
  Wna16Args a = weight_args(p, op);
  require(!p.gated && !p.order, op, "takes weights that are neither gated nor ordered");
  require(ids, Kind::i64, {-1}, op, "ids must be int64 [T]");
  a.dtype = float_type(out, op);
  require(out, out.kind(), {ids.size(0), p.columns}, op, "out must be [T,K]");
  a.out = out.data<void>();
  const int64_t count = ids.size(0), n = p.rows;
  const int64_t* id = ids.data<int64_t>();
  launch([=] {
    for (int64_t t = 0; t < count; t++) require(id[t] >= 0 && id[t] < n, op, "an id is outside the weight's rows");
    over_rows(count, 50 + 5.0 * a.k, [&](int64_t begin, int64_t end) { kernels().embedding_wna16(a, id, begin, end); });
  });
}

using Optional = const std::optional<Tensor>&;

}  // namespace

void bind_wna16(nb::module_& m) {
  m.def(
      "packed_wna16_size",
      [](int64_t rows, int64_t k, int bits, bool gated) {
        return panels_of(gated ? rows / 2 : rows, gated) * panel_size(k, bits);
      },
      nb::arg("rows"), nb::arg("columns"), nb::arg("bits"), nb::arg("gated"));
  m.def("quantize_int4", quantize, nb::arg("weight"), nb::arg("group"), nb::arg("codes"), nb::arg("scales"));
  m.def("put_rows_int4", put_rows, nb::arg("weight"), nb::arg("group"), nb::arg("packed"), nb::arg("scales"),
        nb::arg("rows"), nb::arg("first"), nb::arg("gated"));
  m.def("pack_nibbles", pack_nibbles, nb::arg("codes"), nb::arg("packed"), nb::arg("gated"));
  m.def("pack_wna16", pack, nb::arg("codes"), nb::arg("bits"), nb::arg("packed"), nb::arg("gated"));
  m.def(
      "linear_wna16",
      [](const Tensor& x, int bits, int64_t rows, int64_t columns, int64_t group, int64_t ratio, const Tensor& packed,
         const Tensor& factors, const Tensor& scales, Optional sub_scales, Optional mins, Optional sub_mins,
         Optional order, bool folded, bool rounded, bool float8, Optional bias, int64_t first, const Tensor& out) {
        const Wna16Part part{bits,       rows, columns,  group, ratio,  packed,  factors, scales,
                             sub_scales, mins, sub_mins, order, folded, rounded, float8,  false};
        linear(x, part, bias, first, Gate::none, out);
      },
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
      nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
      nb::arg().none(), nb::arg(), nb::arg());
  m.def(
      "gated_linear_wna16",
      [](const Tensor& x, int bits, int64_t rows, int64_t columns, int64_t group, int64_t ratio, const Tensor& packed,
         const Tensor& factors, const Tensor& scales, Optional sub_scales, Optional mins, Optional sub_mins,
         Optional order, bool folded, bool rounded, bool float8, Optional bias,
         const std::optional<std::string>& activation, const Tensor& out) {
        const Wna16Part part{bits,       rows, columns,  group, ratio,  packed,  factors, scales,
                             sub_scales, mins, sub_mins, order, folded, rounded, float8,  true};
        linear(x, part, bias, 0, gate_of(activation), out);
      },
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
      nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
      nb::arg().none(), nb::arg().none(), nb::arg());
  m.def(
      "embedding_wna16",
      [](const Tensor& ids, int bits, int64_t rows, int64_t columns, int64_t group, int64_t ratio, const Tensor& packed,
         const Tensor& factors, const Tensor& scales, Optional sub_scales, Optional mins, Optional sub_mins,
         Optional order, bool folded, bool rounded, bool float8, const Tensor& out) {
        const Wna16Part part{bits,       rows, columns,  group, ratio,  packed,  factors, scales,
                             sub_scales, mins, sub_mins, order, folded, rounded, float8,  false};
        embedding(ids, part, out);
      },
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
      nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
      nb::arg());
}

}  // namespace tokserve
