// What adapters add: several slots and shards, ranks in use or not, groups of every size, whole and in pieces.
#include "cases.h"

namespace tokserve::cases {

namespace {

struct Shape {
  int64_t k, r;
  std::vector<int64_t> sizes;
};

void run_group(const Kernels& kernels, Results& results, const std::string& name, const LoraArgs& a,
               const LoraGroup& group, const Array& out, int64_t pieces) {
  const int64_t total = a.shards * a.r;
  Array inner(Kind::f32, kLoraRows * total);
  const Array memory = scratch(kernels.lora_scratch(a));
  for (int64_t i = 0; i < pieces; i++) {
    kernels.lora_down(a, group, total * i / pieces, total * (i + 1) / pieces, inner.as<float>(), memory.as<char>());
  }
  results.add("lora_down" + name, inner);
  const int64_t blocks = (a.n + kPanel - 1) / kPanel;
  for (int64_t i = 0; i < pieces; i++) {
    const int64_t begin = blocks * i / pieces * kPanel, end = blocks * (i + 1) / pieces * kPanel;
    if (begin < end) kernels.lora_up(a, group, begin, end < a.n ? end : a.n, inner.as<float>());
  }
  results.add("lora_up" + name, out);
}

void run_shape(const Kernels& kernels, Results& results, const Shape& s, DType dtype) {
  constexpr int64_t slots = 3, tokens = 9;
  Random from(static_cast<uint64_t>(s.k));
  const int64_t shards = static_cast<int64_t>(s.sizes.size());
  int64_t n = 0;
  for (const int64_t size : s.sizes) n += size;
  const int64_t x_stride = s.k + 3, out_stride = n + 7;
  const Array x = with_specials(random(dtype, tokens * x_stride, from), from, 400);
  const Array down = random(dtype, slots * shards * s.r * s.k, from), up = random(dtype, slots * s.r * n, from);
  const Array ranks = integers(Kind::i32, slots * shards, from, 0, s.r),
              scales = random(Kind::f32, slots * shards, from);
  const Array out = random(dtype, tokens * out_stride, from);
  const LoraArgs a{dtype,
                   x.as<void>(),
                   down.as<void>(),
                   up.as<void>(),
                   ranks.as<int32_t>(),
                   scales.as<float>(),
                   s.sizes.data(),
                   out.as<void>(),
                   s.k,
                   n,
                   s.r,
                   shards,
                   x_stride,
                   out_stride};
  const int32_t rows[] = {8, 0, 3, 5};
  for (int64_t count = 1; count <= kLoraRows; count++) {
    for (int64_t slot = 0; slot < slots; slot++) {
      const std::string name = text(" %s k=%lld n=%lld r=%lld rows=%lld slot=%lld", name_of(dtype), (long long)s.k,
                                    (long long)n, (long long)s.r, (long long)count, (long long)slot);
      run_group(kernels, results, name, a, {rows, count, slot}, out, 1 + slot);
    }
  }
}

}  // namespace

void run_lora(const Kernels& kernels, Results& results) {
  const Shape shapes[] = {{1, 1, {1}}, {33, 5, {70}}, {64, 8, {64, 17, 130}}, {300, 16, {100, 31}}};
  for (const DType dtype : kTypes) {
    for (const Shape& shape : shapes) run_shape(kernels, results, shape, dtype);
  }
}

}  // namespace tokserve::cases
