// The types of elements that kernels compute with.
#pragma once

namespace tokserve {

enum class DType : int { f32, bf16, f16 };

}  // namespace tokserve
