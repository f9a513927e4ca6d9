// Arguments of the kernels that scale rows and heads.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace tokserve {

// Heads times 1 + growth * log(1 + (position + first) / period), a whole quotient.
struct PositionScaleArgs {
  DType dtype;
  const void* x;  // [T, width]
  void* out;      // [T, width]
  const int64_t* positions;
  int64_t width, period, first;
  float growth;
};

struct RowScaleArgs {
  DType dtype;
  const void* x;         // [T, width]
  const float* factors;  // [T], or one for all rows
  void* out;             // [T, width]
  int64_t width;
  bool one;
};

// Rows whose last `size` elements, or a copy of them that is appended, become heads of root mean square 1.
struct ValueNormArgs {
  DType dtype;
  const void* x;  // [T, width]
  void* out;      // [T, width], or with `copied` [T, width + size]
  int64_t width, size, dim;
  float eps;
  bool copied;
};

}  // namespace tokserve
