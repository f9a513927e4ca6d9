// Declares the kernels of one instruction set; included only by files compiled for that set.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "vec.h"

// clang-format off
#define TOKSERVE_KERNELS(EACH)                                                                                       \
  EACH(rms_norm) EACH(layer_norm) EACH(add_residual) EACH(cap) EACH(activate)                                        \
  EACH(scale_by_position) EACH(scale_rows) EACH(norm_values) EACH(gate_inputs)                                       \
  EACH(silu_mul) EACH(gelu_mul) EACH(rope) EACH(store_kv) EACH(norm_rope_store) EACH(latent_rope_store)              \
  EACH(linear_scratch) EACH(linear_panels) EACH(linear) EACH(lora_scratch) EACH(lora_down) EACH(lora_up)             \
  EACH(quantize_rows) EACH(quantize_int4) EACH(int8_rows_size) EACH(int8_rows) EACH(linear_int8)                     \
  EACH(wna16_rows_size) EACH(wna16_rows) EACH(linear_wna16) EACH(embedding_wna16)                                    \
  EACH(route_scratch) EACH(route) EACH(combine)                                                                      \
  EACH(delta_scratch) EACH(gated_delta) EACH(short_conv) EACH(gate_heads)                                            \
  EACH(attention_scratch) EACH(attention_partial) EACH(attend) EACH(attend_split) EACH(merge_splits)                 \
  EACH(attention_gradients_scratch) EACH(attention_gradients_partial)                                                \
  EACH(attention_gradients) EACH(merge_attention_gradients) EACH(activation_gradients) EACH(norm_gradients)          \
  EACH(sampling_scratch) EACH(logprobs) EACH(sample) EACH(sample_fused) EACH(sampling_mask)                          \
  EACH(filter_logits) EACH(penalize) EACH(difference)                                                                \
  EACH(state_scratch) EACH(state_scan) EACH(state_keep) EACH(state_gate)
// clang-format on

namespace tokserve {
namespace TOKSERVE_ISA {

#define TOKSERVE_DECLARE(kernel) std::remove_pointer_t<decltype(Kernels::kernel)> kernel;
TOKSERVE_KERNELS(TOKSERVE_DECLARE)
#undef TOKSERVE_DECLARE

// Calls f with an element of that type.
template <class Call>
TOKSERVE_INLINE void with_type(DType dtype, const Call& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16{});
    case DType::f16: return f(f16{});
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
