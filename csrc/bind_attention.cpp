// Bindings of the store into the KV pages and of attention over them: all indices are checked here, once per call.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "attention_tiles.h"
#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

// Of all calls: keys that queries saw, counted once per request, tile and layer, and those that were not read for it
// alone.
std::atomic<int64_t> keys_seen{0}, keys_shared{0};

void store_kv(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots) {
  const char* op = "store_kv";
  const DType dtype = float_type(k, op);
  const Caches c = caches_of(k_cache, v_cache, k.kind(), op);
  for (const Tensor* t : {&k, &v}) {
    require(t->kind() == k.kind() && t->ndim() == 3 && t->dense(1), op, "k and v must be [T,Hk,D], dense in a token");
    require(t->size(0) == k.size(0) && t->size(1) == c.kv_heads && t->size(2) == c.dim, op,
            "k and v must fit the caches");
  }
  const int64_t tokens = k.size(0);
  require(slots, Kind::i64, {tokens}, op, "slot_mapping must be int64 [T]");
  const int64_t* slot = slots.data<int64_t>();
  const StoreArgs a{.dtype = dtype,
                    .k = k.data<void>(),
                    .v = v.data<void>(),
                    .k_cache = k_cache.data<void>(),
                    .v_cache = v_cache.data<void>(),
                    .slots = slot,
                    .k_stride = k.stride(0),
                    .v_stride = v.stride(0),
                    .heads = c.kv_heads,
                    .page = c.page,
                    .dim = c.dim};
  launch([=] {
    for (int64_t t = 0; t < tokens; t++)
      require(slot[t] >= 0 && slot[t] < c.blocks * c.page, op, "a slot is outside the cache");
    over_rows(tokens, c.kv_heads * (10 + 0.4 * c.dim),
              [&](int64_t begin, int64_t end) { kernels().store_kv(a, begin, end); });
  });
}

void store_rows(const Tensor& rows, const Tensor& pages, const Tensor& slots) {
  const char* op = "store_rows";
  float_type(rows, op);
  require(rows.ndim() == 2 && rows.dense(), op, "rows must be contiguous [T,H]");
  const int64_t tokens = rows.size(0), bytes = rows.size(1) * rows.item();
  require(pages, rows.kind(), {-1, -1, rows.size(1)}, op, "pages must be [B,P,H] of the rows' dtype");
  require(slots, Kind::i64, {tokens}, op, "slot_mapping must be int64 [T]");
  const int64_t places = pages.size(0) * pages.size(1);
  const int64_t* slot = slots.data<int64_t>();
  const char* from = rows.data<char>();
  char* to = pages.data<char>();
  launch([=] {
    for (int64_t t = 0; t < tokens; t++) {
      require(slot[t] >= 0 && slot[t] < places, op, "a slot is outside the pages");
      std::memcpy(to + slot[t] * bytes, from + t * bytes, bytes);
    }
  });
}

// For few tiles with long contexts: splits go to different threads, then the partial results of each tile are merged.
void attend_by_splits(const AttentionArgs& a, const std::vector<AttentionTile>& tiles) {
  const Kernels& kernel = kernels();
  struct Piece {
    int64_t tile, split;
    float* partial;
  };
  std::vector<Piece> pieces;
  std::vector<float*> first;
  int64_t floats = 0;
  for (const AttentionTile& tile : tiles)
    floats += (tile.split_end - tile.split_begin) * kernel.attention_partial(a, tile.queries);
  std::vector<float> partials(floats);
  float* at = partials.data();
  for (size_t i = 0; i < tiles.size(); i++) {
    first.push_back(at);
    for (int64_t split = tiles[i].split_begin; split < tiles[i].split_end; split++) {
      pieces.push_back({static_cast<int64_t>(i), split, at});
      at += kernel.attention_partial(a, tiles[i].queries);
    }
  }
  const int64_t scratch = kernel.attention_scratch(a);
  parallel(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    kernel.attend_split(a, tiles[pieces[i].tile], pieces[i].split, pieces[i].partial, thread_scratch(scratch));
  });
  parallel(static_cast<int64_t>(tiles.size()), [&](int64_t i) { kernel.merge_splits(a, tiles[i], first[i]); });
}

void attend(const AttentionArgs& a, const std::vector<AttentionTile>& tiles, bool threaded) {
  const Kernels& kernel = kernels();
  const int64_t scratch = kernel.attention_scratch(a), tasks = static_cast<int64_t>(tiles.size()) * a.kv_heads;
  int64_t splits = 0;
  for (const AttentionTile& tile : tiles) splits += tile.split_end - tile.split_begin;
  if (threaded && tasks < 2 * pool().threads() && splits * a.kv_heads > tasks) {
    std::vector<AttentionTile> by_head;
    for (const AttentionTile& tile : tiles) {
      for (int64_t h = 0; h < a.kv_heads; h++) by_head.push_back(tile), by_head.back().kv_head = h;
    }
    return attend_by_splits(a, by_head);
  }
  // A task takes several heads of a tile, as long as enough tasks remain to balance the threads.
  int64_t heads = a.kv_heads;
  while (threaded && heads > 1 && tasks / heads < 8 * pool().threads()) heads = (heads + 1) / 2;
  const int64_t parts = (a.kv_heads + heads - 1) / heads;
  const auto one = [&](int64_t i) {
    AttentionTile tile = tiles[i / parts];
    const int64_t begin = i % parts * heads, end = std::min(begin + heads, a.kv_heads);
    for (tile.kv_head = begin; tile.kv_head < end; tile.kv_head++) {
      tile.next_head = tile.kv_head + 1 < end;
      kernel.attend(a, tile, thread_scratch(scratch));
    }
  };
  const int64_t count = static_cast<int64_t>(tiles.size()) * parts;
  if (threaded) return parallel(count, one);
  for (int64_t i = 0; i < count; i++) one(i);
}

// The rows' block tables, lengths and first queries; T is the number of queries.
AttentionRows rows_of(const Tensor& tables, const Tensor& start, const Tensor& lens, int64_t tokens, const char* op) {
  require(tables.kind() == Kind::i32 && tables.ndim() == 2 && tables.dense(1), op,
          "block_tables must be int32 [R,max_blocks]");
  const int64_t rows = tables.size(0);
  require(lens, Kind::i32, {rows}, op, "seq_lens must be int32 [R]");
  require(start, Kind::i32, {rows + 1}, op, "query_start must be int32 [R+1]");
  return {rows,           tokens,          start.data<int32_t>(), lens.data<int32_t>(), tables.data<int32_t>(),
          tables.size(1), tables.stride(0)};
}

// The batch, in the calling thread if it is little work.
void attend_rows(const AttentionArgs& a, int64_t blocks, const AttentionRows& batch) {
  const AttentionTiles work = make_tiles(a, blocks, batch, pool().threads());
  keys_seen.fetch_add(work.keys, std::memory_order_relaxed);
  keys_shared.fetch_add(work.shared, std::memory_order_relaxed);
  if (work.cost < 15000.0) return attend(a, work.tiles, false);
  const Unlocked unlocked;
  attend(a, work.tiles, pool().threads() > 1);
}

void paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& tables,
                     const Tensor& start, const Tensor& lens, float scale, int64_t window, float softcap,
                     const std::optional<Tensor>& sinks, const Tensor& out,
                     const std::optional<Tensor>& bidirectional) {
  const char* op = "paged_attention";
  const DType dtype = float_type(q, op);
  require(q.ndim() == 3 && q.dense(1), op, "q must be [T,Hq,D], dense in a token");
  const Caches c = caches_of(k_cache, v_cache, q.kind(), op);
  const int64_t tokens = q.size(0), heads = q.size(1);
  require(c.kv_heads > 0 && c.page > 0 && c.dim > 0, op, "the caches are empty");
  require(heads > 0 && heads % c.kv_heads == 0 && q.size(2) == c.dim, op, "q's heads must fit the caches");
  require(out, q.kind(), {tokens, heads, c.dim}, op, "out must be like q");
  if (sinks) require(*sinks, Kind::f32, {heads}, op, "sinks must be float32 [Hq]");
  AttentionRows batch = rows_of(tables, start, lens, tokens, op);
  if (bidirectional) {
    require(*bidirectional, Kind::boolean, {batch.rows}, op, "bidirectional must be bool [R]");
    batch.bidirectional = bidirectional->data<bool>();
  }
  const AttentionArgs a{.dtype = dtype,
                        .q = q.data<void>(),
                        .k_cache = k_cache.data<void>(),
                        .v_cache = v_cache.data<void>(),
                        .out = out.data<void>(),
                        .q_stride = q.stride(0),
                        .heads = heads,
                        .kv_heads = c.kv_heads,
                        .page = c.page,
                        .dim = c.dim,
                        .scale = scale,
                        .window = window,
                        .softcap = softcap,
                        .sinks = sinks ? sinks->data<float>() : nullptr,
                        .value_dim = c.dim,
                        .q_rope = nullptr};
  launch([=] { attend_rows(a, c.blocks, batch); });
}

void latent_attention(const Tensor& q, const Tensor& q_rope, const Tensor& cache, const Tensor& tables,
                      const Tensor& start, const Tensor& lens, float scale, const Tensor& out) {
  const char* op = "latent_attention";
  const DType dtype = float_type(q, op);
  require(q, q.kind(), {-1, -1, -1}, op, "q must be contiguous [T,H,L]");
  const int64_t tokens = q.size(0), heads = q.size(1), latent = q.size(2);
  require(q_rope, q.kind(), {tokens, heads, -1}, op, "q_rope must be contiguous [T,H,R] of q's dtype");
  const int64_t dim = latent + q_rope.size(2);
  require(heads > 0 && latent > 0 && latent % 2 == 0 && dim % 2 == 0, op, "L and R must be even");
  require(cache, q.kind(), {-1, -1, dim}, op, "cache must be contiguous [B,P,L+R] of q's dtype");
  require(cache.size(1) > 0, op, "the cache is empty");
  require(out, q.kind(), {tokens, heads, latent}, op, "out must be like q");
  const AttentionRows batch = rows_of(tables, start, lens, tokens, op);
  const int64_t blocks = cache.size(0);
  const AttentionArgs a{.dtype = dtype,
                        .q = q.data<void>(),
                        .k_cache = cache.data<void>(),
                        .v_cache = cache.data<void>(),
                        .out = out.data<void>(),
                        .q_stride = heads * latent,
                        .heads = heads,
                        .kv_heads = 1,
                        .page = cache.size(1),
                        .dim = dim,
                        .scale = scale,
                        .window = 0,
                        .softcap = 0.0f,
                        .sinks = nullptr,
                        .value_dim = latent,
                        .q_rope = q_rope.data<void>()};
  launch([=] { attend_rows(a, blocks, batch); });
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("store_kv", store_kv);
  m.def("store_rows", store_rows);
  m.def("paged_attention", paged_attention, nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("tables"),
        nb::arg("start"), nb::arg("lens"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"),
        nb::arg("sinks").none(), nb::arg("out"), nb::arg("bidirectional").none() = nb::none());
  m.def("latent_attention", latent_attention);
  m.def("attention_keys", [] { return std::pair(keys_seen.load(), keys_shared.load()); });
}

}  // namespace tokserve
