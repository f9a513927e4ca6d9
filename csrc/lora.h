// Arguments of LoRA; included by kernels.h only.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace tokserve {

// LoRA: out += scale * (x down^T) up, for each row with its adapter's factors, separate for each shard of the outputs.
struct LoraArgs {
  DType dtype;
  const void* x;         // [T, K], rows x_stride elements apart
  const void* down;      // [S, P, R, K] for S slots, P shards
  const void* up;        // [S, R, N]
  const int32_t* ranks;  // [S, P]: rows of down and up in use, 0: nothing is added
  const float* scales;   // [S, P]
  const int64_t* sizes;  // [P]: outputs of each shard, N together
  void* out;             // [T, N], rows out_stride elements apart
  int64_t k, n, r, shards, x_stride, out_stride;
};

// Rows with the same adapter, anywhere in the batch.
struct LoraGroup {
  const int32_t* rows;  // [count]
  int64_t count;        // 1 .. kLoraRows
  int64_t slot;
};

}  // namespace tokserve
