// A mixture's experts with weights of 4 or 8 bits: packed weights as objects, which a call names without their tensors,
// and the product of each expert's rows.  An expert whose weight is one of floats has the product of linear.
#include <nanobind/stl/optional.h>

#include "cpu.h"
#include "wna16.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

constexpr double kPieceCost = 16000.0;  // about ns of one task

// One expert's rows times one part of its weight.
struct PartProduct {
  Wna16Args args;
  int64_t expert;
};

// A piece of it: panels [begin, end) of a block of rows.  `part` -1: of the expert's weight of floats.
struct Piece {
  int64_t part, expert, row, begin, end;
};

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }
int64_t item(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Whether the weight's gate and what it gates are multiplied apart, and gated afterwards.
bool is_apart(const Wna16Weight& w, Gate gate) { return gate != Gate::none && !w.gated; }

LinearArgs float_args(const void* packed, const ExpertsProduct& p, int64_t expert) {
  const int64_t start = p.starts[expert], rows = p.gate == Gate::none ? p.n : 2 * p.n;
  LinearArgs a{};
  a.dtype = p.dtype;
  a.out_dtype = p.out_dtype;
  a.gate = p.gate;
  a.x = p.x + start * p.x_stride * item(p.dtype);
  a.packed = packed;
  a.bias = p.bias ? p.bias + expert * rows * item(p.dtype) : nullptr;
  a.out = p.out + start * p.n * item(p.out_dtype);
  a.m = p.starts[expert + 1] - start;
  a.n = p.n;
  a.k = p.k;
  a.x_stride = p.x_stride;
  a.cheap_widening = has_cheap_widening();
  return a;
}

// The products of all experts that have rows.  `both`: where gate and up rows go that are multiplied apart.
std::vector<PartProduct> parts_of(const Wna16Experts& experts, const ExpertsProduct& p, char* both) {
  std::vector<PartProduct> products;
  int64_t gated_rows = 0;
  for (size_t e = 0; e + 1 < p.starts.size(); e++) {
    const Wna16Weight* weight = experts.weights[e];
    if (!weight || p.starts[e] == p.starts[e + 1]) continue;
    const LinearArgs whole = float_args(nullptr, p, static_cast<int64_t>(e));
    const bool apart = is_apart(*weight, p.gate);
    const DType out_dtype = apart ? p.dtype : p.out_dtype;
    char* out = apart ? both + gated_rows * 2 * p.n * item(p.dtype) : static_cast<char*>(whole.out);
    int64_t first = 0;
    for (Wna16Args args : weight->parts) {
      args.dtype = p.dtype;
      args.out_dtype = out_dtype;
      args.gate = apart ? Gate::none : p.gate;
      args.x = whole.x;
      args.bias = whole.bias ? static_cast<const char*>(whole.bias) + first * item(p.dtype) : nullptr;
      args.out = out + first * item(out_dtype);
      args.m = whole.m;
      args.x_stride = p.x_stride;
      args.out_stride = apart ? 2 * p.n : p.n;
      products.push_back({args, static_cast<int64_t>(e)});
      first += args.n;
    }
    gated_rows += apart ? whole.m : 0;
  }
  return products;
}

int64_t both_bytes(const Wna16Experts& experts, const ExpertsProduct& p) {
  int64_t rows = 0;
  for (size_t e = 0; e + 1 < p.starts.size(); e++) {
    if (experts.weights[e] && is_apart(*experts.weights[e], p.gate)) rows += p.starts[e + 1] - p.starts[e];
  }
  return aligned(rows * 2 * p.n * item(p.dtype));
}

template <class F>
void over_tasks(int64_t tasks, double cost, const F& task) {
  if (cost > 6000.0) return parallel(tasks, task);
  for (int64_t i = 0; i < tasks; i++) task(i);
}

struct Pieces {
  std::vector<Piece> list;
  double cost = 0.0;  // about ns of one core

  // `cost`: of a product with m rows of x and a weight of that many panels, about ns of one core.
  void add(Piece whole, int64_t m, int64_t panels, double product_cost) {
    const int64_t blocks = (m + kRowBlock - 1) / kRowBlock;
    const int64_t count = std::clamp<int64_t>(static_cast<int64_t>(product_cost / blocks / kPieceCost), 1, panels);
    for (int64_t i = 0; i < count; i++) {
      for (int64_t block = 0; block < blocks; block++)
        list.push_back({whole.part, whole.expert, block * kRowBlock, panels * i / count, panels * (i + 1) / count});
    }
    cost += product_cost;
  }
};

Pieces pieces_of(const Wna16Experts& experts, const ExpertsProduct& p, const std::vector<PartProduct>& products) {
  Pieces pieces;
  for (size_t i = 0; i < products.size(); i++) {
    const Wna16Args& a = products[i].args;
    const int64_t panels = panels_of(a.n, a.gate != Gate::none);
    const double cost = static_cast<double>(panels) * kPanel * a.k * std::max(0.03, 0.005 * a.m);
    pieces.add({static_cast<int64_t>(i), products[i].expert, 0, 0, 0}, a.m, panels, cost);
  }
  for (size_t e = 0; e + 1 < p.starts.size(); e++) {
    const int64_t m = p.starts[e + 1] - p.starts[e], panels = panels_of(p.n, p.gate != Gate::none);
    if (experts.weights[e] || m == 0) continue;
    const double cost = static_cast<double>(panels) * kPanel * p.k * std::max(0.04, 0.005 * m);
    pieces.add({-1, static_cast<int64_t>(e), 0, 0, 0}, m, panels, cost);
  }
  return pieces;
}

// activation(gate) * up of what was multiplied apart.
void gate_rows(const Wna16Experts& experts, const ExpertsProduct& p, const char* both) {
  int64_t gated_rows = 0;
  for (size_t e = 0; e + 1 < p.starts.size(); e++) {
    const int64_t m = p.starts[e + 1] - p.starts[e];
    if (m == 0 || !experts.weights[e] || !is_apart(*experts.weights[e], p.gate)) continue;
    GatedArgs a{};
    a.dtype = p.dtype;
    a.x = both + gated_rows * 2 * p.n * item(p.dtype);
    a.out = p.out + p.starts[e] * p.n * item(p.dtype);
    a.width = p.n;
    const auto gate = p.gate == Gate::silu ? kernels().silu_mul : kernels().gelu_mul;
    over_tasks(m, 0.3 * m * p.n, [&](int64_t row) { gate(a, row, row + 1); });
    gated_rows += m;
  }
}

void add_part(Wna16Weight& weight, int bits, int64_t rows, int64_t columns, int64_t group, int64_t ratio,
              const Tensor& packed, const Tensor& factors, const Tensor& scales,
              const std::optional<Tensor>& sub_scales, const std::optional<Tensor>& mins,
              const std::optional<Tensor>& sub_mins, const std::optional<Tensor>& order, bool folded, bool rounded,
              bool float8, bool gated) {
  const char* op = "experts_wna16";
  require(weight.parts.empty() || (!weight.gated && !gated && weight.columns == columns), op,
          "the parts of a weight must fit each other");
  const Wna16Part part{bits,       rows, columns,  group, ratio,  packed,  factors, scales,
                       sub_scales, mins, sub_mins, order, folded, rounded, float8,  gated};
  const Wna16Args args = weight_args(part, op);
  for (int64_t i = 0; order && i < columns; i++)
    require(args.order[i] >= 0 && args.order[i] < columns, op, "order has an index outside K");
  weight.parts.push_back(args);
  weight.rows += rows;
  weight.columns = columns;
  weight.gated = gated;
}

}  // namespace

int64_t experts_scratch(const Wna16Experts& experts, const ExpertsProduct& p) {
  int64_t bytes = both_bytes(experts, p);
  for (const PartProduct& one : parts_of(experts, p, nullptr)) bytes += aligned(kernels().wna16_rows_size(one.args));
  return bytes;
}

void multiply_experts(const Wna16Experts& experts, const ExpertsProduct& p, char* scratch) {
  const Kernels& kernel = kernels();
  std::vector<PartProduct> products = parts_of(experts, p, scratch);
  char* rows = scratch + both_bytes(experts, p);
  for (PartProduct& one : products) {
    one.args.rows = rows;
    rows += aligned(kernel.wna16_rows_size(one.args));
  }
  over_tasks(static_cast<int64_t>(products.size()), 0.5 * p.starts.back() * p.k,
             [&](int64_t i) { kernel.wna16_rows(products[i].args, 0, products[i].args.m); });
  const Pieces pieces = pieces_of(experts, p, products);
  over_tasks(static_cast<int64_t>(pieces.list.size()), pieces.cost, [&](int64_t i) {
    const Piece& piece = pieces.list[i];
    if (piece.part >= 0) return kernel.linear_wna16(products[piece.part].args, piece.row, piece.begin, piece.end);
    const LinearArgs args = float_args(experts.floats[piece.expert], p, piece.expert);
    kernel.linear(args, piece.row, piece.begin, piece.end, thread_scratch(kernel.linear_scratch(args)));
  });
  if (p.gate != Gate::none) gate_rows(experts, p, scratch);
}

void bind_experts_wna16(nb::module_& m) {
  nb::class_<Wna16Weight>(m, "Wna16Weight", "A packed weight; keeps the tensors of its parts.")
      .def(nb::init<>())
      .def("add", add_part, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(),
           nb::keep_alive<1, 11>(), nb::keep_alive<1, 12>(), nb::keep_alive<1, 13>());
}

}  // namespace tokserve
