// Bindings of the ops on logits [R, V]: one task per row.
#include <nanobind/stl/optional.h>

#include <cstring>
#include <vector>

#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

int64_t vocab_of(const Tensor& logits, const char* op) {
  require(logits, Kind::f32, {-1, -1}, op, "logits must be contiguous float32 [R,V]");
  require(logits.size(1) > 0 && logits.size(1) < (int64_t{1} << 31), op,
          "the vocabulary must have 1 to 2^31 - 1 entries");
  return logits.size(1);
}

void logprobs(const Tensor& logits, const Tensor& token_ids, int64_t k, const std::optional<Tensor>& named,
              const std::optional<Tensor>& temperature, const Tensor& token_logprobs, const Tensor& ranks,
              const Tensor& top_ids, const Tensor& top_logprobs) {
  const char* op = "logprobs";
  const int64_t vocab = vocab_of(logits, op), rows = logits.size(0);
  require(token_ids, Kind::i64, {rows}, op, "token_ids must be int64 [R]");
  require(k >= 0 && k <= vocab, op, "k must be between 0 and V");
  if (named) require(*named, Kind::i64, {rows, -1}, op, "named must be int64 [R,m]");
  if (temperature) require(*temperature, Kind::f32, {rows}, op, "temperature must be float32 [R]");
  const int64_t m = named ? named->size(1) : 0;
  require(token_logprobs, Kind::f32, {rows}, op, "token_logprobs must be float32 [R]");
  require(ranks, Kind::i32, {rows}, op, "ranks must be int32 [R]");
  require(top_ids, Kind::i32, {rows, k + m}, op, "top_ids must be int32 [R,k+m]");
  require(top_logprobs, Kind::f32, {rows, k + m}, op, "top_logprobs must be float32 [R,k+m]");
  const int64_t* ids = token_ids.data<int64_t>();
  for (int64_t i = 0; i < rows; i++) require(ids[i] >= 0 && ids[i] < vocab, op, "a token id is outside the vocabulary");
  const int64_t* names = named ? named->data<int64_t>() : nullptr;
  for (int64_t i = 0; i < rows * m; i++)
    require(names[i] >= 0 && names[i] < vocab, op, "a named id is outside the vocabulary");
  const LogprobArgs a{.logits = logits.data<float>(),
                      .token_ids = ids,
                      .temperature = temperature ? temperature->data<float>() : nullptr,
                      .named = names,
                      .token_logprobs = token_logprobs.data<float>(),
                      .ranks = ranks.data<int32_t>(),
                      .top_ids = top_ids.data<int32_t>(),
                      .top_logprobs = top_logprobs.data<float>(),
                      .vocab = vocab,
                      .k = k,
                      .m = m};
  over_rows(rows, 0.4 * vocab + 20.0 * k, [&](int64_t begin, int64_t end) {
    char* scratch = thread_scratch(kernels().sampling_scratch(0, k));
    for (int64_t r = begin; r < end; r++) kernels().logprobs(a, r, scratch);
  });
}

void sample(const Tensor& logits, const Tensor& seeds, const Tensor& positions, const Tensor& greedy,
            const Tensor& ids) {
  const char* op = "sample";
  const int64_t vocab = vocab_of(logits, op), rows = logits.size(0);
  require(seeds, Kind::i64, {rows}, op, "seeds must be int64 [R]");
  require(positions, Kind::i64, {rows}, op, "positions must be int64 [R]");
  require(greedy, Kind::boolean, {rows}, op, "greedy must be bool [R]");
  require(ids, Kind::i64, {rows}, op, "ids must be int64 [R]");
  const SampleArgs a{.logits = logits.data<float>(),
                     .seeds = seeds.data<int64_t>(),
                     .positions = positions.data<int64_t>(),
                     .greedy = greedy.data<uint8_t>(),
                     .ids = ids.data<int64_t>(),
                     .vocab = vocab};
  over_rows(rows, 1.0 * vocab, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) kernels().sample(a, r);
  });
}

void sample_fused(const Tensor& logits, const Tensor& seeds, const Tensor& positions, const Tensor& greedy,
                  const std::optional<Tensor>& temperature, bool scaled, int64_t k, const Tensor& ids,
                  const Tensor& finite, const Tensor& token_logprobs, const Tensor& ranks, const Tensor& top_ids,
                  const Tensor& top_logprobs) {
  const char* op = "sample_fused";
  const int64_t vocab = vocab_of(logits, op), rows = logits.size(0), logprob_rows = k < 0 ? 0 : rows,
                columns = std::max<int64_t>(k, 0);
  require(k <= vocab, op, "k must be at most V");
  require(seeds, Kind::i64, {rows}, op, "seeds must be int64 [R]");
  require(positions, Kind::i64, {rows}, op, "positions must be int64 [R]");
  require(greedy, Kind::boolean, {rows}, op, "greedy must be bool [R]");
  if (temperature) require(*temperature, Kind::f32, {rows}, op, "temperature must be float32 [R]");
  require(ids, Kind::i64, {rows}, op, "ids must be int64 [R]");
  require(finite, Kind::boolean, {rows}, op, "finite must be bool [R]");
  require(token_logprobs, Kind::f32, {logprob_rows}, op, "token_logprobs must be float32 [R]");
  require(ranks, Kind::i32, {logprob_rows}, op, "ranks must be int32 [R]");
  require(top_ids, Kind::i32, {logprob_rows, columns}, op, "top_ids must be int32 [R,k]");
  require(top_logprobs, Kind::f32, {logprob_rows, columns}, op, "top_logprobs must be float32 [R,k]");
  const SampleArgs s{.logits = logits.data<float>(),
                     .seeds = seeds.data<int64_t>(),
                     .positions = positions.data<int64_t>(),
                     .greedy = greedy.data<uint8_t>(),
                     .ids = ids.data<int64_t>(),
                     .vocab = vocab};
  const LogprobArgs l{.logits = s.logits,
                      .token_ids = s.ids,
                      .temperature = nullptr,
                      .named = nullptr,
                      .token_logprobs = k < 0 ? nullptr : token_logprobs.data<float>(),
                      .ranks = ranks.data<int32_t>(),
                      .top_ids = top_ids.data<int32_t>(),
                      .top_logprobs = top_logprobs.data<float>(),
                      .vocab = vocab,
                      .k = columns,
                      .m = 0};
  const SampleFusedArgs a{.sample = s,
                          .finite = finite.data<uint8_t>(),
                          .temperature = temperature ? temperature->data<float>() : nullptr,
                          .scaled = scaled,
                          .logprobs = l};
  over_rows(rows, (k < 0 ? 0.15 : 0.5) * vocab + 20.0 * columns, [&](int64_t begin, int64_t end) {
    char* scratch = thread_scratch(kernels().sampling_scratch(0, columns));
    for (int64_t r = begin; r < end; r++) {
      a.finite[r] = kernels().sample_fused(a, r, a.sample.logits + r * vocab, scratch);
      if (!a.finite[r]) kernels().sample_fused(a, r, std::vector<float>(vocab).data(), scratch);
    }
  });
}

// Packs the rows' ids at the front of `ids`, one after the other; returns how many there are.
int64_t sampling_mask(const Tensor& logits, const Tensor& processed, const Tensor& token_ids, const Tensor& greedy,
                      const Tensor& temperature, int64_t limit, const Tensor& counts, const Tensor& ids,
                      const Tensor& kept_logprobs, const Tensor& logprobs) {
  const char* op = "sampling_mask";
  const int64_t vocab = vocab_of(logits, op), rows = logits.size(0);
  require(processed, Kind::f32, {rows, vocab}, op, "processed must be like logits");
  require(token_ids, Kind::i64, {rows}, op, "token_ids must be int64 [R]");
  require(greedy, Kind::boolean, {rows}, op, "greedy must be bool [R]");
  require(temperature, Kind::f32, {rows}, op, "temperature must be float32 [R]");
  require(limit >= 0, op, "limit must not be negative");
  require(counts, Kind::i32, {rows}, op, "counts must be int32 [R]");
  require(ids, Kind::i32, {rows, limit}, op, "ids must be int32 [R,limit]");
  require(kept_logprobs, Kind::f32, {rows}, op, "kept_logprobs must be float32 [R]");
  require(logprobs, Kind::f32, {rows}, op, "logprobs must be float32 [R]");
  const int64_t* tokens = token_ids.data<int64_t>();
  for (int64_t i = 0; i < rows; i++)
    require(tokens[i] >= 0 && tokens[i] < vocab, op, "a token id is outside the vocabulary");
  const MaskArgs a{.logits = logits.data<float>(),
                   .processed = processed.data<float>(),
                   .token_ids = tokens,
                   .greedy = greedy.data<uint8_t>(),
                   .temperature = temperature.data<float>(),
                   .counts = counts.data<int32_t>(),
                   .ids = ids.data<int32_t>(),
                   .kept_logprobs = kept_logprobs.data<float>(),
                   .logprobs = logprobs.data<float>(),
                   .vocab = vocab,
                   .limit = limit};
  over_rows(rows, 0.6 * vocab, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) kernels().sampling_mask(a, r);
  });
  int64_t total = 0;
  for (int64_t r = 0; r < rows; r++) {
    if (a.counts[r] <= 0) continue;
    std::memmove(a.ids + total, a.ids + r * limit, a.counts[r] * sizeof(int32_t));
    total += a.counts[r];
  }
  return total;
}

void filter_logits(const Tensor& logits, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                   const Tensor& out) {
  const char* op = "filter_logits";
  const int64_t vocab = vocab_of(logits, op), rows = logits.size(0);
  require(top_k, Kind::i32, {rows}, op, "top_k must be int32 [R]");
  require(top_p, Kind::f32, {rows}, op, "top_p must be float32 [R]");
  require(min_p, Kind::f32, {rows}, op, "min_p must be float32 [R]");
  require(out, Kind::f32, {rows, vocab}, op, "out must be like logits");
  const FilterArgs a{.logits = logits.data<float>(),
                     .top_k = top_k.data<int32_t>(),
                     .top_p = top_p.data<float>(),
                     .min_p = min_p.data<float>(),
                     .out = out.data<float>(),
                     .vocab = vocab};
  over_rows(rows, 1.0 * vocab, [&](int64_t begin, int64_t end) {
    char* scratch = thread_scratch(kernels().sampling_scratch(vocab, 0));
    for (int64_t r = begin; r < end; r++) kernels().filter_logits(a, r, scratch);
  });
}

void penalize(const Tensor& logits, const Tensor& history, const Tensor& prompt_lens, const Tensor& lens,
              const Tensor& presence, const Tensor& frequency, const Tensor& repetition, const Tensor& out) {
  const char* op = "penalize";
  const int64_t vocab = vocab_of(logits, op), rows = logits.size(0);
  require(history, Kind::i32, {rows, -1}, op, "history must be int32 [R,L]");
  require(prompt_lens, Kind::i32, {rows}, op, "prompt_lens must be int32 [R]");
  require(lens, Kind::i32, {rows}, op, "lens must be int32 [R]");
  for (const Tensor* t : {&presence, &frequency, &repetition}) {
    require(*t, Kind::f32, {rows}, op, "presence, frequency and repetition must be float32 [R]");
  }
  require(out, Kind::f32, {rows, vocab}, op, "out must be like logits");
  const int64_t length = history.size(1);
  const PenaltyArgs a{.logits = logits.data<float>(),
                      .history = history.data<int32_t>(),
                      .prompt_lens = prompt_lens.data<int32_t>(),
                      .lens = lens.data<int32_t>(),
                      .presence = presence.data<float>(),
                      .frequency = frequency.data<float>(),
                      .repetition = repetition.data<float>(),
                      .out = out.data<float>(),
                      .vocab = vocab,
                      .length = length};
  for (int64_t r = 0; r < rows; r++) {
    require(a.lens[r] >= 0 && a.lens[r] <= length, op, "a row's length is outside its history");
    for (int64_t i = 0; i < a.lens[r]; i++) {
      const int32_t id = a.history[r * length + i];
      require(id >= 0 && id < vocab, op, "history holds an id outside the vocabulary");
    }
  }
  over_rows(rows, 0.2 * vocab + 5.0 * length, [&](int64_t begin, int64_t end) {
    char* scratch = thread_scratch(kernels().sampling_scratch(vocab, 0));
    for (int64_t r = begin; r < end; r++) kernels().penalize(a, r, scratch);
  });
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("logprobs", logprobs, nb::arg("logits"), nb::arg("token_ids"), nb::arg("k"), nb::arg("named").none(),
        nb::arg("temperature").none(), nb::arg("token_logprobs"), nb::arg("ranks"), nb::arg("top_ids"),
        nb::arg("top_logprobs"));
  m.def("sample", sample);
  m.def("sample_fused", sample_fused, nb::arg("logits"), nb::arg("seeds"), nb::arg("positions"), nb::arg("greedy"),
        nb::arg("temperature").none(), nb::arg("scaled"), nb::arg("k"), nb::arg("ids"), nb::arg("finite"),
        nb::arg("token_logprobs"), nb::arg("ranks"), nb::arg("top_ids"), nb::arg("top_logprobs"));
  m.def("sampling_mask", sampling_mask);
  m.def("filter_logits", filter_logits);
  m.def("penalize", penalize);
}

}  // namespace tokserve
