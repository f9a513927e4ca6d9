// Arguments of the layers with a recurrent state, and of the gates of attention's heads; included by kernels.h only.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace tokserve {

// Where a part of each key head's share of a projection lies: that of head h begins at offset + h * stride.
struct HeadPart {
  int64_t offset, stride;
};

// The gated delta rule, see tokserve/ops/recurrent.py for its formula.  A key head's entries of the ring are q, k, the
// group's v, b and a, which lie at `ring_parts` of an entry.  They come from rows of x, and b and a from rows of
// `rates`, where they lie at `parts`, the last of which is z in x.
struct DeltaArgs {
  DType dtype;
  const void* x;                 // [T], rows x_stride elements apart
  const void* rates;             // [T], rows rates_stride elements apart
  const float* conv_weight;      // [taps][channels]
  const float *a_log, *dt_bias;  // [key_heads * group]
  const float* norm_weight;      // [value_dim]
  float* state;                  // [S][key_heads * group][key_dim][value_dim]
  void* ring;                    // [S][window][entry]
  void* out;                     // [T][key_heads * group][value_dim]
  int64_t x_stride, rates_stride, key_heads, group, key_dim, value_dim, channels, taps, window, entry;
  HeadPart parts[6];       // q, k, v, b, a, z
  HeadPart ring_parts[5];  // q, k, v, b, a
  float eps;
};

struct ConvArgs {
  DType dtype;
  const void* x;             // [T][3][channels]
  const float* conv_weight;  // [taps][channels]
  const float* bias;         // [channels] or null
  void* ring;                // [S][window][channels]
  void* out;                 // [T][channels]
  int64_t channels, taps, window;
};

// A state-space layer, see tokserve/ops/state_space.py for its formula.  A task computes at most `task_heads` heads of
// a group, which has `group_tasks` of these.
struct StateSpaceArgs {
  DType dtype;
  const void* x;                        // [T] of z, the convolution's channels and dt, rows x_stride elements apart
  const float* conv_weight;             // [taps][channels]
  const float* conv_bias;               // [channels] or null
  const float *a_log, *dt_bias, *skip;  // [heads]
  const float* norm_weight;             // [heads * dim] or null
  float* state;                         // [S][heads][size][dim]
  void* ring;                           // [S][window][entry]
  void* out;                            // [T][heads * dim]
  int64_t x_stride, heads, groups, size, dim, channels, taps, window, entry, norm_size, task_heads, group_tasks;
  float eps, low, high;  // limits of a step's size
};

// One row of a batch, with a state.  Its tokens are those from `token` on, at positions [first, length).
struct StateRow {
  int64_t index;  // its state row
  int64_t token, first, length;
  int64_t start, end;    // the position whose state is there, and the one whose state stays
  const int32_t* saves;  // [count][3]: -, position, state row; positions ascending, in (start, end]
  int64_t count;
};

struct GateHeadsArgs {
  DType dtype;
  const void* mixed;  // [T][heads][dim]
  const void* x;      // [T][heads][2][dim] with more behind it, rows x_stride elements apart; the second is the gate
  void* out;          // [T][heads][dim]
  int64_t x_stride, heads, dim;
};

}  // namespace tokserve
