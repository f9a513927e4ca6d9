// The products of packed integer weights with rows that are rounded to int8 (gemm_wna8.cpp).
#pragma once

#include "kernels.h"

namespace tokserve {
namespace TOKSERVE_ISA {

int64_t rounded_rows_size(const Wna16Args& a);
void rounded_rows(const Wna16Args& a, int64_t begin, int64_t end);
void linear_rounded(const Wna16Args& a, int64_t row0, int64_t begin, int64_t end);

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
