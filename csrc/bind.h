// What the binding files share: the chosen kernels, and how work is cut among threads.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "pool.h"
#include "record.h"
#include "tensor.h"

namespace tokserve {

// The table chosen by select(); never null.
const Kernels& kernels();

// Calls f(begin, end) over [0, rows).  Work worth less than a thread's wake-up is done here and now, with the
// interpreter lock held; more goes to the pool, without it.  `cost` is about nanoseconds of one core for one row.
// Raises ValueError while a record is made, except in `perform`: the record would lack the call.
template <class F>
void over_rows(int64_t rows, double cost, F&& f) {
  constexpr double worth = 15000.0;
  require(!recording.into || recording.performing, "record", "an op that cannot be recorded was called");
  if (rows * cost < worth) {
    if (rows > 0) f(int64_t{0}, rows);
    return;
  }
  const Unlocked unlocked;
  const int64_t pieces = std::min<int64_t>(rows, pool().threads() == 1 ? 1 : pool().threads() * 4);
  parallel(pieces, [&](int64_t piece) { f(rows * piece / pieces, rows * (piece + 1) / pieces); });
}

// Calls f(row, begin, end) in all threads, for blocks of kRowBlock of m rows and ranges of a weight's panels: pieces of
// about 8 us, small enough to balance, but of `fewest` panels where a thread has as many, to share what a piece
// prepares.  All blocks of a range come in a row, so that a thread keeps its part of the weight.  `cost`: about ns of
// one core for all.
template <class F>
void over_panels(int64_t m, int64_t panels, int64_t fewest, double cost, const F& f) {
  const int64_t blocks = (m + kRowBlock - 1) / kRowBlock;
  const int64_t wanted = std::min(static_cast<int64_t>(cost / blocks / 8000.0), panels / fewest);
  const int64_t pieces = std::min<int64_t>(panels, std::max<int64_t>(pool().threads(), wanted));
  parallel(blocks * pieces, [&](int64_t i) {
    const int64_t block = i % blocks, piece = i / blocks;
    f(block * kRowBlock, panels * piece / pieces, panels * (piece + 1) / pieces);
  });
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

// Panels of a weight of n rows; of a gated one, of n outputs.
inline int64_t panels_of(int64_t n, bool gated) {
  const int64_t width = gated ? kGatedPanel : kPanel;
  return (n + width - 1) / width;
}

// What an activation's name (none: nothing is applied) makes of a gated product; defined beside linear.
Gate gate_of(const std::optional<std::string>& activation);

// A product's sizes: n outputs, in panels of the weight, whose rows are as many as there are sums of a row of x.
struct Product {
  DType dtype, out_dtype;
  int64_t m, n, k, panels, sums;
};

// Those of x [M, K] times a weight, with what goes with any weight checked; defined beside linear.
Product product_of(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& out, Gate gate, const char* op);

void bind_amx(nanobind::module_& m);
void bind_elementwise(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_lora(nanobind::module_& m);
void bind_quant(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);

}  // namespace tokserve
