// What edits a row of logits before sampling: top-k, top-p, min-p, and penalties.  One call edits one row.
#include "logits.h"
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// Sets every logit that ranks below `worst` to -inf.
void mask_worse(float* row, int64_t vocab, const Candidate& worst) {
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const int64_t n = min(kLanes, vocab - i);
    const f32x16 x = load_logits(row, i, vocab), limit = broadcast(worst.value);
    const f32x16 kept = select(x < limit, broadcast(kNegInf), x);
    store_partial(row + i, kept, n);
    for (uint32_t equal = mask_bits(x == limit); equal; equal &= equal - 1) {
      const int64_t id = i + __builtin_ctz(equal);
      if (id < vocab && id > worst.id) row[id] = kNegInf;
    }
  }
}

// The last candidate of list[0, n), best first, that top-p keeps, where `mass_before` precedes the list.
Candidate last_kept(const Candidate* list, int64_t n, float x_max, double mass_before, double target) {
  int64_t kept = 0;
  for (; kept < n && (mass_before < target || kept == 0); kept++) mass_before += exp(list[kept].value - x_max);
  return list[kept - 1];
}

constexpr float kBinsPerUnit = 64.0f;

// The bin of a logit by its distance from x_max, in sixty-fourths; the last bin is open.  In a row with NaN, logits may
// exceed x_max.
TOKSERVE_INLINE u32x16 bin_of(f32x16 x, float x_max) {
  const f32x16 down = vmin((broadcast(x_max) - x) * broadcast(kBinsPerUnit), broadcast(kBins - 1.0f));
  return round_to_i32(vmax(down, zeros()));
}

// top-p without sorting the row: the mass of each bin, then a sort of the one bin that contains the limit.
Candidate nucleus(const float* row, int64_t vocab, float x_max, float top_p, double* bins, Candidate* candidates) {
  for (int64_t b = 0; b < kBins; b++) bins[b] = 0.0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const f32x16 x = load_logits(row, i, vocab);
    float mass[kLanes];
    uint32_t bin[kLanes];
    store(mass, exp(x - broadcast(x_max)));
    store(bin, bin_of(x, x_max));
    for (int j = 0; j < kLanes; j++) bins[bin[j]] += mass[j];
  }
  double total = 0.0, mass_before = 0.0;
  for (int64_t b = 0; b < kBins; b++) total += bins[b];
  const double target = static_cast<double>(top_p) * total;
  int64_t chosen = 0;
  while (chosen + 1 < kBins && mass_before + bins[chosen] < target) mass_before += bins[chosen++];
  int64_t n = 0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    uint32_t bin[kLanes];
    store(bin, bin_of(load_logits(row, i, vocab), x_max));
    const int64_t count = min(kLanes, vocab - i);
    for (int64_t j = 0; j < count; j++) {
      if (bin[j] == chosen) candidates[n++] = {row[i + j], static_cast<int32_t>(i + j)};
    }
  }
  if (n == 0) return {x_max, static_cast<int32_t>(vocab)};  // possible only by rounding of the sums: keep the largest
  make_heap(candidates, n);
  sort_heap(candidates, n);
  return last_kept(candidates, n, x_max, mass_before, target);
}

}  // namespace

void filter_logits(const FilterArgs& a, int64_t row, char* scratch) {
  float* out = a.out + row * a.vocab;
  std::memcpy(out, a.logits + row * a.vocab, a.vocab * sizeof(float));
  const int64_t k = a.top_k[row];
  const float top_p = a.top_p[row], min_p = a.min_p[row];
  const bool limits_k = k > 0 && k < a.vocab;
  if (!limits_k && !(top_p < 1.0f) && !(min_p > 0.0f)) return;
  const float x_max = max_logit(out, a.vocab);
  double* bins = reinterpret_cast<double*>(scratch);
  Candidate* candidates = reinterpret_cast<Candidate*>(bins + kBins);
  if (limits_k) {
    select_top_k(out, a.vocab, k, candidates);
    Candidate worst = candidates[0];
    if (top_p < 1.0f) {
      sort_heap(candidates, k);
      double total = 0.0;
      for (int64_t i = 0; i < k; i++) total += exp(candidates[i].value - x_max);
      worst = last_kept(candidates, k, x_max, 0.0, static_cast<double>(top_p) * total);
    }
    mask_worse(out, a.vocab, worst);
  } else if (top_p < 1.0f) {
    mask_worse(out, a.vocab, nucleus(out, a.vocab, x_max, top_p, bins, candidates));
  }
  if (!(min_p > 0.0f)) return;
  for (int64_t i = 0; i < a.vocab; i += kLanes) {
    const f32x16 x = load_logits(out, i, a.vocab);
    store_partial(out + i, select(exp(x - broadcast(x_max)) < broadcast(min_p), broadcast(kNegInf), x), a.vocab - i);
  }
}

void penalize(const PenaltyArgs& a, int64_t row, char* scratch) {
  float* out = a.out + row * a.vocab;
  std::memcpy(out, a.logits + row * a.vocab, a.vocab * sizeof(float));
  const float presence = a.presence[row], frequency = a.frequency[row], repetition = a.repetition[row];
  const int64_t length = a.lens[row];
  if ((presence == 0.0f && frequency == 0.0f && repetition == 1.0f) || length == 0) return;
  int32_t* counts = reinterpret_cast<int32_t*>(scratch);  // [V]: 0: absent, else 1 + occurrences in the output
  std::memset(counts, 0, a.vocab * sizeof(int32_t));
  const int32_t* history = a.history + row * a.length;
  for (int64_t i = 0; i < length; i++) {
    int32_t& count = counts[history[i]];
    count = max(count, 1) + (i >= a.prompt_lens[row] ? 1 : 0);
  }
  for (int64_t i = 0; i < length; i++) {
    const int32_t id = history[i], count = counts[id] - 1;
    if (count < 0) continue;  // penalized before
    counts[id] = 0;
    float x = out[id];
    x = x > 0.0f ? x / repetition : x * repetition;
    x = x - static_cast<float>(count) * frequency;
    out[id] = x - (count > 0 ? presence : 0.0f);
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
