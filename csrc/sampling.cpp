// From a row of logits to a token: penalties, filters, the seeded draw, logprobs.  One call does one row, in the order
// of its vocabulary ids; equals go to the lower id.
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr float kNever = -__builtin_inff();

TOKSERVE_INLINE F load_logits(const float* row, int64_t at, int64_t vocab) {
  if (at + kLanes <= vocab) return load(row + at);
  return select(first(vocab - at), load_part(row + at, vocab - at), fset(kNever));
}

float largest_of(const float* row, int64_t vocab) {
  F best[4] = {fset(kNever), fset(kNever), fset(kNever), fset(kNever)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= vocab; i += 4 * kLanes) {
    for (int j = 0; j < 4; j++) best[j] = vmax(best[j], load(row + i + j * kLanes));
  }
  for (; i < vocab; i += kLanes) best[0] = vmax(best[0], load_logits(row, i, vocab));
  return largest(vmax(vmax(best[0], best[1]), vmax(best[2], best[3])));
}

struct Entry {
  float value;
  int32_t id;
};

TOKSERVE_INLINE bool worse(const Entry& a, const Entry& b) {
  return a.value < b.value || (a.value == b.value && a.id > b.id);
}

// heap[0, n) has its worst entry first; `entry` takes place `at` or one below it.
void sift(Entry* heap, int64_t n, int64_t at, Entry entry) {
  for (int64_t child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && worse(heap[child + 1], heap[child])) child++;
    if (!worse(heap[child], entry)) break;
    heap[at] = heap[child];
  }
  heap[at] = entry;
}

void make_heap(Entry* heap, int64_t n) {
  for (int64_t i = n / 2 - 1; i >= 0; i--) sift(heap, n, i, heap[i]);
}

// A heap becomes a list, best first.
void sort_heap(Entry* heap, int64_t n) {
  for (int64_t last = n - 1; last > 0; last--) {
    const Entry worst = heap[0];
    sift(heap, last, 0, heap[last]);
    heap[last] = worst;
  }
}

// The k best of the row as a heap; 1 <= k <= vocab.
void select_best(const float* row, int64_t vocab, int64_t k, Entry* heap) {
  for (int64_t i = 0; i < k; i++) heap[i] = {row[i], static_cast<int32_t>(i)};
  make_heap(heap, k);
  for (int64_t i = k; i < vocab; i += kLanes) {
    const F value = load_logits(row, i, vocab);
    for (uint32_t better = bits(fset(heap[0].value) < value); better; better &= better - 1) {
      const int64_t id = i + __builtin_ctz(better);
      if (heap[0].value < row[id]) sift(heap, k, 0, {row[id], static_cast<int32_t>(id)});
    }
  }
}

// A row over its temperature.
struct Scaled {
  const float* row;
  int64_t vocab;
  float temperature;  // 1: as it is
  TOKSERVE_INLINE F scaled(F x) const { return temperature == 1.0f ? x : x / fset(temperature); }
  TOKSERVE_INLINE F operator()(int64_t at) const { return scaled(load_logits(row, at, vocab)); }
  TOKSERVE_INLINE float at(int64_t id) const { return temperature == 1.0f ? row[id] : row[id] / temperature; }
};

// Sum of e^(x - top): four partial sums in a slice, slices in order.
float mass_of(const Scaled& x, float top) {
  float mass = 0.0f;
  for (int64_t slice = 0; slice < x.vocab; slice += kSlice) {
    F part[4] = {fzero(), fzero(), fzero(), fzero()};
    const int64_t end = least(slice + kSlice, x.vocab);
    for (int64_t i = slice; i < end; i += 4 * kLanes) {
      for (int j = 0; j < 4 && i + j * kLanes < end; j++) part[j] = part[j] + exp(x(i + j * kLanes) - fset(top));
    }
    mass += sum((part[0] + part[1]) + (part[2] + part[3]));
  }
  return mass;
}

int32_t rank_of(const float* row, int64_t vocab, float value) {
  int32_t greater = 0;
  for (int64_t i = 0; i < vocab; i += kLanes)
    greater += __builtin_popcount(bits(fset(value) < load_logits(row, i, vocab)));
  return 1 + greater;
}

// Philox 4x32-10 (Salmon et al., SC 2011) for sixteen counters: random[4][16].
TOKSERVE_INLINE void philox(I block, uint64_t position, uint64_t seed, I* random) {
  I c0 = block, c1 = iset(static_cast<uint32_t>(position)), c2 = iset(static_cast<uint32_t>(position >> 32)),
    c3 = iset(0);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
    I high0, low0, high1, low1;
    multiply(c0, 0xd2511f53u, high0, low0);
    multiply(c2, 0xcd9e8d57u, high1, low1);
    c0 = high1 ^ c1 ^ iset(k0);
    c1 = low1;
    c2 = high0 ^ c3 ^ iset(k1);
    c3 = low0;
  }
  random[0] = c0, random[1] = c1, random[2] = c2, random[3] = c3;
}

// -log(-log(1 - u)) for u = (word + 1/2) / 2^32.
TOKSERVE_INLINE F gumbel(I word) {
  const F u = vmin((from_unsigned(word) + fset(0.5f)) * fset(0x1p-32f), fset(1.0f - 0x1p-24f));
  const F rest = fset(1.0f) - u;
  // log(1 - u) = log(rest) u / (1 - rest) makes good what rounding `rest` lost
  const F exact = fzero() - log(rest) * (u / (fset(1.0f) - rest));
  return fzero() - log(select(rest == fset(1.0f), u, exact));
}

// Not below gumbel(word), for three instructions: -log(-log(1 - u)) <= -log(u), and the bits of a float, read as an
// integer, are a line below its logarithm.  Room for what gumbel rounds is left to the caller.
TOKSERVE_INLINE F most_gumbel(I word) {
  const F u = (from_unsigned(word) + fset(0.5f)) * fset(0x1p-32f);
  return (fset(127.0f) - from_int(as_int(u)) * fset(0x1p-23f)) * fset(0.69314724f);
}

constexpr float kMostGumbel = 22.875f;  // -log(2^-33), rounded up

// The largest value and its lowest id.
struct Best {
  F value = fset(kNever);
  I id = iset(0);
  TOKSERVE_INLINE void see(F other, I ids) {  // each lane's ids come in ascending order
    const M better = value < other;
    value = select(better, other, value);
    id = select(better, ids, id);
  }
  int64_t winner() const {
    float values[kLanes];
    uint32_t ids[kLanes];
    store(values, value);
    istore(ids, id);
    int best = 0;
    for (int i = 1; i < kLanes; i++) {
      if (values[best] < values[i] || (values[best] == values[i] && ids[i] < ids[best])) best = i;
    }
    return values[best] == kNever ? 0 : ids[best];
  }
};

// The id of the largest logit / temperature + noise.  What no noise could lift to the top costs no randomness, and what
// its own randomness does not lift there costs no logarithm.
int64_t draw_noisy(const Scaled& x, uint64_t seed, uint64_t position) {
  Best best;
  const float factor = 1.0f / x.temperature;
  float reached = kNever;
  for (int64_t i = 0; i < x.vocab; i += 4 * kLanes) {
    // A bound on the best so far, with room for all rounding of the comparisons below.
    const F limit = fset(reached - (0.01f + 0x1p-19f * (__builtin_fabsf(reached) + kMostGumbel)));
    F raw[4];
    for (int j = 0; j < 4; j++)
      raw[j] = i + j * kLanes < x.vocab ? load_logits(x.row, i + j * kLanes, x.vocab) : fset(kNever);
    const F highest = vmax(vmax(raw[0], raw[1]), vmax(raw[2], raw[3]));
    if (!bits(limit - fset(kMostGumbel) < highest * fset(factor))) continue;
    deinterleave(raw);  // lane b of raw[j] is now id i + 4 b + j, whose random word is lane b of random[j]
    I random[4];
    philox(iota() + iset(static_cast<uint32_t>(i / 4)), position, seed, random);
    for (int j = 0; j < 4; j++) {
      if (!bits(limit < fma(raw[j], fset(factor), most_gumbel(random[j])))) continue;
      best.see(x.scaled(raw[j]) + gumbel(random[j]), shl<2>(iota()) + iset(static_cast<uint32_t>(i + j)));
      reached = largest(best.value);
    }
  }
  return best.winner();
}

// `nan` becomes true if a logit is not a number.
int64_t arg_max(const Scaled& x, bool& nan) {
  Best best;
  F found = fzero();
  for (int64_t i = 0; i < x.vocab; i += kLanes) {
    const F value = x(i);
    found = select(value == value, found, fset(1.0f));
    best.see(value, iota() + iset(static_cast<uint32_t>(i)));
  }
  nan = largest(found) != 0.0f;
  return best.winner();
}

// Keeps what is better than `worst` or `worst` itself.
void forbid_worse(float* row, int64_t vocab, const Entry& worst) {
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const int64_t n = least(kLanes, vocab - i);
    const F x = load_logits(row, i, vocab), limit = fset(worst.value);
    const F kept = select(x < limit, fset(kNever), x);
    store_part(row + i, kept, n);
    for (uint32_t equal = bits(x == limit); equal; equal &= equal - 1) {
      const int64_t id = i + __builtin_ctz(equal);
      if (id < vocab && id > worst.id) row[id] = kNever;
    }
  }
}

// The last of list[0, n), best first, that top-p keeps when `before` of the mass lies ahead of the list.
Entry last_kept(const Entry* list, int64_t n, float top, double before, double wanted) {
  int64_t kept = 0;
  for (; kept < n && (before < wanted || kept == 0); kept++) before += exp(list[kept].value - top);
  return list[kept - 1];
}

constexpr int64_t kBins = 2048;
constexpr float kBinsPerUnit = 64.0f;

// Which sixty-fourth below the top a logit lies in; the last bin takes all that is far below.  Beside a logit that is
// not a number, others may lie above the top.
TOKSERVE_INLINE I bin_of(F x, float top) {
  const F down = vmin((fset(top) - x) * fset(kBinsPerUnit), fset(kBins - 1.0f));
  return to_int(vmax(down, fzero()));
}

// top-p without a sort of the row: masses by bin, then a sort of the one bin in which the limit falls.
Entry nucleus(const float* row, int64_t vocab, float top, float top_p, double* bins, Entry* found) {
  for (int64_t b = 0; b < kBins; b++) bins[b] = 0.0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const F x = load_logits(row, i, vocab);
    float mass[kLanes];
    uint32_t bin[kLanes];
    store(mass, exp(x - fset(top)));
    istore(bin, bin_of(x, top));
    for (int j = 0; j < kLanes; j++) bins[bin[j]] += mass[j];
  }
  double total = 0.0, before = 0.0;
  for (int64_t b = 0; b < kBins; b++) total += bins[b];
  const double wanted = static_cast<double>(top_p) * total;
  int64_t chosen = 0;
  while (chosen + 1 < kBins && before + bins[chosen] < wanted) before += bins[chosen++];
  int64_t n = 0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    uint32_t bin[kLanes];
    istore(bin, bin_of(load_logits(row, i, vocab), top));
    const int64_t here = least(kLanes, vocab - i);
    for (int64_t j = 0; j < here; j++) {
      if (bin[j] == chosen) found[n++] = {row[i + j], static_cast<int32_t>(i + j)};
    }
  }
  if (n == 0) return {top, static_cast<int32_t>(vocab)};  // only by rounding of the sums: keep the largest
  make_heap(found, n);
  sort_heap(found, n);
  return last_kept(found, n, top, before, wanted);
}

}  // namespace

int64_t sampling_scratch(int64_t vocab, int64_t k) {
  return kBins * static_cast<int64_t>(sizeof(double)) + most(vocab, k) * static_cast<int64_t>(sizeof(Entry));
}

namespace {

// Logprobs of x, whose largest value is `top`; ranks and the k best are those of the logits.
void write_logprobs(const LogprobArgs& a, int64_t row, const Scaled& x, float top, int64_t token, char* scratch) {
  const float mass = mass_of(x, top), log_mass = mass < __builtin_inff() ? log(mass) : mass;
  a.token_logprobs[row] = (x.at(token) - top) - log_mass;
  a.ranks[row] = rank_of(x.row, a.vocab, x.row[token]);
  int32_t* ids = a.top_ids + row * (a.k + a.m);
  float* values = a.top_logprobs + row * (a.k + a.m);
  if (a.k > 0) {
    Entry* best = reinterpret_cast<Entry*>(scratch);
    select_best(x.row, a.vocab, a.k, best);
    sort_heap(best, a.k);
    for (int64_t i = 0; i < a.k; i++) ids[i] = best[i].id;
  }
  for (int64_t i = 0; i < a.m; i++) ids[a.k + i] = static_cast<int32_t>(a.named[row * a.m + i]);
  for (int64_t i = 0; i < a.k + a.m; i++) values[i] = (x.at(ids[i]) - top) - log_mass;
}

float largest_of(const Scaled& x) {
  if (x.temperature == 1.0f) return largest_of(x.row, x.vocab);
  F highest = fset(kNever);
  for (int64_t i = 0; i < x.vocab; i += kLanes) highest = vmax(highest, x(i));
  return largest(highest);
}

// The largest of a row; not a number if there is one that is not.
float largest_or_nan(const float* row, int64_t vocab) {
  F highest[4] = {fset(kNever), fset(kNever), fset(kNever), fset(kNever)},
    found[4] = {fzero(), fzero(), fzero(), fzero()};
  for (int64_t i = 0; i < vocab; i += 4 * kLanes) {
    for (int j = 0; j < 4 && i + j * kLanes < vocab; j++) {
      const F x = load_logits(row, i + j * kLanes, vocab);
      highest[j] = vmax(highest[j], x);
      found[j] = select(x == x, found[j], fset(1.0f));
    }
  }
  if (largest(vmax(vmax(found[0], found[1]), vmax(found[2], found[3]))) != 0.0f) return __builtin_nanf("");
  return largest(vmax(vmax(highest[0], highest[1]), vmax(highest[2], highest[3])));
}

float temperature_of(const float* temperatures, int64_t row) {
  const float given = temperatures ? temperatures[row] : 1.0f;
  return given == 0.0f ? 1.0f : given;
}

int64_t sampled(const SampleArgs& a, int64_t row, const Scaled& x) {
  bool nan;
  return a.greedy[row] ? arg_max(x, nan)
                       : draw_noisy(x, static_cast<uint64_t>(a.seeds[row]), static_cast<uint64_t>(a.positions[row]));
}

}  // namespace

void logprobs(const LogprobArgs& a, int64_t row, char* scratch) {
  const Scaled x{a.logits + row * a.vocab, a.vocab, temperature_of(a.temperature, row)};
  write_logprobs(a, row, x, largest_of(x), a.token_ids[row], scratch);
}

void sample(const SampleArgs& a, int64_t row) {
  a.ids[row] = sampled(a, row, Scaled{a.logits + row * a.vocab, a.vocab, 1.0f});
}

bool draw(const DrawArgs& a, int64_t row, const float* logits, char* scratch) {
  const Scaled raw{logits, a.sample.vocab, 1.0f}, scaled{logits, a.sample.vocab, temperature_of(a.temperature, row)};
  const bool best_is_it = a.sample.greedy[row] && scaled.temperature == 1.0f;
  bool nan = false;
  int64_t token = best_is_it ? arg_max(raw, nan) : 0;
  const float top = best_is_it ? logits[token] : largest_or_nan(logits, a.sample.vocab);
  if (nan || !(__builtin_fabsf(top) < __builtin_inff())) return false;
  if (!best_is_it) token = sampled(a.sample, row, scaled);
  a.sample.ids[row] = token;
  if (a.logprobs.token_logprobs == nullptr) return true;
  const bool as_they_are = !a.scaled || scaled.temperature == 1.0f;
  write_logprobs(a.logprobs, row, as_they_are ? raw : scaled, as_they_are ? top : largest_of(scaled), token, scratch);
  return true;
}

void filter_logits(const FilterArgs& a, int64_t row, char* scratch) {
  float* out = a.out + row * a.vocab;
  std::memcpy(out, a.logits + row * a.vocab, a.vocab * sizeof(float));
  const int64_t k = a.top_k[row];
  const float top_p = a.top_p[row], min_p = a.min_p[row];
  const bool few = k > 0 && k < a.vocab;
  if (!few && !(top_p < 1.0f) && !(min_p > 0.0f)) return;
  const float top = largest_of(out, a.vocab);
  double* bins = reinterpret_cast<double*>(scratch);
  Entry* entries = reinterpret_cast<Entry*>(bins + kBins);
  if (few) {
    select_best(out, a.vocab, k, entries);
    Entry worst = entries[0];
    if (top_p < 1.0f) {
      sort_heap(entries, k);
      double total = 0.0;
      for (int64_t i = 0; i < k; i++) total += exp(entries[i].value - top);
      worst = last_kept(entries, k, top, 0.0, static_cast<double>(top_p) * total);
    }
    forbid_worse(out, a.vocab, worst);
  } else if (top_p < 1.0f) {
    forbid_worse(out, a.vocab, nucleus(out, a.vocab, top, top_p, bins, entries));
  }
  if (!(min_p > 0.0f)) return;
  for (int64_t i = 0; i < a.vocab; i += kLanes) {
    const F x = load_logits(out, i, a.vocab);
    store_part(out + i, select(exp(x - fset(top)) < fset(min_p), fset(kNever), x), a.vocab - i);
  }
}

void penalize(const PenaltyArgs& a, int64_t row, char* scratch) {
  float* out = a.out + row * a.vocab;
  std::memcpy(out, a.logits + row * a.vocab, a.vocab * sizeof(float));
  const float presence = a.presence[row], frequency = a.frequency[row], repetition = a.repetition[row];
  const int64_t length = a.lens[row];
  if ((presence == 0.0f && frequency == 0.0f && repetition == 1.0f) || length == 0) return;
  int32_t* seen = reinterpret_cast<int32_t*>(scratch);  // [V]: 0, or 1 + how often it was generated
  std::memset(seen, 0, a.vocab * sizeof(int32_t));
  const int32_t* history = a.history + row * a.length;
  for (int64_t i = 0; i < length; i++) {
    int32_t& count = seen[history[i]];
    count = most(count, 1) + (i >= a.prompt_lens[row] ? 1 : 0);
  }
  for (int64_t i = 0; i < length; i++) {
    const int32_t id = history[i], count = seen[id] - 1;
    if (count < 0) continue;  // done already
    seen[id] = 0;
    float x = out[id];
    x = x > 0.0f ? x / repetition : x * repetition;
    x = x - static_cast<float>(count) * frequency;
    out[id] = x - (count > 0 ? presence : 0.0f);
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
