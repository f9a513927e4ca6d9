// A row of logits: loads padded with -inf, its largest value, and its largest entries in order.  Among equal logits the
// lower id ranks first.
#pragma once

#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr int64_t kBins = 2048;  // of the histogram that filter_logits keeps in its scratch memory

TOKSERVE_INLINE f32x16 load_logits(const float* row, int64_t at, int64_t vocab) {
  if (at + kLanes <= vocab) return load(row + at);
  return select(mask_below(vocab - at), load_partial(row + at, vocab - at), broadcast(kNegInf));
}

[[gnu::noinline]] float max_logit(const float* row, int64_t vocab) {
  f32x16 best[4] = {broadcast(kNegInf), broadcast(kNegInf), broadcast(kNegInf), broadcast(kNegInf)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= vocab; i += 4 * kLanes) {
    for (int j = 0; j < 4; j++) best[j] = vmax(best[j], load(row + i + j * kLanes));
  }
  for (; i < vocab; i += kLanes) best[0] = vmax(best[0], load_logits(row, i, vocab));
  return reduce_max(vmax(vmax(best[0], best[1]), vmax(best[2], best[3])));
}

struct Candidate {
  float value;
  int32_t id;
};

TOKSERVE_INLINE bool worse(const Candidate& a, const Candidate& b) {
  return a.value < b.value || (a.value == b.value && a.id > b.id);
}

// Restores the heap [0, n), worst candidate first, with `entry` at index `at` or below.
void sift_down(Candidate* heap, int64_t n, int64_t at, Candidate entry) {
  for (int64_t child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && worse(heap[child + 1], heap[child])) child++;
    if (!worse(heap[child], entry)) break;
    heap[at] = heap[child];
  }
  heap[at] = entry;
}

void make_heap(Candidate* heap, int64_t n) {
  for (int64_t i = n / 2 - 1; i >= 0; i--) sift_down(heap, n, i, heap[i]);
}

// Turns a heap into a list, best first.
[[gnu::noinline]] void sort_heap(Candidate* heap, int64_t n) {
  for (int64_t last = n - 1; last > 0; last--) {
    const Candidate worst = heap[0];
    sift_down(heap, last, 0, heap[last]);
    heap[last] = worst;
  }
}

// The k largest logits of the row as a heap; 1 <= k <= vocab.  Not inlined: inside its callers GCC 12 compiles the loop
// to code that is 7 % slower.
[[gnu::noinline]] void select_top_k(const float* row, int64_t vocab, int64_t k, Candidate* heap) {
  for (int64_t i = 0; i < k; i++) heap[i] = {row[i], static_cast<int32_t>(i)};
  make_heap(heap, k);
  for (int64_t i = k; i < vocab; i += kLanes) {
    const f32x16 value = load_logits(row, i, vocab);
    for (uint32_t better = mask_bits(broadcast(heap[0].value) < value); better; better &= better - 1) {
      const int64_t id = i + __builtin_ctz(better);
      if (heap[0].value < row[id]) sift_down(heap, k, 0, {row[id], static_cast<int32_t>(id)});
    }
  }
}

}  // namespace

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
