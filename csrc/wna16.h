// Packed weights of 4 or 8 bits as the bindings hold them, and the products of a mixture's experts with them.
#pragma once

#include <optional>
#include <vector>

#include "bind.h"

namespace tokserve {

// A part of a packed weight, as the bindings take it from PackedPart.
struct Wna16Part {
  int bits;
  int64_t rows, columns, group, ratio;
  const Tensor &packed, &factors, &scales;
  const std::optional<Tensor>&sub_scales, &mins, &sub_mins, &order;
  bool folded, rounded, float8, gated;
};

// The arguments that describe the weight, checked; the caller checks the contents of `order`.
Wna16Args weight_args(const Wna16Part& p, const char* op);

// A weight [rows, columns] whose parts lie one below the other; `gated`: it is one part, packed for a gated product.
struct Wna16Weight {
  std::vector<Wna16Args> parts;
  int64_t rows = 0, columns = 0;
  bool gated = false;
};

// The weights of all experts for one of their products; an expert has one of the two.
struct Wna16Experts {
  std::vector<const Wna16Weight*> weights;  // null: its weight is one of floats
  std::vector<const void*> floats;          // packed for linear
  bool empty() const { return weights.empty(); }
};

// The product of each expert's rows: expert e has rows [starts[e], starts[e + 1]) of x and of out.
struct ExpertsProduct {
  DType dtype, out_dtype;
  Gate gate;
  const std::vector<int64_t>& starts;
  const char* x;  // rows x_stride elements apart
  const char* bias;
  char* out;
  int64_t n, k, x_stride;  // outputs and inputs
};

// Bytes of scratch that multiply_experts takes.
int64_t experts_scratch(const Wna16Experts& experts, const ExpertsProduct& product);
void multiply_experts(const Wna16Experts& experts, const ExpertsProduct& product, char* scratch);

}  // namespace tokserve
