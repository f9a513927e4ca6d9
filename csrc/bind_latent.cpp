// Bindings of the ops of latent attention but for the attention itself: products with a weight per head, and the write
// of a token's row into the cache.
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind.h"
#include "cpu.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

// One head's product: its part of x times its own weight.
struct HeadProduct {
  LinearArgs first;  // of head 0
  std::vector<const void*> packed;
  int64_t item, x_step, out_step;  // bytes of an element, and elements from one head to the next

  LinearArgs of(int64_t head) const {
    LinearArgs a = first;
    a.x = static_cast<const char*>(a.x) + head * x_step * item;
    a.out = static_cast<char*>(a.out) + head * out_step * item;
    a.packed = packed[head];
    return a;
  }
};

void multiply(const HeadProduct& p) {
  const Kernels& kernel = kernels();
  const LinearArgs& a = p.first;
  const int64_t heads = static_cast<int64_t>(p.packed.size()), panels = panels_of(a.n, false);
  const int64_t scratch = kernel.linear_scratch(a), blocks = (a.m + kRowBlock - 1) / kRowBlock;
  const double cost = static_cast<double>(heads) * a.n * a.k * std::max(0.04, 0.005 * a.m);
  const auto task = [&](int64_t i) {
    kernel.linear(p.of(i / blocks), i % blocks * kRowBlock, 0, panels, thread_scratch(scratch));
  };
  const Unlocked unlocked(cost > 20000.0);
  if (cost > 6000.0) return parallel(heads * blocks, task);
  for (int64_t i = 0; i < heads * blocks; i++) task(i);
}

void linear_heads(const Tensor& x, const std::vector<Tensor>& packed, int64_t k, const Tensor& out) {
  const char* op = "linear_heads";
  const DType dtype = float_type(x, op);
  const int64_t heads = static_cast<int64_t>(packed.size());
  require(x.ndim() == 3 && x.dense(1) && x.size(1) == heads && k > 0 && x.size(2) >= k, op,
          "x must be [T,H,K] or wider, dense in a token");
  require(out, x.kind(), {x.size(0), heads, -1}, op, "out must be contiguous [T,H,N] of x's dtype");
  const int64_t n = out.size(2), size = packed_size(panels_of(n, false), k, dtype == DType::bf16);
  HeadProduct p{.first = {.dtype = dtype,
                          .out_dtype = dtype,
                          .gate = Gate::none,
                          .x = x.data<void>(),
                          .packed = nullptr,
                          .bias = nullptr,
                          .out = out.data<void>(),
                          .m = x.size(0),
                          .n = n,
                          .k = k,
                          .x_stride = x.stride(0),
                          .cheap_widening = has_cheap_widening(),
                          .out_stride = heads * n},
                .packed = {},
                .item = x.item(),
                .x_step = x.size(2),
                .out_step = n};
  for (const Tensor& one : packed) {
    require(one, x.kind(), {size}, op, "a weight was packed for another shape or dtype");
    p.packed.push_back(one.data<void>());
  }
  if (p.first.m == 0 || heads == 0 || n == 0) return;
  launch([p] { multiply(p); });
}

void latent_rope_store(const Tensor& q, const Tensor& kv, const Tensor& weight, float eps, const Tensor& table,
                       const Tensor& positions, const Tensor& cache, const Tensor& slots, bool interleaved,
                       const Tensor& q_out) {
  const char* op = "latent_rope_store";
  const DType dtype = float_type(q, op), weight_dtype = float_type(weight, op);
  require(q.ndim() == 3 && q.dense(1), op, "q must be [T,H,N+R], dense in a token");
  const int64_t tokens = q.size(0), heads = q.size(1);
  require(weight.ndim() == 1 && weight.dense() && (weight_dtype == dtype || weight_dtype == DType::f32), op,
          "weight must be [L], float32 or of q's dtype");
  const int64_t latent = weight.size(0);
  require(table, Kind::f32, {-1, -1}, op, "table must be float32 [max_pos,R]");
  const int64_t rot = table.size(1), limit = table.size(0);
  require(rot % 2 == 0 && rot <= q.size(2), op, "R must be even and at most the size of a head of q");
  require(kv.kind() == q.kind() && kv.ndim() == 2 && kv.dense(1) && kv.size(0) == tokens && kv.size(1) == latent + rot,
          op, "kv must be [T,L+R] of q's dtype with dense rows");
  require(cache, q.kind(), {-1, -1, latent + rot}, op, "cache must be contiguous [B,P,L+R] of q's dtype");
  require(positions, Kind::i64, {tokens}, op, "positions must be int64 [T]");
  require(slots, Kind::i64, {tokens}, op, "slot_mapping must be int64 [T]");
  require(q_out, q.kind(), {tokens, heads, rot}, op, "q's output must be contiguous [T,H,R]");
  const int64_t *at = positions.data<int64_t>(), *slot = slots.data<int64_t>();
  const int64_t places = cache.size(0) * cache.size(1);
  const LatentArgs a{.dtype = dtype,
                     .weight_dtype = weight_dtype,
                     .q = q.data<void>(),
                     .kv = kv.data<void>(),
                     .weight = weight.data<void>(),
                     .q_out = q_out.data<void>(),
                     .cache = cache.data<void>(),
                     .table = table.data<float>(),
                     .positions = at,
                     .slots = slot,
                     .q_stride = q.stride(0),
                     .kv_stride = kv.stride(0),
                     .heads = heads,
                     .plain = q.size(2) - rot,
                     .latent = latent,
                     .rot = rot,
                     .eps = eps,
                     .interleaved = interleaved};
  launch([=] {
    for (int64_t t = 0; t < tokens; t++) {
      require(at[t] >= 0 && at[t] < limit, op, "a position is outside the table");
      require(slot[t] >= 0 && slot[t] < places, op, "a slot is outside the cache");
    }
    over_rows(tokens, 20 + a.heads * (10 + 0.6 * a.rot) + 0.6 * (a.latent + a.rot),
              [&](int64_t begin, int64_t end) { kernels().latent_rope_store(a, begin, end); });
  });
}

}  // namespace

void bind_latent(nb::module_& m) {
  m.def("linear_heads", linear_heads);
  m.def("latent_rope_store", latent_rope_store);
}

}  // namespace tokserve
