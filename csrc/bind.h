// Shared by the bindings: the chosen kernels, the division of work among threads, and checks of arguments.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "capture.h"
#include "pool.h"
#include "tensor.h"

namespace tokserve {

// The table chosen by select(); never null.
const Kernels& kernels();

// Calls f(begin, end) over [0, rows).  Work that costs less than waking a thread runs in the calling thread, with the
// interpreter lock held; more goes to the pool, without it.  `cost` is about nanoseconds of one core for one row.
// Raises ValueError during capture outside of `launch`: the captured calls would lack this one.
template <class F>
void over_rows(int64_t rows, double cost, F&& f) {
  constexpr double threshold = 15000.0;
  require(!capturing.into || capturing.launching, "capture", "an op that cannot be captured was called");
  if (rows * cost < threshold) {
    if (rows > 0) f(int64_t{0}, rows);
    return;
  }
  const Unlocked unlocked;
  const int64_t pieces = std::min<int64_t>(rows, pool().threads() == 1 ? 1 : pool().threads() * 4);
  parallel(pieces, [&](int64_t piece) { f(rows * piece / pieces, rows * (piece + 1) / pieces); });
}

// Bytes of x that the cache which all threads share keeps while weights stream through it.
constexpr int64_t kSharedBytes = int64_t{2} << 20;

// Calls f(row, begin, end) in all threads, for blocks of kRowBlock of m rows and ranges of a weight's panels: pieces of
// about 8 us, small enough to balance, but of `fewest` panels where a thread has as many, to share what a piece
// prepares.  All blocks of a range come in a row, so that a thread keeps its part of the weight, as far as their rows
// fit in kSharedBytes; then the weight is read again for the next.  `bytes`: of all rows as the kernel reads them.
// `cost`: about ns of one core for all.
template <class F>
void over_panels(int64_t m, int64_t bytes, int64_t panels, int64_t fewest, double cost, const F& f) {
  const int64_t blocks = (m + kRowBlock - 1) / kRowBlock;
  const int64_t target = std::min(static_cast<int64_t>(cost / blocks / 8000.0), panels / fewest);
  const int64_t pieces = std::min<int64_t>(panels, std::max<int64_t>(pool().threads(), target));
  const int64_t groups = std::min(blocks, (bytes + kSharedBytes - 1) / kSharedBytes);
  for (int64_t group = 0; group < groups; group++) {
    const int64_t first = blocks * group / groups, count = blocks * (group + 1) / groups - first;
    parallel(count * pieces, [&](int64_t i) {
      const int64_t block = first + i % count, piece = i / count;
      f(block * kRowBlock, panels * piece / pieces, panels * (piece + 1) / pieces);
    });
  }
}

// Sizes of a layer's cache.
struct Caches {
  int64_t blocks, kv_heads, page, dim;
};

inline Caches caches_of(const Tensor& k_cache, const Tensor& v_cache, Kind kind, const char* op) {
  require(k_cache.ndim() == 4 && k_cache.dense() && k_cache.kind() == kind, op,
          "k_cache must be contiguous [B,Hk,P,D]");
  const Caches c{k_cache.size(0), k_cache.size(1), k_cache.size(2), k_cache.size(3)};
  require(v_cache, kind, {c.blocks, c.kv_heads, c.page, c.dim}, op, "v_cache must be like k_cache");
  return c;
}

// Panels of a weight with n rows, or of a gated one with n outputs.
inline int64_t panels_of(int64_t n, bool gated) {
  const int64_t width = gated ? kGatedPanel : kPanel;
  return (n + width - 1) / width;
}

// The gate of an activation's name; none: the gated product without activation.  Defined in bind_linear.cpp.
Gate gate_of(const std::optional<std::string>& activation);

// The activation of this name.  Defined in bind_elementwise.cpp.
Activation activation_of(const std::string& name);

// Elements of a packed weight; `pairs`: it is bfloat16.  Defined in bind_linear.cpp.
int64_t packed_size(int64_t panels, int64_t k, bool pairs);
// Bytes of a packed int8 weight.  Defined in bind_quant.cpp.
int64_t packed_int8_size(int64_t panels, int64_t k);

// The sizes of a product: `sums` is the number of the weight's rows, 2 n for a gated weight, else n.
struct Product {
  DType dtype, out_dtype;
  int64_t m, n, k, panels, sums;
};

// The sizes of x [M, K] times a weight, after the checks that all weights need.  Defined in bind_linear.cpp.
Product product_of(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& out, Gate gate, const char* op);

void bind_amx(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_experts_wna16(nanobind::module_& m);
void bind_deltas(nanobind::module_& m);
void bind_elementwise(nanobind::module_& m);
void bind_latent(nanobind::module_& m);
void bind_gradients(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_lora(nanobind::module_& m);
void bind_quant(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_recurrent(nanobind::module_& m);
void bind_attention_gradients(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_wna16(nanobind::module_& m);

}  // namespace tokserve
