// From a row of logits to a token and its logprobs: seeded sampling with Gumbel noise, greedy choice, top logprobs.
// One call computes one row; among equal logits the lower id wins.
#include "logits.h"
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// A row of logits divided by its temperature.
struct ScaledRow {
  const float* row;
  int64_t vocab;
  float temperature;  // 1: no division
  TOKSERVE_INLINE f32x16 scaled(f32x16 x) const { return temperature == 1.0f ? x : x / broadcast(temperature); }
  TOKSERVE_INLINE f32x16 operator()(int64_t at) const { return scaled(load_logits(row, at, vocab)); }
  TOKSERVE_INLINE float at(int64_t id) const { return temperature == 1.0f ? row[id] : row[id] / temperature; }
};

// Those of a row's values that can be drawn: where `processed` is not -inf.  The others are -inf.
struct KeptRow {
  ScaledRow row;
  const float* processed;
  int64_t vocab;
  TOKSERVE_INLINE mask16 kept(int64_t at) const { return broadcast(kNegInf) < load_logits(processed, at, vocab); }
  TOKSERVE_INLINE f32x16 operator()(int64_t at) const { return select(kept(at), row(at), broadcast(kNegInf)); }
};

// Sum of e^(x - x_max): four partial sums in a slice, slices in order.
template <class Row>
float sum_exp(const Row& x, float x_max) {
  float mass = 0.0f;
  for (int64_t slice = 0; slice < x.vocab; slice += kSlice) {
    f32x16 part[4] = {zeros(), zeros(), zeros(), zeros()};
    const int64_t end = min(slice + kSlice, x.vocab);
    for (int64_t i = slice; i < end; i += 4 * kLanes) {
      for (int j = 0; j < 4 && i + j * kLanes < end; j++) part[j] = part[j] + exp(x(i + j * kLanes) - broadcast(x_max));
    }
    mass += reduce_sum((part[0] + part[1]) + (part[2] + part[3]));
  }
  return mass;
}

int32_t rank_of(const float* row, int64_t vocab, float value) {
  int32_t greater = 0;
  for (int64_t i = 0; i < vocab; i += kLanes)
    greater += __builtin_popcount(mask_bits(broadcast(value) < load_logits(row, i, vocab)));
  return 1 + greater;
}

// Philox 4x32-10 (Salmon et al., SC 2011) for sixteen counters: random[4][16].
TOKSERVE_INLINE void philox(u32x16 block, uint64_t position, uint64_t seed, u32x16* random) {
  u32x16 c0 = block, c1 = broadcast_u32(static_cast<uint32_t>(position)),
         c2 = broadcast_u32(static_cast<uint32_t>(position >> 32)), c3 = broadcast_u32(0);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
    u32x16 high0, low0, high1, low1;
    multiply_high_low(c0, 0xd2511f53u, high0, low0);
    multiply_high_low(c2, 0xcd9e8d57u, high1, low1);
    c0 = high1 ^ c1 ^ broadcast_u32(k0);
    c1 = low1;
    c2 = high0 ^ c3 ^ broadcast_u32(k1);
    c3 = low0;
  }
  random[0] = c0, random[1] = c1, random[2] = c2, random[3] = c3;
}

// -log(-log(1 - u)) for u = (word + 1/2) / 2^32.
TOKSERVE_INLINE f32x16 gumbel(u32x16 word) {
  const f32x16 u = vmin((from_u32(word) + broadcast(0.5f)) * broadcast(0x1p-32f), broadcast(1.0f - 0x1p-24f));
  const f32x16 rest = broadcast(1.0f) - u;
  // log(1 - u) = log(rest) u / (1 - rest) corrects the rounding of `rest`
  const f32x16 exact = zeros() - log(rest) * (u / (broadcast(1.0f) - rest));
  return zeros() - log(select(rest == broadcast(1.0f), u, exact));
}

// An upper bound of gumbel(word) in three instructions: -log(-log(1 - u)) <= -log(u), and the bits of a float, read as
// an integer, bound its logarithm from below linearly.  The caller allows for gumbel's rounding.
TOKSERVE_INLINE f32x16 gumbel_bound(u32x16 word) {
  const f32x16 u = (from_u32(word) + broadcast(0.5f)) * broadcast(0x1p-32f);
  return (broadcast(127.0f) - from_i32(as_u32(u)) * broadcast(0x1p-23f)) * broadcast(0.69314724f);
}

constexpr float kMaxGumbel = 22.875f;  // -log(2^-33), rounded up

// The largest value and its lowest id.
struct Best {
  f32x16 value = broadcast(kNegInf);
  u32x16 id = broadcast_u32(0);
  TOKSERVE_INLINE void update(f32x16 other, u32x16 ids) {  // each lane's ids come in ascending order
    const mask16 better = value < other;
    value = select(better, other, value);
    id = select(better, ids, id);
  }
  int64_t arg_max() const {
    float values[kLanes];
    uint32_t ids[kLanes];
    store(values, value);
    store(ids, id);
    int best = 0;
    for (int i = 1; i < kLanes; i++) {
      if (values[best] < values[i] || (values[best] == values[i] && ids[i] < ids[best])) best = i;
    }
    return values[best] == kNegInf ? 0 : ids[best];
  }
};

// The id of the largest logit / temperature + noise.  Logits that no noise could make the largest cost no random
// number, and those that their own noise does not make the largest cost no logarithm.
int64_t sample_gumbel(const ScaledRow& x, uint64_t seed, uint64_t position) {
  Best best;
  const float factor = 1.0f / x.temperature;
  float best_so_far = kNegInf;
  for (int64_t i = 0; i < x.vocab; i += 4 * kLanes) {
    // A lower bound of the best so far, with room for all rounding of the comparisons below.
    const f32x16 limit = broadcast(best_so_far - (0.01f + 0x1p-19f * (__builtin_fabsf(best_so_far) + kMaxGumbel)));
    f32x16 raw[4];
    for (int j = 0; j < 4; j++)
      raw[j] = i + j * kLanes < x.vocab ? load_logits(x.row, i + j * kLanes, x.vocab) : broadcast(kNegInf);
    const f32x16 largest = vmax(vmax(raw[0], raw[1]), vmax(raw[2], raw[3]));
    if (!mask_bits(limit - broadcast(kMaxGumbel) < largest * broadcast(factor))) continue;
    deinterleave(raw);  // lane b of raw[j] is now id i + 4 b + j, whose random word is lane b of random[j]
    u32x16 random[4];
    philox(iota() + broadcast_u32(static_cast<uint32_t>(i / 4)), position, seed, random);
    for (int j = 0; j < 4; j++) {
      if (!mask_bits(limit < fma(raw[j], broadcast(factor), gumbel_bound(random[j])))) continue;
      best.update(x.scaled(raw[j]) + gumbel(random[j]), shl<2>(iota()) + broadcast_u32(static_cast<uint32_t>(i + j)));
      best_so_far = reduce_max(best.value);
    }
  }
  return best.arg_max();
}

// The id of the largest logit; `has_nan` tells whether any is NaN.
int64_t greedy_token(const ScaledRow& x, bool& has_nan) {
  Best best;
  f32x16 nans = zeros();
  for (int64_t i = 0; i < x.vocab; i += kLanes) {
    const f32x16 value = x(i);
    nans = select(value == value, nans, broadcast(1.0f));
    best.update(value, iota() + broadcast_u32(static_cast<uint32_t>(i)));
  }
  has_nan = reduce_max(nans) != 0.0f;
  return best.arg_max();
}

// Logprobs of x, whose largest value is x_max; ranks and the top k are those of the unscaled logits.
void write_logprobs(const LogprobArgs& a, int64_t row, const ScaledRow& x, float x_max, int64_t token, char* scratch) {
  const float mass = sum_exp(x, x_max), log_mass = mass < __builtin_inff() ? log(mass) : mass;
  a.token_logprobs[row] = (x.at(token) - x_max) - log_mass;
  a.ranks[row] = rank_of(x.row, a.vocab, x.row[token]);
  int32_t* ids = a.top_ids + row * (a.k + a.m);
  float* values = a.top_logprobs + row * (a.k + a.m);
  if (a.k > 0) {
    Candidate* best = reinterpret_cast<Candidate*>(scratch);
    select_top_k(x.row, a.vocab, a.k, best);
    sort_heap(best, a.k);
    for (int64_t i = 0; i < a.k; i++) ids[i] = best[i].id;
  }
  for (int64_t i = 0; i < a.m; i++) ids[a.k + i] = static_cast<int32_t>(a.named[row * a.m + i]);
  for (int64_t i = 0; i < a.k + a.m; i++) values[i] = (x.at(ids[i]) - x_max) - log_mass;
}

float max_scaled(const ScaledRow& x) {
  if (x.temperature == 1.0f) return max_logit(x.row, x.vocab);
  f32x16 largest = broadcast(kNegInf);
  for (int64_t i = 0; i < x.vocab; i += kLanes) largest = vmax(largest, x(i));
  return reduce_max(largest);
}

// What a row x keeps: its ids are written, ascending, at most `limit`.
struct Support {
  int64_t count = 0;     // of values of `processed` that are not -inf
  int64_t possible = 0;  // of values of x that are not
  float max = kNegInf, kept_max = kNegInf, drawn_max = kNegInf;
  float mass = 0.0f;  // sum of e^(x - origin)
  bool same = true;   // the values that are kept are x's
};

Support find_support(const ScaledRow& x, const float* processed, float origin, int32_t* ids, int64_t limit) {
  Support s;
  const f32x16 never = broadcast(kNegInf);
  f32x16 largest = never, kept_largest = never, drawn_largest = never, changed = zeros();
  for (int64_t slice = 0; slice < x.vocab; slice += kSlice) {
    f32x16 part = zeros();
    const int64_t end = min(slice + kSlice, x.vocab);
    for (int64_t i = slice; i < end; i += kLanes) {
      const f32x16 value = x(i), drawn = load_logits(processed, i, x.vocab);
      largest = vmax(largest, value);
      part = part + exp(value - broadcast(origin));
      s.possible += __builtin_popcount(mask_bits(never < value));
      uint32_t kept = mask_bits(never < drawn);
      if (!kept) continue;
      kept_largest = vmax(kept_largest, select(never < drawn, value, never));
      drawn_largest = vmax(drawn_largest, drawn);
      changed = vmax(changed, select(never < drawn, select(value == drawn, zeros(), broadcast(1.0f)), zeros()));
      if (s.count >= limit) {
        s.count += __builtin_popcount(kept);
        continue;
      }
      for (; kept; kept &= kept - 1, s.count++) {
        if (s.count < limit) ids[s.count] = static_cast<int32_t>(i + __builtin_ctz(kept));
      }
    }
    s.mass += reduce_sum(part);
  }
  s.max = reduce_max(largest), s.kept_max = reduce_max(kept_largest), s.drawn_max = reduce_max(drawn_largest);
  s.same = reduce_max(changed) == 0.0f;
  return s;
}

// sum_exp of a row that is -inf but at these ids, which ascend: the same partial sums.
float sum_exp_at(const ScaledRow& x, const int32_t* ids, int64_t count, float x_max) {
  float sums[4 * kLanes] = {}, mass = 0.0f;
  int64_t slice_end = kSlice;
  const auto flush = [&] {
    mass += reduce_sum((load(sums) + load(sums + kLanes)) + (load(sums + 2 * kLanes) + load(sums + 3 * kLanes)));
    std::memset(sums, 0, sizeof sums);
  };
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t n = min(kLanes, count - first);
    float values[kLanes] = {};
    for (int64_t i = 0; i < n; i++) values[i] = x.at(ids[first + i]);
    store(values, exp(load(values) - broadcast(x_max)));
    for (int64_t i = 0; i < n; i++) {
      const int32_t id = ids[first + i];
      if (id >= slice_end) flush(), slice_end = (id / kSlice + 1) * kSlice;
      sums[id % (4 * kLanes)] += values[i];
    }
  }
  flush();
  return mass;
}

constexpr int32_t kWhole = -1, kTooLong = -2;
constexpr float kFar = 60.0f;  // e^60 a few billion times over is a float

// The largest logit of a row; NaN if it has one.
float largest_or_nan(const float* row, int64_t vocab) {
  f32x16 largest[4] = {broadcast(kNegInf), broadcast(kNegInf), broadcast(kNegInf), broadcast(kNegInf)},
         nans[4] = {zeros(), zeros(), zeros(), zeros()};
  for (int64_t i = 0; i < vocab; i += 4 * kLanes) {
    for (int j = 0; j < 4 && i + j * kLanes < vocab; j++) {
      const f32x16 x = load_logits(row, i + j * kLanes, vocab);
      largest[j] = vmax(largest[j], x);
      nans[j] = select(x == x, nans[j], broadcast(1.0f));
    }
  }
  if (reduce_max(vmax(vmax(nans[0], nans[1]), vmax(nans[2], nans[3]))) != 0.0f) return __builtin_nanf("");
  return reduce_max(vmax(vmax(largest[0], largest[1]), vmax(largest[2], largest[3])));
}

float temperature_of(const float* temperatures, int64_t row) {
  const float temperature = temperatures ? temperatures[row] : 1.0f;
  return temperature == 0.0f ? 1.0f : temperature;
}

int64_t sample_row(const SampleArgs& a, int64_t row, const ScaledRow& x) {
  bool has_nan;
  return a.greedy[row] ? greedy_token(x, has_nan)
                       : sample_gumbel(x, static_cast<uint64_t>(a.seeds[row]), static_cast<uint64_t>(a.positions[row]));
}

}  // namespace

int64_t sampling_scratch(int64_t vocab, int64_t k) {
  return kBins * static_cast<int64_t>(sizeof(double)) + max(vocab, k) * static_cast<int64_t>(sizeof(Candidate));
}

void logprobs(const LogprobArgs& a, int64_t row, char* scratch) {
  const ScaledRow x{a.logits + row * a.vocab, a.vocab, temperature_of(a.temperature, row)};
  write_logprobs(a, row, x, max_scaled(x), a.token_ids[row], scratch);
}

void sample(const SampleArgs& a, int64_t row) {
  a.ids[row] = sample_row(a, row, ScaledRow{a.logits + row * a.vocab, a.vocab, 1.0f});
}

void sampling_mask(const MaskArgs& a, int64_t row) {
  const float* processed = a.processed + row * a.vocab;
  const ScaledRow x{a.logits + row * a.vocab, a.vocab, temperature_of(a.temperature, row)},
      drawn{processed, a.vocab, 1.0f};
  const int64_t token = a.token_ids[row], limit = a.limit;
  int32_t* ids = a.ids + row * limit;
  const bool greedy = a.greedy[row];
  float origin = x.at(token), log_kept = 0.0f, logprob = 0.0f;
  Support s = find_support(x, processed, origin, ids, greedy ? 0 : limit);
  if (!(s.max - origin < kFar)) origin = s.max, s.mass = sum_exp(x, origin);
  if (greedy) {
    s.count = 1, s.kept_max = x.at(token);
    if (limit > 0) ids[0] = static_cast<int32_t>(token);
  }
  const bool whole = s.count == s.possible, listed = s.count <= limit;
  if (!greedy) {
    const float mass = listed ? sum_exp_at(drawn, ids, s.count, s.drawn_max) : sum_exp(drawn, s.drawn_max);
    logprob = (processed[token] - s.drawn_max) - log(mass);
    const KeptRow kept{x, processed, a.vocab};
    if (s.same) {
      log_kept = log(mass);
    } else if (!whole) {
      log_kept = log(listed ? sum_exp_at(x, ids, s.count, s.kept_max) : sum_exp(kept, s.kept_max));
    }
  }
  a.counts[row] = whole ? kWhole : listed ? static_cast<int32_t>(s.count) : kTooLong;
  a.logprobs[row] = logprob;
  // rounding must not make it a mass above one
  a.kept_logprobs[row] = whole ? 0.0f : min(0.0f, (s.kept_max - origin) + (log_kept - log(s.mass)));
}

bool sample_fused(const SampleFusedArgs& a, int64_t row, const float* logits, char* scratch) {
  const ScaledRow raw{logits, a.sample.vocab, 1.0f}, scaled{logits, a.sample.vocab, temperature_of(a.temperature, row)};
  const bool greedy_unscaled = a.sample.greedy[row] && scaled.temperature == 1.0f;
  bool has_nan = false;
  int64_t token = greedy_unscaled ? greedy_token(raw, has_nan) : 0;
  const float x_max = greedy_unscaled ? logits[token] : largest_or_nan(logits, a.sample.vocab);
  if (has_nan || !(__builtin_fabsf(x_max) < __builtin_inff())) return false;
  if (!greedy_unscaled) token = sample_row(a.sample, row, scaled);
  a.sample.ids[row] = token;
  if (a.logprobs.token_logprobs == nullptr) return true;
  const bool unscaled = !a.scaled || scaled.temperature == 1.0f;
  write_logprobs(a.logprobs, row, unscaled ? raw : scaled, unscaled ? x_max : max_scaled(scaled), token, scratch);
  return true;
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
