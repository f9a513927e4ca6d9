// Norms, gated activations and rotary embedding.
#include "cases.h"

namespace tokserve::cases {

namespace {

void run_norm(const Kernels& kernels, Results& results, const std::string& name, const NormArgs& shape, const Array& x,
              const Array* residual, const Array& weight) {
  const int64_t rows = x.count() / shape.width;
  Array out(x.kind(), x.count()), sum(x.kind(), residual ? x.count() : 0);
  NormArgs a = shape;
  a.x = x.as<void>(), a.weight = weight.as<void>(), a.out = out.as<void>();
  a.residual = residual ? residual->as<void>() : nullptr;
  a.sum = residual ? sum.as<void>() : nullptr;
  kernels.rms_norm(a, 0, rows);
  results.add(name, out);
  if (residual) results.add(name + " sum", sum);
  a.bias = weight.as<void>(), a.multiplier = 0.75f;
  kernels.layer_norm(a, 0, rows);
  results.add("layer_norm of " + name, out);
}

void run_norms(const Kernels& kernels, Results& results, DType dtype) {
  Random from(1);
  for (const int64_t width : {1, 15, 16, 17, 63, 64, 65, 100, 257, 1029}) {
    const Array x = random(dtype, 4 * width, from), residual = random(dtype, 4 * width, from);
    for (const DType weight_dtype : {dtype, DType::f32}) {
      if (dtype == DType::f32 && width > 100) continue;
      const NormArgs shape{dtype,   weight_dtype, nullptr, nullptr, nullptr, nullptr,
                           nullptr, nullptr,      width,   1e-6f,   1.0f};
      const Array weight = random(weight_dtype, width, from);
      const std::string name =
          text("rms_norm %s weight=%s width=%lld", name_of(dtype), name_of(weight_dtype), (long long)width);
      run_norm(kernels, results, name, shape, x, nullptr, weight);
      run_norm(kernels, results, name + " residual", shape, x, &residual, weight);
      run_norm(kernels, results, name + " specials", shape, with_specials(x, from, 40), &residual, weight);
      run_norm(kernels, results, name + " tiny", shape, random(dtype, 4 * width, from, {-14, -10}), nullptr, weight);
    }
  }
}

// All exponents, so that the exponential's ends are reached, and specials.
void run_gated(const Kernels& kernels, Results& results, DType dtype) {
  Random from(2);
  const Range every = dtype == DType::f16 ? Range{-14, 15} : Range{-126, 127};
  for (const int64_t width : {1, 16, 31, 100, 1024}) {
    for (const Range range : {Range{}, Range{-3, 6}, every}) {
      const GatedArgs shape{dtype, nullptr, nullptr, width};
      const Array x = with_specials(random(dtype, 6 * width, from, range), from, 20);
      Array out(x.kind(), 3 * width);
      GatedArgs a = shape;
      a.x = x.as<void>(), a.out = out.as<void>();
      const std::string rest = text(" %s width=%lld exponents=%d", name_of(dtype), (long long)width, range.high);
      kernels.silu_mul(a, 0, 3);
      results.add("silu_mul" + rest, out);
      kernels.gelu_mul(a, 0, 3);
      results.add("gelu_mul" + rest, out);
      for (const Activation activation : {Activation::gelu, Activation::relu, Activation::relu2}) {
        kernels.activate({dtype, activation, true, x.as<void>(), out.as<void>(), width}, 0, 3);
        results.add(text("activate %d", static_cast<int>(activation)) + rest, out);
      }
      kernels.cap({dtype, x.as<void>(), out.as<void>(), width, 0.75f, 5.0f}, 0, 3);
      results.add("cap" + rest, out);
      const GatedInputArgs inputs{dtype, Activation::silu, x.as<void>(), x.at(width), out.as<void>(), width, 2 * width};
      kernels.gate_inputs(inputs, 0, 2);
      results.add("gate_inputs" + rest, out);
      kernels.add_residual({dtype, x.as<void>(), x.at(3 * width), out.as<void>(), width, 0.75f}, 0, 3);
      results.add("add_residual" + rest, out);
    }
  }
}

void run_scales(const Kernels& kernels, Results& results, DType dtype) {
  Random from(7);
  for (const int64_t width : {1, 31, 64, 200}) {
    const Array x = with_specials(random(dtype, 4 * width, from), from, 40), factors = random(Kind::f32, 4, from);
    const Array at = integers(Kind::i64, 4, from, 0, 100000);
    Array out(x.kind(), 8 * width);
    const std::string rest = text(" %s width=%lld", name_of(dtype), (long long)width);
    kernels.scale_by_position({dtype, x.as<void>(), out.as<void>(), at.as<int64_t>(), width, 1000, 1, 0.1f}, 0, 4);
    results.add("scale_by_position" + rest, out);
    kernels.scale_rows({dtype, x.as<void>(), factors.as<float>(), out.as<void>(), width, false}, 0, 4);
    results.add("scale_rows" + rest, out);
    kernels.norm_values({dtype, x.as<void>(), out.as<void>(), width, width, width, 1e-6f, true}, 0, 4);
    results.add("norm_values" + rest, out);
  }
}

struct RopeShape {
  int64_t heads, kv_heads, dim, rot;
};

void run_rope(const Kernels& kernels, Results& results, DType dtype) {
  Random from(3);
  constexpr int64_t tokens = 5, positions = 40;
  for (const RopeShape& s : {RopeShape{1, 1, 2, 2}, {4, 2, 64, 64}, {3, 1, 40, 40}, {2, 2, 128, 32}, {2, 1, 33, 30}}) {
    const int64_t stride = (s.heads + s.kv_heads) * s.dim + 3;
    const Array qk = with_specials(random(dtype, tokens * stride, from), from, 50);
    const Array table = random(Kind::f32, positions * s.rot, from, {-5, -1});
    const Array at = integers(Kind::i64, tokens, from, 0, positions - 1);
    Array q(kind_of(dtype), tokens * s.heads * s.dim), k(kind_of(dtype), tokens * s.kv_heads * s.dim);
    RopeArgs a{dtype,
               qk.as<void>(),
               qk.at(s.heads * s.dim),
               q.as<void>(),
               k.as<void>(),
               stride,
               stride,
               s.heads,
               s.kv_heads,
               s.dim,
               s.rot,
               table.as<float>(),
               at.as<int64_t>(),
               false};
    kernels.rope(a, 0, tokens);
    const std::string rest = text(" %s dim=%lld rot=%lld", name_of(dtype), (long long)s.dim, (long long)s.rot);
    results.add("rope" + rest + " q", q);
    results.add("rope" + rest + " k", k);
    a.interleaved = true;
    kernels.rope(a, 0, tokens);
    results.add("rope interleaved" + rest + " q", q);
  }
}

void run_difference(const Kernels& kernels, Results& results, DType dtype, DType fresh_dtype) {
  Random from(4);
  for (const int64_t n : {1, 63, 64, 65, 500}) {
    const Array fresh = with_specials(random(fresh_dtype, n, from, {-14, 10}), from, 30);
    Array old = random(dtype, n, from), places(Kind::i32, n), values(kind_of(dtype), n);
    const DifferenceArgs a{dtype, fresh_dtype,           old.as<void>(),   fresh.as<void>(),
                           n,     places.as<uint32_t>(), values.as<void>()};
    const auto keep_first = [&](int64_t count) {  // the rest was not written, or overwritten
      Array found(Kind::i32, count), bits(kind_of(dtype), count);
      std::memcpy(found.as<char>(), places.as<char>(), found.bytes());
      std::memcpy(bits.as<char>(), values.as<char>(), bits.bytes());
      const std::string rest = text(" %s from %s n=%lld", name_of(dtype), name_of(fresh_dtype), (long long)n);
      results.add("difference" + rest + " places", found);
      results.add("difference" + rest + " values", bits);
    };
    keep_first(kernels.difference(a));
    for (int64_t i = 0; i < n; i++) {  // all but each ninth element becomes what it was
      if (i % 9) std::memcpy(old.at(i), values.at(i), size_of(dtype));
    }
    keep_first(kernels.difference(a));
  }
}

}  // namespace

void run_rows(const Kernels& kernels, Results& results) {
  for (const DType dtype : kTypes) {
    run_norms(kernels, results, dtype);
    run_gated(kernels, results, dtype);
    run_scales(kernels, results, dtype);
    run_rope(kernels, results, dtype);
    for (const DType fresh : kTypes) run_difference(kernels, results, dtype, fresh);
  }
}

}  // namespace tokserve::cases
