// Arguments of attention, its gradients and the write of latent rows; a part of kernels.h, whose rules hold here too.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace tokserve {

// A row of a latent cache: a normed latent vector and the rotated key that all heads share.  And the rotated part of
// the queries.
struct LatentArgs {
  DType dtype, weight_dtype;
  const void* q;       // [T, heads, plain + rot], rows q_stride elements apart
  const void* kv;      // [T, latent + rot], rows kv_stride elements apart
  const void* weight;  // [latent], of the latent's norm
  void* q_out;         // [T, heads, rot]
  void* cache;         // [B, page, latent + rot]
  const float* table;  // as in RopeArgs
  const int64_t* positions;
  const int64_t* slots;  // as in StoreArgs
  int64_t q_stride, kv_stride, heads, plain, latent, rot;
  float eps;
  bool interleaved;  // as in RopeArgs
};

struct AttentionArgs {
  DType dtype;
  const void* q;        // [T, heads, dim], rows q_stride elements apart
  const void* k_cache;  // [B, kv_heads, page * dim elements as in pages.h]
  const void* v_cache;
  void* out;  // [T, heads, value_dim]
  int64_t q_stride, heads, kv_heads, page, dim;
  float scale;
  int64_t window;      // 0: all keys up to the query
  float softcap;       // 0: none
  const float* sinks;  // [heads]: a score beside those of the keys, whose value is zero; or null
  // A value has value_dim elements: dim, or fewer of latent attention, whose q_rope is not null.  Then both caches are
  // one, [B, page, dim]: a row is a key, and its first value_dim elements are the value.  A query is value_dim elements
  // of q, then dim - value_dim of q_rope [T, heads, dim - value_dim].
  int64_t value_dim;
  const void* q_rope;
};

// Consecutive queries of one request.
struct AttentionMember {
  const int32_t* pages;  // this request's row of the block table
  int64_t token;         // first query's row in q and out
  int64_t position;      // first query's absolute position
  int64_t queries;
  int64_t end;     // of the keys that each query sees; 0: a query sees those up to its own position
  int64_t shared;  // so many positions, from 0 on, are in the same pages as those of the tile's member before this one
};

// One attention task: all heads of one group of the queries of one request, or of several that have their first pages
// in common.  Blocks of keys that adjacent members share are read once for all of them.
struct AttentionTile {
  const AttentionMember* members;
  int64_t count;    // of members
  int64_t queries;  // of all; queries * (heads / kv_heads) <= max(kQueryRows or kLatentRows, heads / kv_heads)
  int64_t kv_head;
  int64_t split_begin, split_end;  // splits with keys that some query of the tile sees
  bool next_head;                  // the next call has the same queries of the next head: its first keys are prefetched
};

// Gradients of causal attention, its keys and values in rows of their own instead of pages.
struct AttentionGradientsArgs {
  DType dtype;
  const void* grad;  // [T, heads, dim], rows grad_stride elements apart: of the result
  const void* q;     // likewise
  const void* k;     // [T, kv_heads, dim], rows k_stride elements apart
  const void* v;
  float* grad_q;  // [T, heads, dim]
  float* grad_k;  // [T, kv_heads, dim]; gradients are added to what it holds
  float* grad_v;
  int64_t grad_stride, q_stride, k_stride, v_stride, heads, kv_heads, dim;
  float scale;
  int64_t window;  // 0: all keys up to the query
  float softcap;   // 0: none
};

// Consecutive queries of one sequence, all heads of one group.
struct AttentionGradientsTask {
  const int64_t* path;  // [position + queries]: the tokens at the sequence's positions, ascending
  int64_t token;        // first query's row in q
  int64_t position;     // first query's position
  int64_t queries;
  int64_t first_key;  // the first position that some query sees
  int64_t kv_head;
};

}  // namespace tokserve
