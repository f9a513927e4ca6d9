// linear_wna16 with both widths of weights, every dtype and kind of scales, gates and tile heights; embedding_wna16.
#include "cases.h"

namespace tokserve::cases {

namespace {

struct Case {
  int64_t m, n, k, group;
  int bits;
  bool mins, parts, folded, ordered;
  Gate gate;
  bool float8 = false;
};

Array scales_for(int64_t count, DType dtype, bool powers, Random& from) {
  if (!powers) return random(dtype, count, from, {-9, -6});
  Array scales(kind_of(DType::bf16), count);
  for (int64_t i = 0; i < count; i++) scales.set(i, (120 + from.below(6)) << 7);  // 2 ** -7 .. 2 ** -2
  return scales;
}

void run_linear(const Kernels& kernels, Results& results, const Case& c, DType dtype, uint64_t seed) {
  Random from(seed);
  const bool gated = c.gate != Gate::none;
  const int64_t width = gated ? kGatedPanel : kPanel, panels = (c.n + width - 1) / width, padded = (c.k + 7) / 8 * 8;
  const int64_t groups = (c.k + c.group - 1) / c.group, ratio = c.parts ? 4 : 1;
  const DType scale_type = c.folded ? DType::bf16 : c.float8 ? DType::f32 : seed % 2 ? DType::f16 : DType::f32;
  const Array x = random(dtype, c.m * (c.k + 3), from), bias = random(dtype, 2 * c.n, from);
  const Array packed = integers(Kind::u8, panels * padded * kPanel * c.bits / 8, from, 0, 255);
  const Array factors = integers(Kind::i8, 16, from, -127, 127);
  const Array scales = scales_for(panels * ((groups + ratio - 1) / ratio) * kPanel, scale_type, c.folded, from);
  const Array parts = integers(Kind::i8, panels * groups * kPanel, from, -128, 127);
  const Array order = integers(Kind::i32, c.k, from, 0, c.k - 1);
  const int64_t columns = c.gate == Gate::both ? 2 * c.n : c.n;
  Array out(kind_of(dtype), c.m * columns);
  Wna16Args a{};
  a.dtype = a.out_dtype = dtype;
  a.gate = c.gate;
  a.x = x.as<void>();
  a.packed = packed.as<uint8_t>();
  a.factors = factors.as<int8_t>();
  a.scales = {scale_type, scales.as<void>(), c.parts ? parts.as<int8_t>() : nullptr, ratio};
  if (c.mins) a.mins = a.scales;
  a.order = c.ordered ? order.as<int32_t>() : nullptr;
  a.bias = seed % 3 ? bias.as<void>() : nullptr;
  a.out = out.as<void>();
  a.m = c.m;
  a.n = c.n;
  a.k = c.k;
  a.x_stride = c.k + 3;
  a.out_stride = columns;
  a.group = c.group;
  a.bits = c.bits;
  a.folded = c.folded;
  a.float8 = c.float8;
  const Array rows = scratch(kernels.wna16_rows_size(a) + 64);
  a.rows = rows.as<char>();
  kernels.wna16_rows(a, 0, c.m);
  for (int64_t row = 0; row < c.m; row += kRowBlock) kernels.linear_wna16(a, row, 0, panels);
  const std::string name =
      text("%s bits=%d m=%lld n=%lld k=%lld group=%lld mins=%d parts=%d folded=%d gate=%d float8=%d", name_of(dtype),
           c.bits, (long long)c.m, (long long)c.n, (long long)c.k, (long long)c.group, c.mins, c.parts, c.folded,
           static_cast<int>(c.gate), c.float8);
  results.add("linear_wna16 " + name, out);
  a.rounded = true;
  const Array rounded = scratch(kernels.wna16_rows_size(a) + 64);
  a.rows = rounded.as<char>();
  kernels.wna16_rows(a, 0, c.m);
  for (int64_t row = 0; row < c.m; row += kRowBlock) kernels.linear_wna16(a, row, 0, panels);
  results.add("linear_wna16 rounded " + name, out);
  a.rounded = false;
  if (gated || c.ordered) return;
  const Array ids = integers(Kind::i64, 5, from, 0, c.n - 1);
  Array found(kind_of(dtype), 5 * c.k);
  a.out = found.as<void>();
  kernels.embedding_wna16(a, ids.as<int64_t>(), 0, 5);
  results.add("embedding_wna16 " + name, found);
}

}  // namespace

void run_wna16(const Kernels& kernels, Results& results) {
  const Case cases[] = {
      {1, 65, 64, 32, 4, false, false, false, false, Gate::none},
      {7, 70, 72, 32, 4, true, false, false, false, Gate::none},
      {13, 40, 300, 32, 4, true, true, false, false, Gate::silu},
      {131, 33, 160, 16, 8, false, true, false, false, Gate::none},
      {6, 64, 128, 32, 4, false, false, true, false, Gate::both},
      {5, 20, 264, 264, 4, true, false, false, true, Gate::none},
      {3, 9, 7, 7, 8, true, false, false, false, Gate::gelu},
      {1, 70, 136, 64, 8, false, false, false, false, Gate::none, true},
      {133, 40, 392, 128, 8, false, false, false, false, Gate::silu, true},
      {9, 65, 31, 31, 8, false, false, false, false, Gate::none, true},
  };
  uint64_t seed = 900;
  for (const DType dtype : kTypes) {
    for (const Case& c : cases) run_linear(kernels, results, c, dtype, seed++);
  }
}

}  // namespace tokserve::cases
