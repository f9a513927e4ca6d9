// From logits to tokens: logprobs, sampling, filters and penalties, with ties, masked and special logits.
#include <algorithm>
#include <cmath>

#include "cases.h"

namespace tokserve::cases {

namespace {

constexpr int64_t kRows = 6;

// Rows of logits: plain, wide apart, with ties, with most masked, with specials, all masked.
Array logits_of(int64_t vocab, Random& from) {
  const Format format = format_of(Kind::f32);
  Array logits = random(Kind::f32, kRows * vocab, from, {-2, 3});
  const Array wide = random(Kind::f32, vocab, from, {2, 6}), rough = random(Kind::bf16, vocab, from, {-1, 2});
  const Array special = with_specials(random(Kind::f32, vocab, from), from, vocab / 3 + 1);
  const uint64_t never = format.infinity | format.sign;
  for (int64_t i = 0; i < vocab; i++) {
    std::memcpy(logits.at(vocab + i), wide.at(i), 4);
    uint16_t half;
    std::memcpy(&half, rough.at(i), 2);
    logits.set(2 * vocab + i, static_cast<uint64_t>(half & 0xfff0) << 16);  // few different values
    if (from.below(20) != 0) logits.set(3 * vocab + i, never);
    std::memcpy(logits.at(4 * vocab + i), special.at(i), 4);
    logits.set(5 * vocab + i, never);
  }
  if (vocab > 64) {  // a lane's largest comes before what is not a number
    logits.set(4 * vocab, 0x42b40000);
    logits.set(4 * vocab + 64, format.infinity + 1);
  }
  return logits;
}

// What logprobs are written to.
struct Written {
  Array values, ranks, ids, logprobs;
  Written(int64_t columns)
      : values(Kind::f32, kRows),
        ranks(Kind::i32, kRows),
        ids(Kind::i32, kRows * columns),
        logprobs(Kind::f32, kRows * columns) {}
  void add(Results& results, const std::string& name) const {
    results.add(name + " values", values);
    results.add(name + " ranks", ranks);
    results.add(name + " ids", ids);
    results.add(name + " top", logprobs);
  }
};

void run_logprobs(const Kernels& kernels, Results& results, int64_t vocab, int64_t k, int64_t m, bool scaled,
                  Random& from) {
  const Array logits = logits_of(vocab, from), tokens = integers(Kind::i64, kRows, from, 0, vocab - 1);
  const Array named = integers(Kind::i64, kRows * m, from, 0, vocab - 1);
  const Array temperature = numbers({0.0f, 0.7f, 1.0f, 1.9f, 0.25f, 3.0f}),
              memory = scratch(kernels.sampling_scratch(0, k));
  const Written w(k + m);
  const LogprobArgs a{logits.as<float>(),
                      tokens.as<int64_t>(),
                      scaled ? temperature.as<float>() : nullptr,
                      m > 0 ? named.as<int64_t>() : nullptr,
                      w.values.as<float>(),
                      w.ranks.as<int32_t>(),
                      w.ids.as<int32_t>(),
                      w.logprobs.as<float>(),
                      vocab,
                      k,
                      m};
  for (int64_t row = 0; row < kRows; row++) kernels.logprobs(a, row, memory.as<char>());
  w.add(results,
        text("logprobs vocab=%lld k=%lld m=%lld scaled=%d", (long long)vocab, (long long)k, (long long)m, scaled));
}

void run_samples(const Kernels& kernels, Results& results, int64_t vocab, int64_t k, bool scaled, Random& from) {
  const Array logits = logits_of(vocab, from), temperature = numbers({0.7f, 1.0f, 1.3f, 0.5f, 0.9f, 0.0f});
  const Array memory = scratch(kernels.sampling_scratch(0, k > 0 ? k : 0));
  for (int64_t step = 0; step < 6; step++) {
    const Array seeds = integers(Kind::i64, kRows, from, INT64_MIN / 4, INT64_MAX / 4),
                greedy = integers(Kind::u8, kRows, from, 0, 1);
    const Array positions = integers(Kind::i64, kRows, from, 0, step % 2 ? int64_t{1} << 40 : 5000);
    const Array ids(Kind::i64, kRows), fused_ids(Kind::i64, kRows), finite(Kind::u8, kRows);
    const SampleArgs s{logits.as<float>(),   seeds.as<int64_t>(), positions.as<int64_t>(),
                       greedy.as<uint8_t>(), ids.as<int64_t>(),   vocab};
    for (int64_t row = 0; row < kRows; row++) kernels.sample(s, row);
    const std::string rest =
        text(" vocab=%lld k=%lld scaled=%d step=%lld", (long long)vocab, (long long)k, scaled, (long long)step);
    results.add("sample" + rest, ids);
    const Written w(k > 0 ? k : 0);
    const LogprobArgs l{s.logits,
                        fused_ids.as<int64_t>(),
                        temperature.as<float>(),
                        nullptr,
                        k < 0 ? nullptr : w.values.as<float>(),
                        w.ranks.as<int32_t>(),
                        w.ids.as<int32_t>(),
                        w.logprobs.as<float>(),
                        vocab,
                        k > 0 ? k : 0,
                        0};
    SampleFusedArgs a{s, finite.as<uint8_t>(), scaled ? temperature.as<float>() : nullptr, scaled, l};
    a.sample.ids = fused_ids.as<int64_t>();
    for (int64_t row = 0; row < kRows; row++) {
      finite.as<uint8_t>()[row] = kernels.sample_fused(a, row, s.logits + row * vocab, memory.as<char>());
    }
    results.add("sample_fused" + rest, fused_ids);
    results.add("sample_fused" + rest + " finite", finite);
    w.add(results, "sample_fused" + rest);
  }
}

void run_filters(const Kernels& kernels, Results& results, int64_t vocab, Random& from) {
  const Array logits = logits_of(vocab, from), memory = scratch(kernels.sampling_scratch(vocab, 0));
  for (const int32_t top_k : {0, 1, 5, 50}) {
    for (const float top_p : {1.0f, 0.9f, 0.3f, 0.0f}) {
      for (const float min_p : {0.0f, 0.05f, 1.0f}) {
        const Array k = integers(Kind::i32, kRows, from, top_k, top_k), p = numbers(std::vector<float>(kRows, top_p));
        const Array m = numbers(std::vector<float>(kRows, min_p)), out(Kind::f32, kRows * vocab);
        const FilterArgs a{logits.as<float>(), k.as<int32_t>(), p.as<float>(), m.as<float>(), out.as<float>(), vocab};
        for (int64_t row = 0; row < kRows; row++) kernels.filter_logits(a, row, memory.as<char>());
        const Array tokens(Kind::i64, kRows), greedy = integers(Kind::u8, kRows, from, 0, 1);
        for (int64_t row = 0; row < kRows; row++) {
          const float* kept = out.as<float>() + row * vocab;
          tokens.as<int64_t>()[row] = std::max_element(kept, kept + vocab) - kept;
        }
        const Array temperature = numbers({0.7f, 1.0f, 1.3f, 0.5f, 0.9f, 0.0f}), counts(Kind::i32, kRows);
        const Array ids(Kind::i32, kRows * 40), kept_logprobs(Kind::f32, kRows), values(Kind::f32, kRows);
        const MaskArgs mask{a.logits,
                            a.out,
                            tokens.as<int64_t>(),
                            greedy.as<uint8_t>(),
                            temperature.as<float>(),
                            counts.as<int32_t>(),
                            ids.as<int32_t>(),
                            kept_logprobs.as<float>(),
                            values.as<float>(),
                            vocab,
                            40};
        for (int64_t row = 0; row < kRows; row++) {
          const float* begin = logits.as<float>() + row * vocab;
          const auto is_number = [](float value) { return value < INFINITY; };
          // no token is drawn from other rows, so no mask is made of them
          if (std::all_of(begin, begin + vocab, is_number)) kernels.sampling_mask(mask, row);
        }
        const std::string rest = text(" vocab=%lld top_k=%d top_p=%g min_p=%g", (long long)vocab, top_k, top_p, min_p);
        results.add("sampling_mask counts" + rest, counts);
        results.add("sampling_mask ids" + rest, ids);
        results.add("sampling_mask kept_logprobs" + rest, kept_logprobs);
        results.add("sampling_mask logprobs" + rest, values);
        results.add(text("filter_logits vocab=%lld top_k=%d top_p=%g min_p=%g", (long long)vocab, top_k, top_p, min_p),
                    out);
      }
    }
  }
}

void run_penalties(const Kernels& kernels, Results& results, int64_t vocab, Random& from) {
  constexpr int64_t length = 60;
  const Array logits = logits_of(vocab, from), history = integers(Kind::i32, kRows * length, from, 0, vocab - 1);
  const Array lens = integers(Kind::i32, kRows, from, 0, length),
              prompt_lens = integers(Kind::i32, kRows, from, 0, length / 2);
  const Array presence = numbers({0.0f, 0.5f, -1.0f, 2.0f, 0.3f, 0.0f}),
              frequency = numbers({0.0f, 0.1f, 0.7f, -2.0f, 1.0f, 0.2f});
  const Array repetition = numbers({1.1f, 1.0f, 0.8f, 2.0f, 1.3f, 1.0f}), out(Kind::f32, kRows * vocab);
  const Array memory = scratch(kernels.sampling_scratch(vocab, 0));
  const PenaltyArgs a{logits.as<float>(),
                      history.as<int32_t>(),
                      prompt_lens.as<int32_t>(),
                      lens.as<int32_t>(),
                      presence.as<float>(),
                      frequency.as<float>(),
                      repetition.as<float>(),
                      out.as<float>(),
                      vocab,
                      length};
  for (int64_t row = 0; row < kRows; row++) kernels.penalize(a, row, memory.as<char>());
  results.add(text("penalize vocab=%lld", (long long)vocab), out);
}

}  // namespace

void run_sampling(const Kernels& kernels, Results& results) {
  Random from(9);
  for (const int64_t vocab : {1, 15, 17, 64, 101, 4096, 5003, 12345}) {
    const int64_t max_k = vocab < 20 ? vocab : 20;
    run_logprobs(kernels, results, vocab, 0, 0, false, from);
    run_logprobs(kernels, results, vocab, max_k, 3, true, from);
    run_logprobs(kernels, results, vocab, max_k, 0, false, from);
    run_samples(kernels, results, vocab, -1, false, from);
    run_samples(kernels, results, vocab, max_k, true, from);
    run_samples(kernels, results, vocab, 0, false, from);
    run_filters(kernels, results, vocab, from);
    run_penalties(kernels, results, vocab, from);
  }
}

}  // namespace tokserve::cases
