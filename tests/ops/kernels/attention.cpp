// The write into the KV pages, and attention over them: pages arranged and not, windows, splits whole and merged, odd
// heads, groups that share a head.
#include "cases.h"

namespace tokserve::cases {

namespace {

struct Shape {
  int64_t heads, kv_heads, dim, page, window;
  int64_t length, queries;  // of the one request: the last `queries` of its positions attend
};

std::string described(const Shape& s, DType dtype) {
  return text(" %s heads=%lld/%lld dim=%lld page=%lld window=%lld length=%lld queries=%lld", name_of(dtype),
              (long long)s.heads, (long long)s.kv_heads, (long long)s.dim, (long long)s.page, (long long)s.window,
              (long long)s.length, (long long)s.queries);
}

// A block table of distinct pages in random order.
Array shuffled_pages(int64_t count, Random& from) {
  Array pages(Kind::i32, count);
  int32_t* page = pages.as<int32_t>();
  for (int64_t i = 0; i < count; i++) page[i] = static_cast<int32_t>(i);
  for (int64_t i = count - 1; i > 0; i--) std::swap(page[i], page[from.below(i + 1)]);
  return pages;
}

Array slots_of(const Array& pages, int64_t page, int64_t length) {
  Array slots(Kind::i64, length);
  for (int64_t t = 0; t < length; t++) slots.as<int64_t>()[t] = pages.as<int32_t>()[t / page] * page + t % page;
  return slots;
}

struct Tiles {
  std::vector<AttentionMember> members;
  std::vector<AttentionTile> tiles;
};

// Consecutive queries, as many as one task takes, of one head.
Tiles tiles_of(const Shape& s, const Array& pages) {
  const int64_t group = s.heads / s.kv_heads, max_queries = kQueryRows / group > 1 ? kQueryRows / group : 1;
  Tiles all;
  all.members.reserve(s.queries);
  for (int64_t q = 0; q < s.queries; q += max_queries) {
    const int64_t count = s.queries - q < max_queries ? s.queries - q : max_queries,
                  position = s.length - s.queries + q;
    const int64_t first = s.window > 0 && position >= s.window ? position - s.window + 1 : 0;
    all.members.push_back({pages.as<int32_t>(), q, position, count, 0, 0});
    for (int64_t head = 0; head < s.kv_heads; head++) {
      all.tiles.push_back({&all.members.back(), 1, count, head, first / kSplit, (position + count - 1) / kSplit + 1,
                           head + 1 < s.kv_heads});
    }
  }
  return all;
}

// One task of requests that share pages: the first has `queries` queries, the others one each, and half as many pages
// in common with the one before as that has; the rest of their pages is drawn from those that are full.
Tiles group_of(const Shape& s, const Array& pages, std::vector<Array>& tables, Random& from) {
  Tiles all;
  all.members.push_back({pages.as<int32_t>(), 0, s.length - s.queries, s.queries, 0, 0});
  int64_t queries = s.queries;
  const int64_t blocks = (s.length + s.page - 1) / s.page, full = s.length / s.page;
  for (int64_t shared = full; shared > 0; shared /= 2, queries++) {
    const int32_t* before = all.members.back().pages;
    Array table(Kind::i32, blocks);
    for (int64_t i = 0; i < blocks; i++) {
      table.as<int32_t>()[i] = i < shared ? before[i] : pages.as<int32_t>()[from.below(full)];
    }
    all.members.push_back({table.as<int32_t>(), queries, s.length - 1, 1, 0, shared * s.page});
    tables.push_back(std::move(table));
  }
  const int64_t first = s.window > 0 ? s.length - s.queries - s.window + 1 : 0;
  for (int64_t head = 0; head < s.kv_heads; head++) {
    all.tiles.push_back({all.members.data(), static_cast<int64_t>(all.members.size()), queries, head,
                         (first > 0 ? first : 0) / kSplit, (s.length - 1) / kSplit + 1, head + 1 < s.kv_heads});
  }
  return all;
}

void run_tiles(const Kernels& kernels, Results& results, const AttentionArgs& a,
               const std::vector<AttentionTile>& tiles, const std::string& name, const Array& out) {
  const Array memory = scratch(kernels.attention_scratch(a));
  for (const AttentionTile& tile : tiles) kernels.attend(a, tile, memory.as<char>());
  results.add("attend" + name, out);
  std::memset(out.as<char>(), 0xff, out.bytes());
  for (const AttentionTile& tile : tiles) {
    const int64_t size = kernels.attention_partial(a, tile.queries);
    const Array partials(Kind::f32, size * (tile.split_end - tile.split_begin));
    for (int64_t split = tile.split_end - 1; split >= tile.split_begin; split--) {
      float* partial = partials.as<float>() + (split - tile.split_begin) * size;
      kernels.attend_split(a, tile, split, partial, memory.as<char>());
    }
    results.add("attend_split" + name, partials);
    kernels.merge_splits(a, tile, partials.as<float>());
  }
  results.add("merge_splits" + name, out);
}

// Keys and values of the request are stored, then its last queries attend.  What is not stored is not a number.
void run_attend(const Kernels& kernels, Results& results, const Shape& s, DType dtype, Range range, int64_t specials) {
  Random from(static_cast<uint64_t>(s.length * 1000 + s.dim));
  const int64_t count = (s.length + s.page - 1) / s.page, stride = s.kv_heads * s.dim + 4,
                q_stride = s.heads * s.dim + 2;
  const Array pages = shuffled_pages(count, from), slots = slots_of(pages, s.page, s.length);
  Array k = random(dtype, s.length * stride, from, range), v = random(dtype, s.length * stride, from);
  Array q = random(dtype, s.queries * q_stride, from, range);
  if (specials > 0) {  // a value that is not finite would reach rows that give it no weight: zero times it is no zero
    k = with_specials(k, from, specials), q = with_specials(q, from, specials);
    v = with_specials(v, from, specials, Specials::finite);
  }
  const Array k_cache(kind_of(dtype), count * s.kv_heads * s.page * s.dim), v_cache(k_cache.kind(), k_cache.count());
  const Array out(kind_of(dtype), s.queries * s.heads * s.dim);
  kernels.store_kv({dtype, k.as<void>(), v.as<void>(), k_cache.as<void>(), v_cache.as<void>(), slots.as<int64_t>(),
                    stride, stride, s.kv_heads, s.page, s.dim},
                   0, s.length);
  const std::string name = described(s, dtype) + text(" exponents=%d specials=%d", range.high, specials > 0);
  results.add("store_kv" + name + " k", k_cache);
  results.add("store_kv" + name + " v", v_cache);
  float scale = 1.0f;
  while (scale * scale * static_cast<float>(s.dim) > 1.0f) scale *= 0.7071f;
  const AttentionArgs a{dtype,
                        q.as<void>(),
                        k_cache.as<void>(),
                        v_cache.as<void>(),
                        out.as<void>(),
                        q_stride,
                        s.heads,
                        s.kv_heads,
                        s.page,
                        s.dim,
                        scale,
                        s.window,
                        s.kv_heads == 2 ? 3.0f : 0.0f,
                        nullptr,
                        s.dim,
                        nullptr};
  run_tiles(kernels, results, a, tiles_of(s, pages).tiles, name, out);
  if (s.queries > 3) return;
  std::vector<Array> tables;
  const Tiles grouped = group_of(s, pages, tables, from);
  const int64_t queries = grouped.tiles[0].queries;
  if (queries * s.heads / s.kv_heads > kQueryRows) return;
  const Array group_q = random(dtype, queries * q_stride, from, range),
              group_out(out.kind(), queries * s.heads * s.dim);
  AttentionArgs of_group = a;
  of_group.q = group_q.as<void>(), of_group.out = group_out.as<void>();
  run_tiles(kernels, results, of_group, grouped.tiles, " of a group" + name, group_out);
}

// Rows are stored from a projection, then the last queries attend over them.  Groups are of all heads.
void run_latent(const Kernels& kernels, Results& results, const Shape& s, int64_t rot, DType dtype,
                DType weight_dtype) {
  Random from(static_cast<uint64_t>(s.length * 1000 + s.dim));
  constexpr int64_t positions = 60, plain = 6;
  const int64_t count = (s.length + s.page - 1) / s.page, latent = s.dim - rot, width = s.heads * (plain + rot);
  const Array pages = shuffled_pages(count, from), slots = slots_of(pages, s.page, s.length);
  const Array projected = random(dtype, s.length * (width + 2), from), kv = random(dtype, s.length * s.dim, from);
  const Array weight = random(weight_dtype, latent, from), table = random(Kind::f32, positions * rot, from, {-5, -1});
  const Array at = integers(Kind::i64, s.length, from, 0, positions - 1);
  const Array cache(kind_of(dtype), count * s.page * s.dim), q_rope(kind_of(dtype), s.length * s.heads * rot);
  kernels.latent_rope_store(
      {dtype, weight_dtype, projected.as<void>(), kv.as<void>(), weight.as<void>(), q_rope.as<void>(), cache.as<void>(),
       table.as<float>(), at.as<int64_t>(), slots.as<int64_t>(), width + 2, s.dim, s.heads, plain, latent, rot, 1e-6f,
       s.page % 2 == 0},
      0, s.length);
  const std::string name = " latent" + described(s, dtype) + text(" rot=%lld", (long long)rot);
  results.add("latent_rope_store" + name + " q", q_rope);
  results.add("latent_rope_store" + name + " rows", cache);
  const Array q = random(dtype, s.queries * s.heads * latent, from), out(kind_of(dtype), q.count());
  const AttentionArgs a{dtype,
                        q.as<void>(),
                        cache.as<void>(),
                        cache.as<void>(),
                        out.as<void>(),
                        s.heads * latent,
                        s.heads,
                        1,
                        s.page,
                        s.dim,
                        0.125f,
                        0,
                        0.0f,
                        nullptr,
                        latent,
                        q_rope.as<void>()};
  run_tiles(kernels, results, a, tiles_of(s, pages).tiles, name, out);
}

void run_qkv(const Kernels& kernels, Results& results, const Shape& s, DType dtype, DType weight_dtype, bool norm) {
  Random from(static_cast<uint64_t>(s.length + s.dim));
  constexpr int64_t positions = 60;
  const int64_t count = (s.length + s.page - 1) / s.page, rot = s.dim / 2 * 2 / (s.page % 2 + 1) / 2 * 2;
  const Array pages = shuffled_pages(count, from), slots = slots_of(pages, s.page, s.length);
  const Array qkv = with_specials(random(dtype, s.length * (s.heads + 2 * s.kv_heads) * s.dim, from), from, 300);
  const Array q_weight = random(weight_dtype, s.dim, from), k_weight = random(weight_dtype, s.dim, from);
  const Array table = random(Kind::f32, positions * rot, from, {-5, -1});
  const Array at = integers(Kind::i64, s.length, from, 0, positions - 1);
  const Array k_cache(kind_of(dtype), count * s.kv_heads * s.page * s.dim), v_cache(k_cache.kind(), k_cache.count());
  const Array q(kind_of(dtype), s.length * s.heads * s.dim);
  const Array memory(kind_of(dtype), kStoreRows * s.kv_heads * s.dim);
  const QkvArgs a{dtype,
                  weight_dtype,
                  qkv.as<void>(),
                  norm ? q_weight.as<void>() : nullptr,
                  norm ? k_weight.as<void>() : nullptr,
                  q.as<void>(),
                  k_cache.as<void>(),
                  v_cache.as<void>(),
                  table.as<float>(),
                  at.as<int64_t>(),
                  slots.as<int64_t>(),
                  s.heads,
                  s.kv_heads,
                  s.dim,
                  rot,
                  s.page,
                  1e-6f,
                  s.kv_heads == 2,
                  false,
                  s.kv_heads == 1};
  kernels.norm_rope_store(a, 0, s.length, memory.as<char>());
  const std::string name =
      "norm_rope_store" + described(s, dtype) + text(" weight=%s norm=%d", name_of(weight_dtype), norm);
  results.add(name + " q", q);
  results.add(name + " k", k_cache);
  results.add(name + " v", v_cache);
}

}  // namespace

void run_attention(const Kernels& kernels, Results& results) {
  constexpr Shape shapes[] = {
      {1, 1, 64, 16, 0, 1, 1},      {4, 2, 64, 16, 0, 37, 37},   {7, 1, 40, 32, 0, 70, 3},   {4, 2, 33, 16, 0, 50, 20},
      {2, 2, 80, 5, 0, 66, 9},      {3, 1, 31, 1, 7, 40, 40},    {6, 2, 128, 16, 0, 130, 6}, {32, 1, 16, 16, 0, 20, 2},
      {40, 1, 24, 16, 0, 65, 2},    {4, 1, 64, 16, 30, 200, 33}, {4, 2, 48, 64, 1, 90, 5},   {2, 1, 64, 16, 0, 1100, 1},
      {4, 2, 96, 16, 600, 1300, 2}, {2, 1, 34, 7, 520, 1040, 3},
  };
  for (const DType dtype : kTypes) {
    for (const Shape& s : shapes) {
      run_attend(kernels, results, s, dtype, {-3, 1}, 0);
      run_attend(kernels, results, s, dtype, {0, 4}, 0);
      run_attend(kernels, results, s, dtype, {-3, 1}, 20 * s.dim);
    }
    for (const Shape& s :
         {Shape{4, 2, 64, 16, 0, 40, 0}, {3, 1, 33, 16, 0, 20, 0}, {2, 2, 128, 32, 0, 9, 0}, {5, 1, 80, 5, 0, 13, 0}}) {
      run_qkv(kernels, results, s, dtype, dtype, true);
      run_qkv(kernels, results, s, dtype, DType::f32, true);
      run_qkv(kernels, results, s, dtype, dtype, false);
    }
    for (const Shape& s : {Shape{1, 1, 40, 16, 0, 1, 1},
                           {5, 1, 74, 7, 0, 70, 33},
                           {40, 1, 96, 32, 0, 130, 3},
                           {3, 1, 36, 16, 0, 1100, 2}}) {
      run_latent(kernels, results, s, 8, dtype, s.page % 2 ? DType::f32 : dtype);
    }
  }
}

}  // namespace tokserve::cases
