// linear and linear_int8 with every dtype, gate, tile height and edge of a panel; quantize_rows and quantize_int4;
// route and combine.
#include "cases.h"

namespace tokserve::cases {

namespace {

struct Shape {
  int64_t m, n, k;
};

constexpr Gate kGates[] = {Gate::none, Gate::both, Gate::silu, Gate::gelu, Gate::clamped};

int64_t panels_of(int64_t n, Gate gate) {
  const int64_t width = gate == Gate::none ? kPanel : kGatedPanel;
  return (n + width - 1) / width;
}
int64_t sums_of(int64_t n, Gate gate) { return gate == Gate::none ? n : 2 * n; }

// Calls put(panel, column of the panel) for those columns that a weight of n outputs fills.
template <class Put>
void each_column(int64_t n, Gate gate, const Put& put) {
  const int64_t width = gate == Gate::none ? kPanel : kGatedPanel;
  for (int64_t panel = 0; panel < panels_of(n, gate); panel++) {
    for (int64_t column = 0; column < kPanel; column++) {
      if (panel * width + column % width < n) put(panel, column);
    }
  }
}

// A packed weight as pack_linear lays it out, of random elements.
Array packed(DType dtype, int64_t n, int64_t k, Gate gate, Random& from, Range range, int64_t specials) {
  const int64_t depth = dtype == DType::bf16 ? 2 : 1, padded = (k + depth - 1) / depth * depth, size = size_of(dtype);
  Array weight(kind_of(dtype), panels_of(n, gate) * padded * kPanel);
  std::memset(weight.as<char>(), 0, weight.bytes());
  each_column(n, gate, [&](int64_t panel, int64_t column) {
    Array row = random(dtype, k, from, range);
    if (specials > 0) row = with_specials(row, from, specials);
    for (int64_t i = 0; i < k; i++) {
      std::memcpy(weight.at(panel * padded * kPanel + (i / depth * kPanel + column) * depth + i % depth), row.at(i),
                  size);
    }
  });
  return weight;
}

Array packed_int8(int64_t n, int64_t k, Gate gate, Random& from) {
  const int64_t quads = (k + 3) / 4;
  Array weight(Kind::u8, panels_of(n, gate) * quads * kPanel * 4);
  std::memset(weight.as<char>(), 128, weight.bytes());
  each_column(n, gate, [&](int64_t panel, int64_t column) {
    for (int64_t i = 0; i < k; i++) {
      const int64_t value =
          from.below(8) == 0 ? (from.below(2) ? 255 : 1) : 1 + from.below(255);  // the ends more often
      weight.set(((panel * quads + i / 4) * kPanel + column) * 4 + i % 4, value);
    }
  });
  return weight;
}

struct Options {
  Range range = {};
  int64_t specials = 0;  // one element in so many, 0: none
  bool bias = false;
};

void run_linear(const Kernels& kernels, Results& results, const Shape& s, DType dtype, DType out_dtype, Gate gate,
                uint64_t seed, const Options& options) {
  Random from(seed);
  const int64_t stride = s.k + 5;
  Array x = random(dtype, s.m * stride, from, options.range);
  if (options.specials > 0) x = with_specials(x, from, options.specials);
  const Array weight = packed(dtype, s.n, s.k, gate, from, options.range, 4 * options.specials);
  const Array bias = random(dtype, sums_of(s.n, gate), from);
  Array out(kind_of(out_dtype), s.m * s.n * (gate == Gate::both ? 2 : 1));
  const LinearArgs a{
      dtype, out_dtype, gate, x.as<void>(), weight.as<void>(), options.bias ? bias.as<void>() : nullptr, out.as<void>(),
      s.m,   s.n,       s.k,  stride,       seed % 2 == 0};
  const Array memory = scratch(kernels.linear_scratch(a));
  for (int64_t row = 0; row < s.m; row += kRowBlock) kernels.linear(a, row, 0, panels_of(s.n, gate), memory.as<char>());
  results.add(text("linear %s out=%s gate=%d m=%lld n=%lld k=%lld bias=%d specials=%d exponents=%d", name_of(dtype),
                   name_of(out_dtype), static_cast<int>(gate), (long long)s.m, (long long)s.n, (long long)s.k,
                   options.bias, options.specials > 0, options.range.low),
              out);
}

void run_linears(const Kernels& kernels, Results& results, DType dtype) {
  constexpr Shape shapes[] = {{1, 1, 1},  {1, 65, 31},  {2, 100, 7}, {1, 64, 300},  {5, 130, 64},  {40, 63, 129},
                              {7, 33, 2}, {17, 16, 65}, {6, 1, 257}, {13, 64, 128}, {131, 70, 37}, {40, 64, 1027}};
  uint64_t seed = 100;
  for (const Shape& s : shapes) {
    for (const Gate gate : kGates) {
      run_linear(kernels, results, s, dtype, dtype, gate, seed++, {{}, 0, s.n % 2 == 0});
      run_linear(kernels, results, s, dtype, dtype, gate, seed++, {{}, 8 * s.k, true});
    }
    run_linear(kernels, results, s, dtype, DType::f32, Gate::none, seed++, {});
    if (dtype != DType::f16)
      run_linear(kernels, results, s, dtype, DType::f32, Gate::none, seed++, {{-72, -62}, 0, false});
    else run_linear(kernels, results, s, dtype, dtype, Gate::none, seed++, {{-14, -9}, 0, false});
  }
  for (int64_t m = 1; m <= 40; m++) run_linear(kernels, results, {m, 70, 67}, dtype, DType::f32, Gate::none, 99, {});
}

// x with rows that are all zero, tiny, huge, infinite or not numbers.
Array uneven_rows(DType dtype, int64_t m, int64_t stride, Random& from) {
  Array x = random(dtype, m * stride, from);
  for (int64_t row = 0; row < m; row++) {
    const int64_t kind = from.below(9);
    if (kind == 0) std::memset(x.at(row * stride), 0, stride * size_of(dtype));
    if (kind == 1) x.set(row * stride, format_of(x.kind()).infinity);
    if (kind == 2) x.set(row * stride, format_of(x.kind()).infinity + 1);
    if (kind == 3) x.set(row * stride, format_of(x.kind()).infinity - 1);
    if (kind == 4) {
      const Array tiny = random(dtype, stride, from, dtype == DType::f16 ? Range{-14, -12} : Range{-126, -95});
      std::memcpy(x.at(row * stride), tiny.as<char>(), tiny.bytes());
    }
  }
  return x;
}

void run_int8(const Kernels& kernels, Results& results, const Shape& s, DType dtype, DType out_dtype, Gate gate,
              uint64_t seed) {
  Random from(seed);
  const int64_t stride = s.k + 3;
  const Array x = uneven_rows(dtype, s.m, stride, from), weight = packed_int8(s.n, s.k, gate, from);
  const Array scales = random(Kind::f32, sums_of(s.n, gate), from, {-9, -6}),
              bias = random(dtype, sums_of(s.n, gate), from);
  Array out(kind_of(out_dtype), s.m * s.n * (gate == Gate::both ? 2 : 1));
  Int8Args a{dtype,
             out_dtype,
             gate,
             x.as<void>(),
             weight.as<uint8_t>(),
             scales.as<float>(),
             seed % 2 ? bias.as<void>() : nullptr,
             out.as<void>(),
             s.m,
             s.n,
             s.k,
             stride,
             nullptr};
  const Array rows = scratch(kernels.int8_rows_size(a));
  a.rows = rows.as<char>();
  kernels.int8_rows(a, 0, s.m);
  for (int64_t row = 0; row < s.m; row += kRowBlock) kernels.linear_int8(a, row, 0, panels_of(s.n, gate));
  results.add(text("linear_int8 %s out=%s gate=%d m=%lld n=%lld k=%lld", name_of(dtype), name_of(out_dtype),
                   static_cast<int>(gate), (long long)s.m, (long long)s.n, (long long)s.k),
              out);
}

void run_int8s(const Kernels& kernels, Results& results, DType dtype) {
  constexpr Shape shapes[] = {{1, 1, 1},  {1, 65, 31},   {2, 100, 7},   {40, 63, 129},
                              {7, 33, 3}, {131, 70, 37}, {13, 64, 300}, {9, 64, 2050}};
  uint64_t seed = 500;
  for (const Shape& s : shapes) {
    for (const Gate gate : kGates) run_int8(kernels, results, s, dtype, dtype, gate, seed++);
    run_int8(kernels, results, s, dtype, DType::f32, Gate::none, seed++);
  }
  for (int64_t m = 1; m <= 40; m++) run_int8(kernels, results, {m, 70, 67}, dtype, DType::f32, Gate::none, 499);
}

void run_quantize(const Kernels& kernels, Results& results, DType dtype) {
  Random from(700);
  for (const int64_t k : {1, 15, 16, 33, 300}) {
    constexpr int64_t m = 24;
    const Array x = uneven_rows(dtype, m, k + 2, from);
    Array values(Kind::i8, m * k), scales(Kind::f32, m);
    kernels.quantize_rows({dtype, x.as<void>(), values.as<int8_t>(), scales.as<float>(), k, k + 2}, 0, m);
    results.add(text("quantize_rows %s k=%lld values", name_of(dtype), (long long)k), values);
    results.add(text("quantize_rows %s k=%lld scales", name_of(dtype), (long long)k), scales);
  }
}

void run_int4(const Kernels& kernels, Results& results, DType dtype) {
  Random from(950);
  for (const int64_t group : {8, 32, 128}) {
    constexpr int64_t m = 5, k = 200;
    const Array x = uneven_rows(dtype, m, k + 2, from);
    Array codes(Kind::u8, m * k), scales(Kind::bf16, m * ((k + group - 1) / group));
    kernels.quantize_int4({dtype, x.as<void>(), codes.as<uint8_t>(), scales.as<uint16_t>(), k, k + 2, group}, 0, m);
    results.add(text("quantize_int4 %s group=%lld codes", name_of(dtype), (long long)group), codes);
    results.add(text("quantize_int4 %s group=%lld scales", name_of(dtype), (long long)group), scales);
  }
}

void run_route(const Kernels& kernels, Results& results, int64_t experts, int64_t k, int64_t groups, bool sigmoid) {
  Random from(800 + experts);
  constexpr int64_t tokens = 9;
  const Array plain = random(Kind::f32, tokens * experts, from), bias = random(Kind::f32, experts, from, {-6, -2});
  for (const bool special : {false, true}) {
    const Array logits = special ? with_specials(plain, from, 30) : copy_of(plain);
    Array ids(Kind::i32, tokens * k), weights(Kind::f32, tokens * k);
    const RouteArgs a{logits.as<float>(),
                      groups > 1 || sigmoid ? bias.as<float>() : nullptr,
                      ids.as<int32_t>(),
                      weights.as<float>(),
                      experts,
                      k,
                      groups,
                      (groups + 1) / 2,
                      sigmoid,
                      sigmoid,
                      sigmoid,
                      sigmoid ? 0.25f : 0.0f,
                      1.5f};
    const Array memory = scratch(kernels.route_scratch(a));
    kernels.route(a, 0, tokens, memory.as<char>());
    const std::string rest = text(" experts=%lld k=%lld groups=%lld specials=%d", (long long)experts, (long long)k,
                                  (long long)groups, special);
    results.add("route" + rest + " ids", ids);
    results.add("route" + rest + " weights", weights);
  }
}

void run_combine(const Kernels& kernels, Results& results, DType dtype, int64_t width, int64_t k) {
  Random from(900 + width);
  constexpr int64_t tokens = 5;
  const Array outputs = random(Kind::f32, tokens * k * width, from), weights = random(Kind::f32, tokens * k, from),
              shared = random(dtype, tokens * width, from), gate = random(Kind::f32, tokens, from),
              places = integers(Kind::i32, tokens * k, from, 0, tokens * k - 1);
  for (const int parts : {0, 1, 2}) {
    Array out(kind_of(dtype), tokens * width);
    const CombineArgs a{dtype,
                        outputs.as<float>(),
                        places.as<int32_t>(),
                        weights.as<float>(),
                        parts > 0 ? shared.as<void>() : nullptr,
                        parts > 1 ? gate.as<float>() : nullptr,
                        out.as<void>(),
                        k,
                        width};
    kernels.combine(a, 0, tokens);
    results.add(text("combine %s width=%lld k=%lld parts=%d", name_of(dtype), (long long)width, (long long)k, parts),
                out);
  }
}

}  // namespace

void run_products(const Kernels& kernels, Results& results) {
  for (const DType dtype : kTypes) {
    run_linears(kernels, results, dtype);
    run_int8s(kernels, results, dtype);
    run_quantize(kernels, results, dtype);
    run_int4(kernels, results, dtype);
    for (const int64_t width : {1, 31, 64, 100}) run_combine(kernels, results, dtype, width, 3);
  }
  for (const bool sigmoid : {false, true}) {
    run_route(kernels, results, 7, 2, 1, sigmoid);
    run_route(kernels, results, 64, 8, 8, sigmoid);
    run_route(kernels, results, 130, 6, 1, sigmoid);
  }
}

}  // namespace tokserve::cases
