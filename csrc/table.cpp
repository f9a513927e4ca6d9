// Gathers the kernels of one instruction set under its name.
#include "table.h"

#define TOKSERVE_TEXT_OF(x) #x
#define TOKSERVE_TEXT(x) TOKSERVE_TEXT_OF(x)

namespace tokserve {
namespace TOKSERVE_ISA {

const Kernels table = {
    TOKSERVE_TEXT(TOKSERVE_ISA),
    rms_norm,
    silu_mul,
    gelu_mul,
    rope,
    store_kv,
    norm_rope_store,
    linear_scratch,
    linear,
    lora_scratch,
    lora_down,
    lora_up,
    quantize_rows,
    int8_rows_size,
    int8_rows,
    linear_int8,
    attention_scratch,
    attention_partial,
    attend,
    attend_split,
    merge_splits,
    sampling_scratch,
    logprobs,
    sample,
    draw,
    filter_logits,
    penalize,
};

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
