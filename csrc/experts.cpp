// The parts of a mixture of experts that are not products: the choice of a token's experts, and the weighted sum of
// what they return.  One row in, one row out.
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr float kMinSum = 1e-20f;  // lower bound of the sum that weights are divided by

// Scores of a row of n logits: its softmax, or the sigmoid of each.  The sum is one chain in ascending order.
void score_row(const float* logits, float* scores, int64_t n, bool sigmoid) {
  if (sigmoid) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const f32x16 power = exp(zeros() - load_partial(logits + i, n - i));
      store_partial(scores + i, broadcast(1.0f) / (broadcast(1.0f) + power), n - i);
    }
    return;
  }
  float top = logits[0], sum = 0.0f;
  for (int64_t i = 1; i < n; i++) top = logits[i] > top ? logits[i] : top;
  for (int64_t i = 0; i < n; i += kLanes)
    store_partial(scores + i, exp(load_partial(logits + i, n - i) - broadcast(top)), n - i);
  for (int64_t i = 0; i < n; i++) sum += scores[i];
  for (int64_t i = 0; i < n; i++) scores[i] = scores[i] / sum;
}

// The index of the largest of n values that is not marked as taken, the lowest of equals; -1 if all are.
int64_t largest(const float* values, const uint8_t* taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; i++) {
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  }
  return best;
}

// A group's largest value, or the sum of its two largest.
float group_score(const float* values, int64_t n, bool two) {
  float first = kNegInf, second = kNegInf;
  for (int64_t i = 0; i < n; i++) {
    if (values[i] > first) {
      second = first;
      first = values[i];
    } else if (values[i] > second) {
      second = values[i];
    }
  }
  return two ? first + second : first;
}

// Marks the experts of all groups but the best `kept` as taken.
void limit_groups(const RouteArgs& a, const float* choice, float* groups, uint8_t* group_taken, uint8_t* taken) {
  const int64_t size = a.experts / a.groups;
  for (int64_t g = 0; g < a.groups; g++) groups[g] = group_score(choice + g * size, size, a.two_of_group);
  std::memset(group_taken, 0, a.groups);
  std::memset(taken, 1, a.experts);
  for (int64_t i = 0; i < a.kept_groups; i++) {
    const int64_t g = largest(groups, group_taken, a.groups);
    group_taken[g] = 1;
    std::memset(taken + g * size, 0, size);
  }
}

template <class T>
void combine_rows(const CombineArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const int32_t* places = a.places + row * a.k;
    const float* weights = a.weights + row * a.k;
    const T* shared = a.shared ? static_cast<const T*>(a.shared) + row * a.width : nullptr;
    const float gate = a.shared_gate ? 1.0f / (1.0f + exp(-a.shared_gate[row])) : 1.0f;
    T* out = static_cast<T*>(a.out) + row * a.width;
    for (int64_t i = 0; i < a.width; i += kLanes) {
      const int64_t n = min(kLanes, a.width - i);
      f32x16 sum = zeros();
      for (int64_t j = 0; j < a.k; j++)
        sum = sum + broadcast(weights[j]) * load_partial(a.outputs + places[j] * a.width + i, n);
      if (shared) sum = sum + broadcast(gate) * load_partial(shared + i, n);
      store_partial(out + i, sum, n);
    }
  }
}

}  // namespace

int64_t route_scratch(const RouteArgs& a) {
  return (2 * a.experts + a.groups) * static_cast<int64_t>(sizeof(float)) + a.experts + a.groups;
}

void route(const RouteArgs& a, int64_t begin, int64_t end, char* scratch) {
  float* scores = reinterpret_cast<float*>(scratch);
  float *biased = scores + a.experts, *groups = biased + a.experts;
  uint8_t* taken = reinterpret_cast<uint8_t*>(groups + a.groups);
  for (int64_t row = begin; row < end; row++) {
    const float *logits = a.logits + row * a.experts, *choice = logits;  // logits have the order of their scores
    score_row(logits, scores, a.experts, a.sigmoid);
    if (a.bias || a.groups > 1) {
      for (int64_t i = 0; i < a.experts; i++) biased[i] = a.bias ? scores[i] + a.bias[i] : scores[i];
      choice = biased;
    }
    std::memset(taken, 0, a.experts);
    if (a.groups > 1) limit_groups(a, choice, groups, taken + a.experts, taken);
    int32_t* ids = a.ids + row * a.k;
    float *weights = a.weights + row * a.k, sum = 0.0f;
    for (int64_t j = 0; j < a.k; j++) {
      ids[j] = static_cast<int32_t>(largest(choice, taken, a.experts));
      taken[ids[j]] = 1;
      weights[j] = scores[ids[j]];
      sum += weights[j];
    }
    sum += a.added;
    const float divisor = a.normalize ? (sum < kMinSum ? kMinSum : sum) : 1.0f;
    for (int64_t j = 0; j < a.k; j++) weights[j] = weights[j] / divisor * a.scale;
  }
}

void combine(const CombineArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { combine_rows<decltype(x)>(a, begin, end); });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
