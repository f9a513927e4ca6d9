// Bindings of the row-wise ops.  The caller allocates the outputs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

void norm(void (*Kernels::*kernel)(const NormArgs&, int64_t, int64_t), const char* op, const Tensor& x,
          const std::optional<Tensor>& residual, const Tensor& weight, const std::optional<Tensor>& bias, float eps,
          float multiplier, const Tensor& out, const std::optional<Tensor>& sum) {
  const DType dtype = float_type(x, op), weight_dtype = float_type(weight, op);
  require(x.ndim() == 2 && x.dense(), op, "x must be contiguous [T,H]");
  const int64_t rows = x.size(0), width = x.size(1);
  require(weight.ndim() == 1 && weight.dense() && weight.size(0) == width, op, "weight must be contiguous [H]");
  require(weight_dtype == dtype || weight_dtype == DType::f32, op, "weight must be float32 or have x's dtype");
  if (bias) require(*bias, weight.kind(), {width}, op, "bias must be like weight");
  require(out, x.kind(), {rows, width}, op, "out must be like x");
  require(residual.has_value() == sum.has_value(), op, "residual and its sum come together");
  if (residual) require(*residual, x.kind(), {rows, width}, op, "residual must be like x");
  if (sum) require(*sum, x.kind(), {rows, width}, op, "the sum must be like x");
  const NormArgs a{.dtype = dtype,
                   .weight_dtype = weight_dtype,
                   .x = x.data<void>(),
                   .residual = residual ? residual->data<void>() : nullptr,
                   .weight = weight.data<void>(),
                   .bias = bias ? bias->data<void>() : nullptr,
                   .out = out.data<void>(),
                   .sum = sum ? sum->data<void>() : nullptr,
                   .width = width,
                   .eps = eps,
                   .multiplier = multiplier};
  launch([=] {
    over_rows(rows, 20 + 0.3 * width, [&](int64_t begin, int64_t end) { (kernels().*kernel)(a, begin, end); });
  });
}

void rms_norm(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, float eps, float multiplier,
              const Tensor& out, const std::optional<Tensor>& sum) {
  const char* op = residual ? "add_rms_norm" : "rms_norm";
  norm(&Kernels::rms_norm, op, x, residual, weight, std::nullopt, eps, multiplier, out, sum);
}

void layer_norm(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight,
                const std::optional<Tensor>& bias, float eps, float multiplier, const Tensor& out,
                const std::optional<Tensor>& sum) {
  const char* op = residual ? "add_layer_norm" : "layer_norm";
  norm(&Kernels::layer_norm, op, x, residual, weight, bias, eps, multiplier, out, sum);
}

void add_residual(const Tensor& x, const Tensor& residual, float multiplier, const Tensor& out) {
  const char* op = "add_residual";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(), op, "x must be contiguous [T,H]");
  const int64_t rows = x.size(0), width = x.size(1);
  require(residual, x.kind(), {rows, width}, op, "residual must be like x");
  require(out, x.kind(), {rows, width}, op, "out must be like x");
  const AddArgs a{dtype, x.data<void>(), residual.data<void>(), out.data<void>(), width, multiplier};
  launch([=] {
    over_rows(rows, 10 + 0.15 * width, [&](int64_t begin, int64_t end) { kernels().add_residual(a, begin, end); });
  });
}

void cap(const Tensor& x, float multiplier, float limit, const Tensor& out) {
  const char* op = "cap";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(), op, "x must be contiguous [T,H]");
  require(limit >= 0.0f, op, "the limit must not be negative");
  const int64_t rows = x.size(0), width = x.size(1);
  require(out, x.kind(), {rows, width}, op, "out must be like x");
  const CapArgs a{dtype, x.data<void>(), out.data<void>(), width, multiplier, limit};
  launch([=] {
    over_rows(rows, 10 + (limit > 0 ? 0.6 : 0.1) * width,
              [&](int64_t begin, int64_t end) { kernels().cap(a, begin, end); });
  });
}

void activate(const Tensor& x, const std::string& name, bool gated, const Tensor& out) {
  const char* op = "activate";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense() && (!gated || x.size(1) % 2 == 0), op, "x must be contiguous [T,I] or [T,2I]");
  const int64_t rows = x.size(0), width = gated ? x.size(1) / 2 : x.size(1);
  require(out, x.kind(), {rows, width}, op, "out must be [T,I] of x's dtype");
  const ActivateArgs a{dtype, activation_of(name), gated, x.data<void>(), out.data<void>(), width};
  launch([=] {
    over_rows(rows, 10 + 0.9 * width, [&](int64_t begin, int64_t end) { kernels().activate(a, begin, end); });
  });
}

void scale_by_position(const Tensor& x, const Tensor& positions, float growth, int64_t period, int64_t first,
                       const Tensor& out) {
  const char* op = "scale_by_position";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 3 && x.dense(), op, "x must be contiguous [T,H,D]");
  const int64_t tokens = x.size(0), width = x.size(1) * x.size(2);
  require(out, x.kind(), {tokens, x.size(1), x.size(2)}, op, "out must be like x");
  require(positions, Kind::i64, {tokens}, op, "positions must be int64 [T]");
  require(period > 0, op, "the period must be positive");
  const PositionScaleArgs a{dtype, x.data<void>(), out.data<void>(), positions.data<int64_t>(), width, period,
                            first, growth};
  launch([=] {
    over_rows(tokens, 20 + 0.1 * width,
              [&](int64_t begin, int64_t end) { kernels().scale_by_position(a, begin, end); });
  });
}

void scale_rows(const Tensor& x, const Tensor& factors, const Tensor& out) {
  const char* op = "scale_rows";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(), op, "x must be contiguous [T,H]");
  const int64_t rows = x.size(0), width = x.size(1);
  require(out, x.kind(), {rows, width}, op, "out must be like x");
  require(factors, Kind::f32, {-1}, op, "the factors must be float32 [T] or [1]");
  require(factors.size(0) == rows || factors.size(0) == 1, op, "the factors must be float32 [T] or [1]");
  const bool one = factors.size(0) == 1;
  const RowScaleArgs a{dtype, x.data<void>(), factors.data<float>(), out.data<void>(), width, one};
  launch([=] {
    over_rows(rows, 10 + 0.1 * width, [&](int64_t begin, int64_t end) { kernels().scale_rows(a, begin, end); });
  });
}

void scale_choices(const Tensor& weights, const Tensor& ids, const Tensor& factors, const Tensor& out) {
  const char* op = "scale_choices";
  require(weights, Kind::f32, {-1, -1}, op, "weights must be float32 [T,k]");
  const int64_t tokens = weights.size(0), k = weights.size(1);
  require(ids, Kind::i32, {tokens, k}, op, "ids must be int32 [T,k]");
  require(factors, Kind::f32, {-1}, op, "factors must be float32 [E]");
  require(out, Kind::f32, {tokens, k}, op, "out must be like weights");
  const float *from = weights.data<float>(), *of_expert = factors.data<float>();
  const int32_t* expert = ids.data<int32_t>();
  float* to = out.data<float>();
  const int64_t count = tokens * k, experts = factors.size(0);
  launch([=] {
    for (int64_t i = 0; i < count; i++) {
      require(expert[i] >= 0 && expert[i] < experts, op, "an id is no expert's");
      to[i] = from[i] * of_expert[expert[i]];
    }
  });
}

void norm_values(const Tensor& x, int64_t heads, int64_t dim, float eps, bool copied, const Tensor& out) {
  const char* op = "norm_values";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense() && heads > 0 && dim > 0 && x.size(1) >= heads * dim, op,
          "x must be contiguous [T,N], its last elements those of the heads");
  const int64_t rows = x.size(0), width = x.size(1), size = heads * dim;
  require(out, x.kind(), {rows, copied ? width + size : width}, op, "out must be [T,N], with a copy [T,N+H*D]");
  const ValueNormArgs a{dtype, x.data<void>(), out.data<void>(), width, size, dim, eps, copied};
  launch([=] {
    over_rows(rows, 20 + 0.1 * width + 0.2 * size,
              [&](int64_t begin, int64_t end) { kernels().norm_values(a, begin, end); });
  });
}

void gate_inputs(const Tensor& x, const Tensor& inputs, int64_t layer, const std::string& name, const Tensor& out) {
  const char* op = "gate_inputs";
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(), op, "x must be contiguous [T,I]");
  const int64_t rows = x.size(0), width = x.size(1);
  require(inputs, x.kind(), {rows, -1}, op, "inputs must be contiguous [T,L*I], like x");
  require(layer >= 0 && (layer + 1) * width <= inputs.size(1), op, "inputs lack the layer");
  require(out, x.kind(), {rows, width}, op, "out must be like x");
  const GatedInputArgs a{.dtype = dtype,
                         .activation = activation_of(name),
                         .x = x.data<void>(),
                         .inputs = inputs.data<char>() + layer * width * x.item(),
                         .out = out.data<void>(),
                         .width = width,
                         .stride = inputs.size(1)};
  launch([=] {
    over_rows(rows, 10 + 0.9 * width, [&](int64_t begin, int64_t end) { kernels().gate_inputs(a, begin, end); });
  });
}

void gated(const char* op, void (*Kernels::*kernel)(const GatedArgs&, int64_t, int64_t), const Tensor& x,
           const Tensor& out) {
  const DType dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense() && x.size(1) % 2 == 0, op, "x must be contiguous [T,2I]");
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  require(out, x.kind(), {rows, width}, op, "out must be [T,I] of x's dtype");
  const GatedArgs a{dtype, x.data<void>(), out.data<void>(), width};
  launch([=] {
    over_rows(rows, 10 + 0.8 * width, [&](int64_t begin, int64_t end) { (kernels().*kernel)(a, begin, end); });
  });
}

void rope(const Tensor& q, const Tensor& k, const Tensor& table, const Tensor& positions, bool interleaved,
          const Tensor& q_out, const Tensor& k_out) {
  const char* op = "rope";
  const DType dtype = float_type(q, op);
  require(q.ndim() == 3 && q.dense(1) && k.ndim() == 3 && k.dense(1), op,
          "q and k must be [T,heads,D], dense in a token");
  const int64_t tokens = q.size(0), heads = q.size(1), kv_heads = k.size(1), dim = q.size(2);
  require(k.kind() == q.kind() && k.size(0) == tokens && k.size(2) == dim, op, "k must match q");
  require(table, Kind::f32, {-1, -1}, op, "table must be float32 [max_pos,rot_dim]");
  const int64_t rot = table.size(1), limit = table.size(0);
  require(rot % 2 == 0 && rot <= dim, op, "rot_dim must be even and at most D");
  require(positions, Kind::i64, {tokens}, op, "positions must be int64 [T]");
  require(q_out, q.kind(), {tokens, heads, dim}, op, "q's output must be like q");
  require(k_out, q.kind(), {tokens, kv_heads, dim}, op, "k's output must be like k");
  const int64_t* at = positions.data<int64_t>();
  const RopeArgs a{.dtype = dtype,
                   .q = q.data<void>(),
                   .k = k.data<void>(),
                   .q_out = q_out.data<void>(),
                   .k_out = k_out.data<void>(),
                   .q_stride = q.stride(0),
                   .k_stride = k.stride(0),
                   .q_heads = heads,
                   .k_heads = kv_heads,
                   .dim = dim,
                   .rot = rot,
                   .table = table.data<float>(),
                   .positions = at,
                   .interleaved = interleaved};
  launch([=] {
    for (int64_t t = 0; t < tokens; t++) require(at[t] >= 0 && at[t] < limit, op, "a position is outside the table");
    over_rows(tokens, 20 + 0.4 * (heads + kv_heads) * dim,
              [&](int64_t begin, int64_t end) { kernels().rope(a, begin, end); });
  });
}

void norm_rope_store(const Tensor& qkv, const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight,
                     float eps, const Tensor& table, const Tensor& positions, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& slots, bool interleaved, bool norm_last, bool gated,
                     const Tensor& q_out) {
  const char* op = "norm_rope_store";
  const DType dtype = float_type(qkv, op);
  const Caches c = caches_of(k_cache, v_cache, qkv.kind(), op);
  require(q_out.kind() == qkv.kind() && q_out.ndim() == 3 && q_out.dense() && q_out.size(2) == c.dim, op,
          "q's output must be [T,Hq,D]");
  const int64_t tokens = q_out.size(0), heads = q_out.size(1), limit = table.ndim() == 2 ? table.size(0) : 0;
  require(qkv, qkv.kind(), {tokens, (heads * (gated ? 2 : 1) + 2 * c.kv_heads) * c.dim}, op,
          "qkv must be contiguous [T,(Hq+2Hk)*D], with gates [T,(2Hq+2Hk)*D]");
  require(q_weight.has_value() == k_weight.has_value(), op, "q's and k's norm come together");
  const DType weight_dtype = q_weight ? float_type(*q_weight, op) : dtype;
  require(weight_dtype == dtype || weight_dtype == DType::f32, op, "norm weights must be float32 or have qkv's dtype");
  const bool norm_all = q_weight && q_weight->ndim() == 1 && q_weight->size(0) != c.dim;
  require(!norm_all || !gated, op, "gated queries are normed by head");
  const int64_t q_width = norm_all ? heads * c.dim : c.dim, k_width = norm_all ? c.kv_heads * c.dim : c.dim;
  if (q_weight) require(*q_weight, q_weight->kind(), {q_width}, op, "q_weight must be [D] or [Hq*D]");
  if (k_weight) require(*k_weight, q_weight->kind(), {k_width}, op, "k_weight must be [D] or [Hk*D], like q_weight");
  require(table, Kind::f32, {-1, -1}, op, "table must be float32 [max_pos,rot_dim]");
  require(table.size(1) % 2 == 0 && table.size(1) <= c.dim, op, "rot_dim must be even and at most D");
  require(positions, Kind::i64, {tokens}, op, "positions must be int64 [T]");
  require(slots, Kind::i64, {tokens}, op, "slot_mapping must be int64 [T]");
  const int64_t *at = positions.data<int64_t>(), *slot = slots.data<int64_t>();
  const QkvArgs a{.dtype = dtype,
                  .weight_dtype = weight_dtype,
                  .qkv = qkv.data<void>(),
                  .q_weight = q_weight ? q_weight->data<void>() : nullptr,
                  .k_weight = k_weight ? k_weight->data<void>() : nullptr,
                  .q_out = q_out.data<void>(),
                  .k_cache = k_cache.data<void>(),
                  .v_cache = v_cache.data<void>(),
                  .table = table.data<float>(),
                  .positions = at,
                  .slots = slot,
                  .q_heads = heads,
                  .k_heads = c.kv_heads,
                  .dim = c.dim,
                  .rot = table.size(1),
                  .page = c.page,
                  .eps = eps,
                  .interleaved = interleaved,
                  .norm_all = norm_all,
                  .norm_last = norm_last,
                  .gated = gated};
  const int64_t scratch = kStoreRows * c.kv_heads * c.dim * qkv.item();
  launch([=] {
    for (int64_t t = 0; t < tokens; t++) {
      require(at[t] >= 0 && at[t] < limit, op, "a position is outside the table");
      require(slot[t] >= 0 && slot[t] < c.blocks * c.page, op, "a slot is outside the cache");
    }
    over_rows(tokens, 20 + (heads + c.kv_heads) * (10 + 0.6 * c.dim),
              [&](int64_t begin, int64_t end) { kernels().norm_rope_store(a, begin, end, thread_scratch(scratch)); });
  });
}

}  // namespace

Activation activation_of(const std::string& name) {
  constexpr const char* names[] = {"silu", "gelu_tanh", "gelu", "relu", "relu2"};
  for (int i = 0; i < 5; i++) {
    if (name == names[i]) return static_cast<Activation>(i);
  }
  throw nb::value_error(("unknown activation " + name).c_str());
}

void bind_elementwise(nb::module_& m) {
  m.def("rms_norm", rms_norm, nb::arg("x"), nb::arg("residual").none(), nb::arg("weight"), nb::arg("eps"),
        nb::arg("multiplier"), nb::arg("out"), nb::arg("sum").none());
  m.def("layer_norm", layer_norm, nb::arg("x"), nb::arg("residual").none(), nb::arg("weight"), nb::arg("bias").none(),
        nb::arg("eps"), nb::arg("multiplier"), nb::arg("out"), nb::arg("sum").none());
  m.def("add_residual", add_residual);
  m.def("cap", cap);
  m.def("scale_by_position", scale_by_position);
  m.def("scale_rows", scale_rows);
  m.def("scale_choices", scale_choices);
  m.def("norm_values", norm_values);
  m.def("gate_inputs", gate_inputs);
  m.def("activate", activate);
  m.def("silu_mul", [](const Tensor& x, const Tensor& out) { gated("silu_mul", &Kernels::silu_mul, x, out); });
  m.def("gelu_mul", [](const Tensor& x, const Tensor& out) { gated("gelu_mul", &Kernels::gelu_mul, x, out); });
  m.def("rope", rope);
  m.def("norm_rope_store", norm_rope_store, nb::arg("qkv"), nb::arg("q_weight").none(), nb::arg("k_weight").none(),
        nb::arg("eps"), nb::arg("table"), nb::arg("positions"), nb::arg("k_cache"), nb::arg("v_cache"),
        nb::arg("slot_mapping"), nb::arg("interleaved"), nb::arg("norm_last"), nb::arg("gated"), nb::arg("q_out"));
}

}  // namespace tokserve
