// Binding of add_lora.
#include <nanobind/stl/vector.h>

#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

// The batch of a call; the kernels' `sizes` point into it.
struct Batch {
  const int32_t* adapters;  // [tokens]
  int64_t tokens, slots;
  std::vector<int64_t> sizes;
};

// Rows with an adapter, sorted and grouped by adapter; the groups point into `rows`.
std::vector<LoraGroup> group_by_adapter(const LoraArgs& a, const Batch& batch, std::vector<int32_t>& rows) {
  const int64_t slots = batch.slots;
  const int32_t* adapters = batch.adapters;
  for (int64_t i = 0; i < slots * a.shards; i++)
    require(a.ranks[i] >= 0 && a.ranks[i] <= a.r, "add_lora", "a rank is not within 0 and R");
  std::vector<int64_t> first(slots + 1, 0);  // of each slot in `rows`
  for (int64_t t = 0; t < batch.tokens; t++) {
    require(adapters[t] < slots, "add_lora", "an adapter has no slot");
    if (adapters[t] >= 0) first[adapters[t] + 1]++;
  }
  for (int64_t s = 0; s < slots; s++) first[s + 1] += first[s];
  rows.resize(first[slots]);
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  for (int64_t t = 0; t < batch.tokens; t++) {
    if (adapters[t] >= 0) rows[next[adapters[t]]++] = static_cast<int32_t>(t);
  }
  std::vector<LoraGroup> groups;
  for (int64_t s = 0; s < slots; s++) {
    const int32_t* ranks = a.ranks + s * a.shards;
    if (std::all_of(ranks, ranks + a.shards, [](int32_t rank) { return rank == 0; })) continue;
    for (int64_t i = first[s]; i < first[s + 1]; i += kLoraRows) {
      groups.push_back({rows.data() + i, std::min(kLoraRows, first[s + 1] - i), s});
    }
  }
  return groups;
}

// Floats of a group's inner products; a thread's scratch holds these, then the kernel's scratch.
int64_t inner_size(const LoraArgs& a) { return (kLoraRows * a.shards * a.r + 15) / 16 * 16; }

void add_group(const LoraArgs& a, const LoraGroup& group, int64_t scratch) {
  const int64_t inner = inner_size(a);
  float* memory = reinterpret_cast<float*>(thread_scratch(inner * static_cast<int64_t>(sizeof(float)) + scratch));
  kernels().lora_down(a, group, 0, a.shards * a.r, memory, reinterpret_cast<char*>(memory + inner));
  kernels().lora_up(a, group, 0, a.n, memory);
}

// For few groups: each is divided into pieces, first by the rows of down, then by columns.
void add_in_pieces(const LoraArgs& a, const std::vector<LoraGroup>& groups, int64_t scratch) {
  const int64_t inner = inner_size(a), pieces = 4 * pool().threads(), count = static_cast<int64_t>(groups.size());
  std::vector<float> memory(inner * count);
  // Calls f(group, its inner products, begin, end) over ranges of [0, total) that begin at multiples of `unit`.
  const auto over = [&](int64_t total, int64_t unit, auto&& f) {
    const int64_t units = (total + unit - 1) / unit;
    parallel(count * pieces, [&](int64_t i) {
      const int64_t group = i / pieces, piece = i % pieces, begin = units * piece / pieces,
                    end = units * (piece + 1) / pieces;
      if (begin < end) f(groups[group], memory.data() + group * inner, begin * unit, std::min(total, end * unit));
    });
  };
  over(a.shards * a.r, 4, [&](const LoraGroup& group, float* products, int64_t begin, int64_t end) {
    kernels().lora_down(a, group, begin, end, products, thread_scratch(scratch));
  });
  over(a.n, kPanel, [&](const LoraGroup& group, const float* products, int64_t begin, int64_t end) {
    kernels().lora_up(a, group, begin, end, products);
  });
}

void add_rows(LoraArgs a, const Batch& batch) {
  a.sizes = batch.sizes.data();
  std::vector<int32_t> by_adapter;
  const std::vector<LoraGroup> groups = group_by_adapter(a, batch, by_adapter);
  const int64_t count = static_cast<int64_t>(groups.size()), scratch = kernels().lora_scratch(a);
  double cost = 0;  // estimated ns of one core
  for (const LoraGroup& group : groups) {
    for (int64_t p = 0; p < a.shards; p++)
      cost += 0.1 * a.ranks[group.slot * a.shards + p] * static_cast<double>(a.k + a.sizes[p]);
  }
  if (cost < 15000.0) {  // less than waking a thread costs
    for (const LoraGroup& group : groups) add_group(a, group, scratch);
    return;
  }
  const Unlocked unlocked;
  if (count < 2 * pool().threads() && pool().threads() > 1) return add_in_pieces(a, groups, scratch);
  parallel(count, [&](int64_t i) { add_group(a, groups[i], scratch); });
}

void add_lora(const Tensor& out, const Tensor& x, const Tensor& adapters, const Tensor& down, const Tensor& up,
              const Tensor& ranks, const Tensor& scales, const std::vector<int64_t>& sizes) {
  const char* op = "add_lora";
  const DType dtype = float_type(x, op);
  const int64_t shards = static_cast<int64_t>(sizes.size());
  require(x.ndim() == 2 && x.dense(1), op, "x must be [T,K] with dense rows");
  require(out.ndim() == 2 && out.dense(1) && out.size(0) == x.size(0) && out.kind() == x.kind(), op,
          "out must be [T,N] of x's dtype with dense rows");
  require(down, x.kind(), {-1, shards, -1, x.size(1)}, op, "down must be contiguous [S,P,R,K] of x's dtype");
  const int64_t rows = x.size(0), slots = down.size(0), r = down.size(2);
  require(up, x.kind(), {slots, r, out.size(1)}, op, "up must be contiguous [S,R,N] of x's dtype");
  require(adapters, Kind::i32, {rows}, op, "adapters must be int32 [T]");
  require(ranks, Kind::i32, {slots, shards}, op, "ranks must be int32 [S,P]");
  require(scales, Kind::f32, {slots, shards}, op, "scales must be float32 [S,P]");
  int64_t outputs = 0;
  for (const int64_t size : sizes) {
    require(size >= 0, op, "a size is negative");
    outputs += size;
  }
  require(outputs == out.size(1), op, "sizes must add up to N");
  const LoraArgs a{.dtype = dtype,
                   .x = x.data<void>(),
                   .down = down.data<void>(),
                   .up = up.data<void>(),
                   .ranks = ranks.data<int32_t>(),
                   .scales = scales.data<float>(),
                   .sizes = nullptr,
                   .out = out.data<void>(),
                   .k = x.size(1),
                   .n = out.size(1),
                   .r = r,
                   .shards = shards,
                   .x_stride = x.stride(0),
                   .out_stride = out.stride(0)};
  const Batch batch{adapters.data<int32_t>(), rows, slots, sizes};
  launch([=] { add_rows(a, batch); });
}

}  // namespace

void bind_lora(nb::module_& m) {
  m.def("add_lora", add_lora, nb::arg("out"), nb::arg("x"), nb::arg("adapters"), nb::arg("down"), nb::arg("up"),
        nb::arg("ranks"), nb::arg("scales"), nb::arg("sizes"));
}

}  // namespace tokserve
