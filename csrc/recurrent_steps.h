// What layers with a recurrent state have in common: their convolutions, blocks of a state, and the walk along a row.
// Included only by files compiled for an instruction set.
#pragma once

#include "activation.h"
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr int64_t kTokens = 32;           // whose convolutions are computed at once
constexpr int64_t kColumns = 2 * kLanes;  // of a state, which stay in the nearest cache for these tokens

template <class F>
TOKSERVE_INLINE void over_vectors(int64_t n, const F& f) {
  for (int64_t i = 0; i < n; i += kLanes) f(i, min(kLanes, n - i));
}

// log(1 + e^x), by log(1 + e) = e log(u) / (u - 1) with u = 1 + e rounded.
TOKSERVE_INLINE float softplus(float x) {
  if (x > 20.0f) return x;
  const float e = exp(x), u = 1.0f + e;
  return u == 1.0f ? e : e * (log(u) / (u - 1.0f));
}

// The inputs of a row's convolution for some channels: those at earlier positions are in the ring.
template <class T>
struct Inputs {
  const T* tokens;  // of position `first`, `token_stride` elements apart
  const T* ring;    // of the row's state row, entries `entry` apart
  int64_t first, token_stride, window, entry;

  const T* at(int64_t position) const {
    if (position >= first) return tokens + (position - first) * token_stride;
    return ring + position % window * entry;
  }
  Inputs from(int64_t channel) const { return {tokens + channel, ring + channel, first, token_stride, window, entry}; }
};

// Calls f with the convolution at a position, of n channels: the oldest input first.  Those before position 0 are zero.
// `weight`: [taps], rows `channels` apart.
template <class T, class F>
TOKSERVE_INLINE void convolve(const Inputs<T>& inputs, int64_t position, const float* weight, int64_t taps,
                              int64_t channels, int64_t n, const F& f) {
  over_vectors(n, [&](int64_t i, int64_t count) {
    f32x16 total = zeros();
    for (int64_t tap = max(int64_t{0}, taps - 1 - position); tap < taps; tap++) {
      const T* input = inputs.at(position - taps + 1 + tap) + i;
      total = fma(load_partial(weight + tap * channels + i, count), load_partial(input, count), total);
    }
    f(i, total);
  });
}

TOKSERVE_INLINE float square_sum(const float* x, int64_t n) {  // x is padded with zeros to whole vectors
  f32x16 total = zeros();
  for (int64_t i = 0; i < n; i += kLanes) total = fma(load(x + i), load(x + i), total);
  return reduce_sum(total);
}

// [key_dim][kColumns] of a state in memory [key_dim][value_dim], from column `column` on.
TOKSERVE_INLINE void read_block(const float* state, float* block, int64_t key_dim, int64_t value_dim, int64_t column) {
  for (int64_t i = 0; i < key_dim; i++) {
    for (int64_t j = 0; j < kColumns; j += kLanes) {
      const int64_t left = value_dim - column - j;
      store(block + i * kColumns + j, left > 0 ? load_partial(state + i * value_dim + column + j, left) : zeros());
    }
  }
}

TOKSERVE_INLINE void write_block(const float* block, float* state, int64_t key_dim, int64_t value_dim, int64_t column) {
  for (int64_t i = 0; i < key_dim; i++) {
    for (int64_t j = 0; j < kColumns; j += kLanes) {
      const int64_t left = value_dim - column - j;
      if (left > 0) store_partial(state + i * value_dim + column + j, load(block + i * kColumns + j), left);
    }
  }
}

// Each sum over a key's elements is four sums, of every fourth element, added in a fixed tree.
TOKSERVE_INLINE f32x16 tree(const f32x16* part) { return (part[0] + part[1]) + (part[2] + part[3]); }

template <class F>
TOKSERVE_INLINE void over_key(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) f(i, 0), f(i + 1, 1), f(i + 2, 2), f(i + 3, 3);
  if (i < n) f(i, 0);  // constant indices, or the sums would be in memory
  if (i + 1 < n) f(i + 1, 1);
  if (i + 2 < n) f(i + 2, 2);
}

// The block's columns of a state, which becomes state * rate + k change, and what q reads from it.
TOKSERVE_INLINE void update_block(float* block, int64_t key_dim, const float* q, const float* k, const f32x16* change,
                                  f32x16 rate, float* read) {
  f32x16 left[4] = {zeros(), zeros(), zeros(), zeros()}, right[4] = {zeros(), zeros(), zeros(), zeros()};
  over_key(key_dim, [&](int64_t i, int j) {
    float* at = block + i * kColumns;
    const f32x16 a = fma(k[i], change[0], load(at) * rate), b = fma(k[i], change[1], load(at + kLanes) * rate);
    store(at, a);
    store(at + kLanes, b);
    left[j] = fma(q[i], a, left[j]);
    right[j] = fma(q[i], b, right[j]);
  });
  store(read, tree(left));
  store(read + kLanes, tree(right));
}

// The same of a token that is in the state already.
TOKSERVE_INLINE void read_again(const float* block, int64_t key_dim, const float* q, float* read) {
  f32x16 left[4] = {zeros(), zeros(), zeros(), zeros()}, right[4] = {zeros(), zeros(), zeros(), zeros()};
  over_key(key_dim, [&](int64_t i, int j) {
    left[j] = fma(q[i], load(block + i * kColumns), left[j]);
    right[j] = fma(q[i], load(block + i * kColumns + kLanes), right[j]);
  });
  store(read, tree(left));
  store(read + kLanes, tree(right));
}

// One row's part of a layer, which `one` computes: its state is read, brought to `end` and written, there and where it
// is saved.
template <class Part>
TOKSERVE_INLINE void walk_row(const StateRow& row, const Part& one, int64_t taps, int64_t window) {
  one.read_state();
  int64_t position = min(row.start, row.first), saved = 0;
  while (position < row.length) {
    int64_t until = min(row.length, position + kTokens);
    if (position < row.start) until = min(until, row.start);
    if (position < row.end) until = min(until, row.end);
    if (saved < row.count) until = min(until, max<int64_t>(position + 1, row.saves[3 * saved + 1]));
    one.run(position, until);
    position = until;
    if (saved < row.count && row.saves[3 * saved + 1] == position) {
      const int64_t target = row.saves[3 * saved + 2];
      one.write_state(target);
      one.keep(target, max<int64_t>(0, position - taps), position);
      saved++;
    }
    if (position == row.end && row.end > row.start) one.write_state(row.index);
  }
  one.keep(row.index, max(row.first, row.length - window), row.length);
}

}  // namespace

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
