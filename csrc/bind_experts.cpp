// Bindings of a mixture of experts.  Rows are sorted by expert, so that a product of an expert is one of adjacent rows
// with the kernel of linear: its bits do not depend on how many rows came to the expert.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "cpu.h"
#include "wna16.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

constexpr double kPieceCost = 16000.0;  // about ns of one task

// Weights of all experts for one of their two products: [N, K] each.
struct Weights {
  std::vector<const void*> packed;
  std::vector<const float*> scales;  // of int8 weights, else empty
  const char* bias;                  // [E, rows] or null
  Gate gate;
  int64_t n, k;                // outputs and inputs
  Wna16Experts integers = {};  // of 4 or 8 bits; not empty: there is nothing in packed

  int64_t rows() const { return gate == Gate::none ? n : 2 * n; }
};

struct Mixture {
  DType dtype;
  int64_t item;  // bytes of an element
  int64_t tokens, k, experts;
  const char* x;
  int64_t x_stride;
  const int32_t* ids;
  Weights up, down;
  CombineArgs combine;
};

// A piece of an expert's product: panels [begin, end) of a block of its rows.
struct Piece {
  int32_t expert, row, begin, end;
};

// The rows of each expert, in token order: expert e has [starts[e], starts[e + 1]).
struct Sorted {
  std::vector<int64_t> starts;
  std::vector<int32_t> tokens;  // of each sorted row
  std::vector<int32_t> places;  // [T, k]: the sorted row of each choice
};

Sorted sorted(const Mixture& a) {
  const int64_t count = a.tokens * a.k;
  Sorted s{std::vector<int64_t>(a.experts + 1), std::vector<int32_t>(count), std::vector<int32_t>(count)};
  for (int64_t i = 0; i < count; i++) {
    require(a.ids[i] >= 0 && a.ids[i] < a.experts, "experts", "an id is not that of an expert");
    s.starts[a.ids[i] + 1]++;
  }
  for (int64_t e = 0; e < a.experts; e++) s.starts[e + 1] += s.starts[e];
  std::vector<int64_t> next(s.starts.begin(), s.starts.end() - 1);
  for (int64_t i = 0; i < count; i++) {
    const int64_t place = next[a.ids[i]]++;
    s.tokens[place] = static_cast<int32_t>(i / a.k);
    s.places[i] = static_cast<int32_t>(place);
  }
  return s;
}

// Calls task(i) for all of them in all threads, or in this one if they cost less than waking the others.
template <class F>
void over_tasks(int64_t tasks, double cost, const F& task) {
  if (cost > 6000.0) return parallel(tasks, task);
  for (int64_t i = 0; i < tasks; i++) task(i);
}

struct Pieces {
  std::vector<Piece> list;
  double cost = 0.0;  // about ns of one core
};

// `fewest`: panels of a piece, if there are as many for each thread.  `rate`: ns of one product of a weight by one row.
Pieces pieces_of(const Weights& w, const Sorted& s, int64_t fewest, double rate) {
  const int64_t panels = panels_of(w.n, w.gate != Gate::none);
  Pieces pieces;
  for (size_t e = 0; e + 1 < s.starts.size(); e++) {
    const int64_t rows = s.starts[e + 1] - s.starts[e], blocks = (rows + kRowBlock - 1) / kRowBlock;
    if (rows == 0) continue;
    const double cost = static_cast<double>(w.rows()) * w.k * std::max(8 * rate, rate * rows);
    const int64_t most = std::max<int64_t>(1, panels / fewest);
    const int64_t parts = std::clamp<int64_t>(static_cast<int64_t>(cost / blocks / kPieceCost), 1, most);
    for (int64_t part = 0; part < parts; part++) {
      for (int64_t block = 0; block < blocks; block++)
        pieces.list.push_back({static_cast<int32_t>(e), static_cast<int32_t>(block * kRowBlock),
                               static_cast<int32_t>(panels * part / parts),
                               static_cast<int32_t>(panels * (part + 1) / parts)});
    }
    pieces.cost += cost;
  }
  return pieces;
}

// What the products of an expert's rows have in common, whatever the weights are.
template <class Args>
Args product(const Mixture& a, const Weights& w, const Sorted& s, int64_t expert, const char* x, int64_t stride,
             char* out, bool wide) {
  const int64_t start = s.starts[expert];
  Args args{};
  args.dtype = a.dtype;
  args.out_dtype = wide ? DType::f32 : a.dtype;
  args.gate = w.gate;
  args.x = x + start * stride * a.item;
  args.bias = w.bias ? w.bias + expert * w.rows() * a.item : nullptr;
  args.out = out + start * w.n * (wide ? static_cast<int64_t>(sizeof(float)) : a.item);
  args.m = s.starts[expert + 1] - start;
  args.n = w.n;
  args.k = w.k;
  args.x_stride = stride;
  return args;
}

void multiply(const Mixture& a, const Weights& w, const Sorted& s, const char* x, int64_t stride, char* out,
              bool wide) {
  const Kernels& kernel = kernels();
  const auto args_of = [&](int64_t expert) {
    LinearArgs args = product<LinearArgs>(a, w, s, expert, x, stride, out, wide);
    args.packed = w.packed[expert];
    args.cheap_widening = has_cheap_widening();
    return args;
  };
  const Pieces pieces = pieces_of(w, s, kernel.linear_panels(args_of(0)), 0.005);
  over_tasks(static_cast<int64_t>(pieces.list.size()), pieces.cost, [&](int64_t i) {
    const Piece& piece = pieces.list[i];
    const LinearArgs args = args_of(piece.expert);
    kernel.linear(args, piece.row, piece.begin, piece.end, thread_scratch(kernel.linear_scratch(args)));
  });
}

// `rows`: scratch for the quantized rows of all experts.
void multiply_int8(const Mixture& a, const Weights& w, const Sorted& s, const char* x, int64_t stride, char* out,
                   bool wide, char* rows) {
  const Kernels& kernel = kernels();
  Int8Args one{};
  one.dtype = a.dtype;
  one.m = 1;
  one.k = w.k;
  const int64_t row_bytes = kernel.int8_rows_size(one);
  const auto args_of = [&](int64_t expert) {
    Int8Args args = product<Int8Args>(a, w, s, expert, x, stride, out, wide);
    args.packed = static_cast<const uint8_t*>(w.packed[expert]);
    args.scales = w.scales[expert];
    args.rows = rows + s.starts[expert] * row_bytes;
    return args;
  };
  over_tasks(a.experts, 1.0 * s.starts[a.experts] * w.k, [&](int64_t expert) {
    const Int8Args args = args_of(expert);
    if (args.m > 0) kernel.int8_rows(args, 0, args.m);
  });
  const Pieces pieces = pieces_of(w, s, 1, 0.0025);
  over_tasks(static_cast<int64_t>(pieces.list.size()), pieces.cost, [&](int64_t i) {
    const Piece& piece = pieces.list[i];
    kernel.linear_int8(args_of(piece.expert), piece.row, piece.begin, piece.end);
  });
}

// Of weights of 4 or 8 bits.
ExpertsProduct integer_product(const Mixture& a, const Weights& w, const Sorted& s, const char* x, int64_t stride,
                               char* out, bool wide) {
  return {.dtype = a.dtype,
          .out_dtype = wide ? DType::f32 : a.dtype,
          .gate = w.gate,
          .starts = s.starts,
          .x = x,
          .bias = w.bias,
          .out = out,
          .n = w.n,
          .k = w.k,
          .x_stride = stride};
}

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Copies the tokens' rows in the order of the experts; one token needs no copies: its row is read with stride 0.
void gather(const Mixture& a, const Sorted& s, int64_t width, char* to) {
  const int64_t count = s.starts[a.experts], bytes = width * a.item, block = 64;
  over_tasks((count + block - 1) / block, 0.1 * count * bytes, [&](int64_t i) {
    for (int64_t row = i * block; row < std::min(count, (i + 1) * block); row++)
      std::memcpy(to + row * bytes, a.x + s.tokens[row] * a.x_stride * a.item, bytes);
  });
}

void run(const Mixture& a) {
  const Sorted s = sorted(a);
  const Unlocked unlocked;
  const int64_t count = s.starts[a.experts], width = a.up.k, inner = a.up.n;
  const bool int8 = !a.up.scales.empty(), one = a.tokens == 1;
  const int64_t copies = one ? 0 : aligned(count * width * a.item), between = aligned(count * inner * a.item);
  const int64_t outputs = aligned(count * width * static_cast<int64_t>(sizeof(float)));
  int64_t rows = int8 ? count * (8 + 2 * (std::max(width, inner) + 4)) : 0;  // at most two bytes an element
  if (!a.up.integers.empty()) {
    rows =
        std::max(experts_scratch(a.up.integers, integer_product(a, a.up, s, nullptr, one ? 0 : width, nullptr, false)),
                 experts_scratch(a.down.integers, integer_product(a, a.down, s, nullptr, inner, nullptr, true)));
  }
  char* copied = thread_workspace(copies + between + outputs + rows);
  char *inside = copied + copies, *result = inside + between, *quantized = result + outputs;
  if (!one) gather(a, s, width, copied);
  const char* x = one ? a.x : copied;
  const int64_t stride = one ? 0 : width;
  if (!a.up.integers.empty()) {
    multiply_experts(a.up.integers, integer_product(a, a.up, s, x, stride, inside, false), quantized);
    multiply_experts(a.down.integers, integer_product(a, a.down, s, inside, inner, result, true), quantized);
  } else if (int8) {
    multiply_int8(a, a.up, s, x, stride, inside, false, quantized);
    multiply_int8(a, a.down, s, inside, inner, result, true, quantized);
  } else {
    multiply(a, a.up, s, x, stride, inside, false);
    multiply(a, a.down, s, inside, inner, result, true);
  }
  CombineArgs combine = a.combine;
  combine.outputs = reinterpret_cast<const float*>(result);
  combine.places = s.places.data();
  const int64_t block = 16;
  over_tasks((a.tokens + block - 1) / block, 0.2 * count * width,
             [&](int64_t i) { kernels().combine(combine, i * block, std::min(a.tokens, (i + 1) * block)); });
}

// The packed weights of all experts and, of int8 weights, their scales.  Or, of weights of 4 or 8 bits, a Wna16Weight
// each, or a tensor where an expert's weight is one of floats.
struct ExpertTensors {
  const std::vector<Tensor>&packed, &scales;
  const std::vector<nb::object>* integers = nullptr;
  size_t size() const { return integers ? integers->size() : packed.size(); }
};

Wna16Experts integers_of(const std::vector<nb::object>& objects, const Weights& w, Kind kind) {
  const char* op = "experts_wna16";
  Wna16Experts experts;
  for (const nb::object& object : objects) {
    const Wna16Weight* weight = nullptr;
    const void* floats = nullptr;
    if (nb::try_cast(object, weight) && weight) {
      require(weight->rows == w.rows() && weight->columns == w.k && (w.gate == Gate::none) <= !weight->gated, op,
              "a weight was packed for another shape");
      require(weight->gated || w.gate != Gate::clamped, op, "gate and up of clamped_swiglu must be one part");
    } else {
      const Tensor packed = nb::cast<Tensor>(object);
      require(packed, kind, {packed_size(panels_of(w.n, w.gate != Gate::none), w.k, kind == Kind::bf16)}, op,
              "a weight was packed for another shape or dtype");
      floats = packed.data<void>();
    }
    experts.weights.push_back(weight);
    experts.floats.push_back(floats);
  }
  return experts;
}

Weights weights_of(const ExpertTensors& experts, const std::optional<Tensor>& bias, Gate gate, int64_t n, int64_t k,
                   Kind kind) {
  const char* op = "experts";
  const bool int8 = !experts.scales.empty();
  Weights w{.packed = {}, .scales = {}, .bias = nullptr, .gate = gate, .n = n, .k = k};
  if (experts.integers) w.integers = integers_of(*experts.integers, w, kind);
  const int64_t panels = panels_of(n, gate != Gate::none);
  const int64_t size = int8 ? packed_int8_size(panels, k) : packed_size(panels, k, kind == Kind::bf16);
  for (const Tensor& one : experts.packed) {
    require(one, int8 ? Kind::u8 : kind, {size}, op, "a weight was packed for another shape or dtype");
    w.packed.push_back(one.data<void>());
  }
  require(!int8 || experts.scales.size() == experts.size(), op, "scales must be those of every expert");
  for (const Tensor& one : experts.scales) {
    require(one, Kind::f32, {w.rows()}, op, "scales must be float32 with an entry for each row of a weight");
    w.scales.push_back(one.data<float>());
  }
  if (bias) {
    require(*bias, kind, {static_cast<int64_t>(experts.size()), w.rows()}, op, "a bias must be [E,N] of x's dtype");
    w.bias = bias->data<char>();
  }
  return w;
}

void experts(const Tensor& x, const Tensor& ids, const Tensor& weights, const ExpertTensors& up,
             const std::optional<Tensor>& up_bias, const ExpertTensors& down, const std::optional<Tensor>& down_bias,
             const std::string& activation, int64_t inner, const std::optional<Tensor>& shared,
             const std::optional<Tensor>& shared_gate, const Tensor& out) {
  const char* op = "experts";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(1), op, "x must be [T,H] with dense rows");
  const int64_t tokens = x.size(0), width = x.size(1);
  require(ids, Kind::i32, {tokens, -1}, op, "ids must be int32 [T,k]");
  const int64_t k = ids.size(1), count = static_cast<int64_t>(up.size());
  require(weights, Kind::f32, {tokens, k}, op, "weights must be float32 [T,k]");
  require(count > 0 && up.size() == down.size(), op, "each expert must have two weights");
  require(up.scales.empty() == down.scales.empty(), op, "both weights must be int8 or none");
  require(inner > 0 && tokens * k < INT32_MAX, op, "takes fewer tokens");
  require(out, x.kind(), {tokens, width}, op, "out must be contiguous [T,H] of x's dtype");
  if (shared) require(*shared, x.kind(), {tokens, width}, op, "shared must be [T,H] of x's dtype");
  if (shared_gate) require(*shared_gate, Kind::f32, {tokens, 1}, op, "shared_gate must be float32 [T,1]");
  const Gate gate = activation == "clamped_swiglu" ? Gate::clamped : gate_of(activation);
  const Mixture a{.dtype = dtype,
                  .item = x.item(),
                  .tokens = tokens,
                  .k = k,
                  .experts = count,
                  .x = x.data<char>(),
                  .x_stride = x.stride(0),
                  .ids = ids.data<int32_t>(),
                  .up = weights_of(up, up_bias, gate, inner, width, x.kind()),
                  .down = weights_of(down, down_bias, Gate::none, width, inner, x.kind()),
                  .combine = {.dtype = dtype,
                              .outputs = nullptr,
                              .places = nullptr,
                              .weights = weights.data<float>(),
                              .shared = shared ? shared->data<void>() : nullptr,
                              .shared_gate = shared_gate ? shared_gate->data<float>() : nullptr,
                              .out = out.data<void>(),
                              .k = k,
                              .width = width}};
  if (tokens == 0 || width == 0) return;
  launch([a] { run(a); });
}

void route(const Tensor& logits, const std::optional<Tensor>& bias, bool sigmoid, int64_t groups, int64_t kept_groups,
           bool two_of_group, bool normalize, float added, float scale, const Tensor& ids, const Tensor& weights) {
  const char* op = "route";
  require(logits, Kind::f32, {-1, -1}, op, "logits must be float32 [T,E]");
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  require(ids, Kind::i32, {tokens, -1}, op, "ids must be int32 [T,k]");
  const int64_t k = ids.size(1);
  require(weights, Kind::f32, {tokens, k}, op, "weights must be float32 [T,k]");
  if (bias) require(*bias, Kind::f32, {experts}, op, "bias must be float32 [E]");
  require(groups > 0 && kept_groups > 0 && kept_groups <= groups && experts % groups == 0, op,
          "groups must divide the experts");
  require(!two_of_group || experts / groups >= 2, op, "a group must have two experts");
  require(k > 0 && k <= experts / groups * kept_groups, op, "k must be at most the number of experts to choose from");
  const RouteArgs a{.logits = logits.data<float>(),
                    .bias = bias ? bias->data<float>() : nullptr,
                    .ids = ids.data<int32_t>(),
                    .weights = weights.data<float>(),
                    .experts = experts,
                    .k = k,
                    .groups = groups,
                    .kept_groups = kept_groups,
                    .sigmoid = sigmoid,
                    .two_of_group = two_of_group,
                    .normalize = normalize,
                    .added = added,
                    .scale = scale};
  launch([a, tokens] {
    over_rows(tokens, 2.0 * a.experts * a.k, [&](int64_t begin, int64_t end) {
      kernels().route(a, begin, end, thread_scratch(kernels().route_scratch(a)));
    });
  });
}

}  // namespace

void bind_experts(nb::module_& m) {
  m.def("route", route, nb::arg("logits"), nb::arg("bias").none(), nb::arg("sigmoid"), nb::arg("groups"),
        nb::arg("kept_groups"), nb::arg("two_of_group"), nb::arg("normalize"), nb::arg("added"), nb::arg("scale"),
        nb::arg("ids"), nb::arg("weights"));
  m.def(
      "experts",
      [](const Tensor& x, const Tensor& ids, const Tensor& weights, const std::vector<Tensor>& up,
         const std::vector<Tensor>& up_scales, const std::optional<Tensor>& up_bias, const std::vector<Tensor>& down,
         const std::vector<Tensor>& down_scales, const std::optional<Tensor>& down_bias, const std::string& activation,
         int64_t inner, const std::optional<Tensor>& shared, const std::optional<Tensor>& shared_gate,
         const Tensor& out) {
        experts(x, ids, weights, {up, up_scales}, up_bias, {down, down_scales}, down_bias, activation, inner, shared,
                shared_gate, out);
      },
      nb::arg("x"), nb::arg("ids"), nb::arg("weights"), nb::arg("up"), nb::arg("up_scales"), nb::arg("up_bias").none(),
      nb::arg("down"), nb::arg("down_scales"), nb::arg("down_bias").none(), nb::arg("activation"), nb::arg("inner"),
      nb::arg("shared").none(), nb::arg("shared_gate").none(), nb::arg("out"));
  m.def(
      "experts_wna16",
      [](const Tensor& x, const Tensor& ids, const Tensor& weights, const std::vector<nb::object>& up,
         const std::optional<Tensor>& up_bias, const std::vector<nb::object>& down,
         const std::optional<Tensor>& down_bias, const std::string& activation, int64_t inner,
         const std::optional<Tensor>& shared, const std::optional<Tensor>& shared_gate, const Tensor& out) {
        const std::vector<Tensor> none;
        experts(x, ids, weights, {none, none, &up}, up_bias, {none, none, &down}, down_bias, activation, inner, shared,
                shared_gate, out);
      },
      nb::arg("x"), nb::arg("ids"), nb::arg("weights"), nb::arg("up"), nb::arg("up_bias").none(), nb::arg("down"),
      nb::arg("down_bias").none(), nb::arg("activation"), nb::arg("inner"), nb::arg("shared").none(),
      nb::arg("shared_gate").none(), nb::arg("out"));
}

}  // namespace tokserve
