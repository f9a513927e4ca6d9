// The kernels of one instruction set, as declared for its table; included only by files compiled for that set.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

void rms_norm(const NormArgs&, int64_t begin, int64_t end);
void silu_mul(const GatedArgs&, int64_t begin, int64_t end);
void gelu_mul(const GatedArgs&, int64_t begin, int64_t end);
void rope(const RopeArgs&, int64_t begin, int64_t end);
void store_kv(const StoreArgs&, int64_t begin, int64_t end);
void norm_rope_store(const QkvArgs&, int64_t begin, int64_t end, char* scratch);
int64_t linear_scratch(const LinearArgs&);
void linear(const LinearArgs&, int64_t row0, int64_t begin, int64_t end, char* scratch);
int64_t lora_scratch(const LoraArgs&);
void lora_down(const LoraArgs&, const LoraGroup&, int64_t begin, int64_t end, float* inner, char* scratch);
void lora_up(const LoraArgs&, const LoraGroup&, int64_t begin, int64_t end, const float* inner);
void quantize_rows(const QuantizeArgs&, int64_t begin, int64_t end);
int64_t int8_rows_size(const Int8Args&);
void int8_rows(const Int8Args&, int64_t begin, int64_t end);
void linear_int8(const Int8Args&, int64_t row0, int64_t begin, int64_t end);
int64_t attention_scratch(const AttentionArgs&);
int64_t attention_partial(const AttentionArgs&, int64_t queries);
void attend(const AttentionArgs&, const AttentionTile&, char* scratch);
void attend_split(const AttentionArgs&, const AttentionTile&, int64_t split, float* partial, char* scratch);
void merge_splits(const AttentionArgs&, const AttentionTile&, float* partials);
int64_t sampling_scratch(int64_t vocab, int64_t k);
void logprobs(const LogprobArgs&, int64_t row, char* scratch);
void sample(const SampleArgs&, int64_t row);
bool draw(const DrawArgs&, int64_t row, const float* logits, char* scratch);
void filter_logits(const FilterArgs&, int64_t row, char* scratch);
void penalize(const PenaltyArgs&, int64_t row, char* scratch);

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
