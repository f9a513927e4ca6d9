// Gradients of attention, norms and activations.
#include "cases.h"

namespace tokserve::cases {

namespace {

void run_activation(const Kernels& kernels, Results& results, DType dtype) {
  Random from(11);
  for (const int64_t width : {1, 16, 31, 100}) {
    for (const Range range : {Range{}, Range{-3, 6}}) {
      const Array x = with_specials(random(dtype, 6 * width, from, range), from, 40);
      const Array grad = random(dtype, 6 * width, from);
      for (int activation = 0; activation < 5; activation++) {
        for (const bool gated : {false, true}) {
          const Array out(x.kind(), x.count());
          const ActivationGradientsArgs a{dtype,
                                          static_cast<Activation>(activation),
                                          gated,
                                          grad.as<void>(),
                                          x.as<void>(),
                                          out.as<void>(),
                                          gated ? width : 2 * width};
          kernels.activation_gradients(a, 0, 3);
          results.add(text("activation_gradients %s %d gated=%d width=%lld exponents=%d", name_of(dtype), activation,
                           gated, (long long)width, range.high),
                      out);
        }
      }
    }
  }
}

void run_norm(const Kernels& kernels, Results& results, DType dtype) {
  Random from(12);
  for (const int64_t width : {1, 16, 33, 257}) {
    const Array x = random(dtype, 5 * width, from), carried = random(dtype, 5 * width, from);
    const Array weight = random(Kind::f32, width, from), out(x.kind(), x.count()), sum(Kind::f32, width);
    for (const DType grad_dtype : {dtype, DType::f32}) {
      const Array grad = random(grad_dtype, 5 * width, from);
      NormGradientsArgs a{dtype,   grad_dtype,     grad.as<void>(), x.as<void>(), weight.as<float>(),
                          nullptr, out.as<void>(), width,           1e-6f};
      const std::string name =
          text("norm_gradients %s of %s width=%lld", name_of(dtype), name_of(grad_dtype), (long long)width);
      kernels.norm_gradients(a, 0, 5, sum.as<float>());
      results.add(name, out);
      results.add(name + " weight", sum);
      a.carried = carried.as<void>();
      kernels.norm_gradients(a, 0, 5, sum.as<float>());
      results.add(name + " carried", out);
    }
  }
}

struct Shape {
  int64_t heads, kv_heads, dim, window, position, queries;
  float softcap;
};

void run_attention_gradients(const Kernels& kernels, Results& results, const Shape& s, DType dtype) {
  Random from(static_cast<uint64_t>(s.dim + s.queries));
  const int64_t tokens = s.position + s.queries;
  const Array grad = random(dtype, tokens * s.heads * s.dim, from), q = random(dtype, tokens * s.heads * s.dim, from);
  const Array k = random(dtype, tokens * s.kv_heads * s.dim, from),
              v = random(dtype, tokens * s.kv_heads * s.dim, from);
  const Array grad_q(Kind::f32, tokens * s.heads * s.dim), grad_k(Kind::f32, tokens * s.kv_heads * s.dim);
  const Array grad_v(Kind::f32, tokens * s.kv_heads * s.dim), path(Kind::i64, tokens);
  for (const Array* array : {&grad_q, &grad_k, &grad_v}) std::memset(array->as<char>(), 0, array->bytes());
  for (int64_t i = 0; i < tokens; i++) path.as<int64_t>()[i] = i;
  const int64_t q_row = s.heads * s.dim, kv_row = s.kv_heads * s.dim;
  const AttentionGradientsArgs a{dtype,
                                 grad.as<void>(),
                                 q.as<void>(),
                                 k.as<void>(),
                                 v.as<void>(),
                                 grad_q.as<float>(),
                                 grad_k.as<float>(),
                                 grad_v.as<float>(),
                                 q_row,
                                 q_row,
                                 kv_row,
                                 kv_row,
                                 s.heads,
                                 s.kv_heads,
                                 s.dim,
                                 0.25f,
                                 s.window,
                                 s.softcap};
  const std::string name =
      text(" %s heads=%lld/%lld dim=%lld window=%lld position=%lld queries=%lld", name_of(dtype), (long long)s.heads,
           (long long)s.kv_heads, (long long)s.dim, (long long)s.window, (long long)s.position, (long long)s.queries);
  const int64_t first = s.window > 0 && s.position >= s.window ? s.position - s.window + 1 : 0;
  for (int64_t head = 0; head < s.kv_heads; head++) {
    const AttentionGradientsTask task{path.as<int64_t>(), s.position, s.position, s.queries, first, head};
    const Array partial(Kind::f32, kernels.attention_gradients_partial(a, task));
    const Array memory = scratch(kernels.attention_gradients_scratch(a, task));
    kernels.attention_gradients(a, task, partial.as<float>(), memory.as<char>());
    kernels.merge_attention_gradients(a, task, partial.as<float>(), 0, tokens / 2);
    kernels.merge_attention_gradients(a, task, partial.as<float>(), tokens / 2, tokens);
  }
  results.add("attention_gradients" + name, grad_q);
  results.add("merge_attention_gradients" + name + " k", grad_k);
  results.add("merge_attention_gradients" + name + " v", grad_v);
}

}  // namespace

void run_gradients(const Kernels& kernels, Results& results) {
  for (const DType dtype : kTypes) {
    run_activation(kernels, results, dtype);
    run_norm(kernels, results, dtype);
    for (const Shape& s : {Shape{1, 1, 32, 0, 0, 1, 0.0f},
                           {4, 2, 64, 0, 0, 70, 0.0f},
                           {6, 2, 80, 19, 33, 50, 0.0f},
                           {3, 1, 33, 0, 9, 40, 2.0f},
                           {2, 2, 128, 7, 100, 3, 0.0f}}) {
      run_attention_gradients(kernels, results, s, dtype);
    }
  }
}

}  // namespace tokserve::cases
