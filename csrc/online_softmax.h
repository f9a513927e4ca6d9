// The state of an online softmax over blocks of keys (Milakov and Gimelshein, arXiv 1805.02867), for the rows of one
// attention tile.  Names are FlashAttention's: row_max, row_sum, acc.
#pragma once

#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

struct SoftmaxState {
  float* row_max;  // [padded rows]: largest score so far; -inf: no key seen
  float* row_sum;  // [padded rows]: sum of e^(score - row_max)
  float* acc;      // [rows][padded dim]: sum of e^(score - row_max) * value
};

SoftmaxState state_in(float* memory, int64_t rows) {
  const int64_t padded = round_up(rows, kLanes);
  return {memory, memory + padded, memory + 2 * padded};
}
int64_t state_floats(int64_t rows, int64_t width) { return 2 * round_up(rows, kLanes) + rows * width; }

void reset(const SoftmaxState& state, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < round_up(rows, kLanes); r++) state.row_max[r] = kNegInf, state.row_sum[r] = 0.0f;
  std::memset(state.acc, 0, rows * width * sizeof(float));
}

// Merges the state of a later split into `into`.
void merge(const SoftmaxState& into, const SoftmaxState& from, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++) {
    if (from.row_max[r] == kNegInf) continue;
    float* acc = into.acc + r * width;
    const float* from_acc = from.acc + r * width;
    if (into.row_max[r] == kNegInf) {
      into.row_max[r] = from.row_max[r], into.row_sum[r] = from.row_sum[r];
      std::memcpy(acc, from_acc, width * sizeof(float));
      continue;
    }
    const float row_max = max(into.row_max[r], from.row_max[r]);
    const float rescale = exp(into.row_max[r] - row_max), from_rescale = exp(from.row_max[r] - row_max);
    into.row_max[r] = row_max;
    into.row_sum[r] = into.row_sum[r] * rescale + from.row_sum[r] * from_rescale;
    for (int64_t i = 0; i < width; i += kLanes) {
      store(acc + i, fma(load(acc + i), broadcast(rescale), load(from_acc + i) * broadcast(from_rescale)));
    }
  }
}

}  // namespace

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
