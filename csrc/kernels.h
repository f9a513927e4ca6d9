// The interface of the kernels: plain functions over plain argument structs, in one table per instruction set.
// Kernels use no threads, no Python and no allocation: the bindings divide the work into ranges and pass scratch
// memory. Nothing here is inline code: these types are shared by files compiled for different instruction sets.
#pragma once

#include <cstdint>

#include "attention_args.h"
#include "dtype.h"
#include "lora.h"
#include "recurrent.h"
#include "sampling_args.h"
#include "scaling.h"

namespace tokserve {

// Columns of one panel of packed weights; N is padded to it.
constexpr int64_t kPanel = 64;
// Outputs of one panel of a gated weight: its columns are those of the gate, then those of the up projection.
constexpr int64_t kGatedPanel = kPanel / 2;
// Rows of x that one task of linear covers.
constexpr int64_t kRowBlock = 128;
// Keys are read in blocks of kKeyBlock absolute positions; a row's softmax is merged over splits of kSplit positions.
constexpr int64_t kKeyBlock = 64;
constexpr int64_t kSplit = 512;
// Rows of one adapter that share one reading of its weights.
constexpr int64_t kLoraRows = 4;
// Rows (queries x heads of one group) of one attention task; of latent attention, whose keys each task rearranges,
// more.
constexpr int64_t kQueryRows = 32;
constexpr int64_t kLatentRows = 64;
constexpr int64_t kMostMembers = 64;  // requests of one attention task
// Tokens whose keys norm_rope_store holds before it writes them.
constexpr int64_t kStoreRows = 16;
// Log-sum-exp is taken over slices of this many logits, merged in ascending order.
constexpr int64_t kSlice = 4096;

struct NormArgs {
  DType dtype, weight_dtype;
  const void* x;         // [T, H]
  const void* residual;  // [T, H], or null: plain rms_norm
  const void* weight;    // [H]
  const void* bias;      // [H] of weight_dtype, or null
  void* out;             // [T, H]
  void* sum;             // [T, H]: x * multiplier + residual rounded to dtype, or null
  int64_t width;
  float eps, multiplier;
};

// Elements that change when a tensor becomes another one, rounded to its type.
struct DifferenceArgs {
  DType dtype, fresh_dtype;
  const void* old;    // [n] of dtype
  const void* fresh;  // [n] of fresh_dtype
  int64_t n;
  uint32_t* places;  // [n]: of those that differ, ascending
  void* values;      // [n] of dtype: what they become
};

struct AddArgs {
  DType dtype;
  const void* x;         // [T, width]
  const void* residual;  // [T, width]
  void* out;             // [T, width]: x * multiplier + residual
  int64_t width;
  float multiplier;
};

// limit * tanh(x * multiplier / limit), or x * multiplier where the limit is 0.
struct CapArgs {
  DType dtype;
  const void* x;  // [T, width]
  void* out;      // [T, width]; it may be x
  int64_t width;
  float multiplier, limit;
};

enum class Activation : int { silu, gelu_tanh, gelu, relu, relu2 };

struct ActivateArgs {
  DType dtype;
  Activation activation;
  bool gated;
  const void* x;  // [T, width], or gated: [T, 2 * width], the gate first
  void* out;      // [T, width]
  int64_t width;
};

struct GatedInputArgs {
  DType dtype;
  Activation activation;
  const void* x;       // [T, width]
  const void* inputs;  // [T, stride elements], of which width count
  void* out;           // [T, width]
  int64_t width, stride;
};

struct GatedArgs {
  DType dtype;
  const void* x;  // [T, 2 * width]: gate, then up
  void* out;      // [T, width]
  int64_t width;
};

struct RopeArgs {
  DType dtype;
  const void* q;  // [T, q_heads, dim], rows q_stride elements apart
  const void* k;
  void* q_out;  // contiguous
  void* k_out;
  int64_t q_stride, k_stride, q_heads, k_heads, dim, rot;
  const float* table;  // [max_pos, rot]: cos for rot / 2 pairs, then sin
  const int64_t* positions;
  bool interleaved;  // pairs are (2 i, 2 i + 1), not (i, i + rot / 2)
};

// From a row of the qkv projection to its queries, with keys and values written into the pages.
struct QkvArgs {
  DType dtype, weight_dtype;
  const void* qkv;       // [T, (q_heads + 2 * k_heads) * dim]
  const void* q_weight;  // [dim], of the norm over each head, or [heads * dim]; null, both: no norm
  const void* k_weight;
  void* q_out;    // [T, q_heads, dim]
  void* k_cache;  // [B, k_heads, page * dim elements as in pages.h]
  void* v_cache;
  const float* table;  // as in RopeArgs
  const int64_t* positions;
  const int64_t* slots;  // as in StoreArgs
  int64_t q_heads, k_heads, dim, rot, page;
  float eps;
  bool interleaved;  // as in RopeArgs
  bool norm_all;     // one norm over all heads of q, one over those of k
  bool norm_last;    // after the rotation
  bool gated;        // behind each query head lie dim elements that are passed over
};

struct StoreArgs {
  DType dtype;
  const void* k;  // [T, heads, dim], rows k_stride elements apart
  const void* v;
  void* k_cache;  // [B, heads, page * dim elements as in pages.h]
  void* v_cache;
  const int64_t* slots;  // [T]: block * page + offset
  int64_t k_stride, v_stride, heads, page, dim;
};

enum class Gate : int { none, both, silu, gelu, clamped };

struct LinearArgs {
  DType dtype, out_dtype;
  Gate gate;           // not none: the weight is gated, n counts outputs, bias is [2 * N]; both: out is [M, 2 * N]
  const void* x;       // [M, K], rows x_stride elements apart
  const void* packed;  // [panels][K][64], bf16: [panels][ceil(K / 2)][64][2]
  const void* bias;    // [N] of dtype, or null
  void* out;           // [M, N]
  int64_t m, n, k, x_stride;
  bool cheap_widening;     // widening 16-bit weights does not compete with multiply-adds for execution ports
  int64_t out_stride = 0;  // elements between rows of out; 0: they are adjacent.  Not of a gated weight
};

struct QuantizeArgs {
  DType dtype;
  const void* x;   // [M, K], rows x_stride elements apart
  int8_t* values;  // [M, K]
  float* scales;   // [M]
  int64_t k, x_stride;
};

// Rows rounded to sixteen integers, -8 .. 7, with a scale per group: codes are the integers plus 8.
struct Int4Args {
  DType dtype;
  const void* x;     // [M, K], rows x_stride elements apart
  uint8_t* codes;    // [M, K]
  uint16_t* scales;  // [M, ceil(K / group)] bfloat16
  int64_t k, x_stride, group;
};

struct Int8Args {
  DType dtype, out_dtype;
  Gate gate;              // as in LinearArgs; scales are [2 * N] then, as bias is
  const void* x;          // [M, K], rows x_stride elements apart
  const uint8_t* packed;  // [panels][ceil(K / 4)][64][4], each value plus 128
  const float* scales;    // [N], of the weight's rows
  const void* bias;       // [N] of dtype, or null
  void* out;              // [M, N]
  int64_t m, n, k, x_stride;
  char* rows;  // x quantized, int8_rows_size(args) bytes in the instruction set's own layout
};

// A number per output and group of inputs: values [panels][ceil(G / ratio)][64], each of `ratio` groups, times parts
// [panels][G][64], if there are any.
struct GroupScales {
  DType dtype;
  const void* values;
  const int8_t* parts;  // or null
  int64_t ratio;
};

// Weights of `bits` bits: factor * scale + minimum, as in unpack.h; or float8 (e4m3): number * scale, rounded to dtype
// before it is multiplied, unless x is rounded too.
struct Wna16Args {
  DType dtype, out_dtype;
  Gate gate;                 // as in LinearArgs
  const void* x;             // [M, K], rows x_stride elements apart
  const uint8_t* packed;     // [panels][K padded to 8][64] of 4 or 8 bits
  const int8_t* factors;     // [16], of 4-bit codes; 8-bit values are their own factors
  GroupScales scales, mins;  // mins.values null: none
  const int32_t* order;      // [K], column order[i] of x belongs to element i of the weight's K; or null
  const void* bias;          // [N] of dtype, or null
  void* out;                 // [M, N], rows out_stride elements apart
  int64_t m, n, k, x_stride, out_stride;
  int64_t group;  // inputs that share a scale, a multiple of 8 if there are several
  int bits;
  bool folded;   // scales are powers of two and go into the weights before they are multiplied
  bool rounded;  // x is rounded to int8, by group; of float8 weights, to float8, by row
  bool float8;   // of 8 bits, with float32 scales and without minima or order
  char* rows;    // what wna16_rows makes of x, wna16_rows_size(args) bytes
};

struct ActivationGradientsArgs {
  DType dtype;
  Activation activation;
  bool gated;
  const void* grad;  // [T, width]: of the result
  const void* x;     // [T, width], or gated: [T, 2 * width], the gate first
  void* out;         // like x
  int64_t width;
};

struct NormGradientsArgs {
  DType dtype, grad_dtype;
  const void* grad;  // [T, H] of grad_dtype: of the result
  const void* x;     // [T, H]
  const float* weight;
  const void* carried;  // [T, H] or null: added to the gradient of x
  void* out;            // [T, H]
  int64_t width;
  float eps;
};

// The experts of each token, by its router logits.
struct RouteArgs {
  const float* logits;  // [T, E]
  const float* bias;    // [E], added to the scores for the choice alone, or null
  int32_t* ids;         // [T, k], best first
  float* weights;       // [T, k]
  int64_t experts, k;
  int64_t groups, kept_groups;  // experts come from the best groups only; one group: from all
  bool sigmoid;                 // scores are sigmoids, else the softmax
  bool two_of_group;            // a group is as good as its two best experts together, else as its best one
  bool normalize;               // weights are divided by their sum
  float added;                  // to that sum
  float scale;                  // of the weights
};

// out = sum over j of weights[j] * outputs[places[j]], in order of j, then + sigmoid(shared_gate) * shared.
struct CombineArgs {
  DType dtype;
  const float* outputs;      // [T * k, width]
  const int32_t* places;     // [T, k]: rows of outputs
  const float* weights;      // [T, k]
  const void* shared;        // [T, width] or null
  const float* shared_gate;  // [T], or null: 1
  void* out;                 // [T, width]
  int64_t k, width;
};

struct Kernels {
  const char* name;        // of the instruction set
  const char* arithmetic;  // of its bfloat16 products: kernels of one arithmetic give the same bits in every op
  // These compute rows [begin, end).
  void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*layer_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*add_residual)(const AddArgs&, int64_t begin, int64_t end);
  void (*cap)(const CapArgs&, int64_t begin, int64_t end);
  void (*scale_by_position)(const PositionScaleArgs&, int64_t begin, int64_t end);
  void (*scale_rows)(const RowScaleArgs&, int64_t begin, int64_t end);
  void (*norm_values)(const ValueNormArgs&, int64_t begin, int64_t end);
  void (*gate_inputs)(const GatedInputArgs&, int64_t begin, int64_t end);
  void (*activate)(const ActivateArgs&, int64_t begin, int64_t end);
  void (*silu_mul)(const GatedArgs&, int64_t begin, int64_t end);
  void (*gelu_mul)(const GatedArgs&, int64_t begin, int64_t end);
  void (*rope)(const RopeArgs&, int64_t begin, int64_t end);
  void (*store_kv)(const StoreArgs&, int64_t begin, int64_t end);
  void (*norm_rope_store)(const QkvArgs&, int64_t begin, int64_t end,
                          char* scratch);  // scratch: kStoreRows * k_heads * dim elements
  void (*latent_rope_store)(const LatentArgs&, int64_t begin, int64_t end);
  // Panels [begin, end) of the row block that starts at row0; scratch holds linear_scratch(args) bytes.  It first
  // converts the rows of x, a cost that pays off from linear_panels(args) panels on.
  int64_t (*linear_scratch)(const LinearArgs&);
  int64_t (*linear_panels)(const LinearArgs&);
  void (*linear)(const LinearArgs&, int64_t row0, int64_t begin, int64_t end, char* scratch);
  // A group's x times rows [begin, end) of down [P * R][K], scaled, into inner [kLoraRows][P * R]; scratch holds
  // lora_scratch(args) bytes.  Then inner times up, added to columns [begin, end) of the group's rows of out.
  int64_t (*lora_scratch)(const LoraArgs&);
  void (*lora_down)(const LoraArgs&, const LoraGroup&, int64_t begin, int64_t end, float* inner, char* scratch);
  void (*lora_up)(const LoraArgs&, const LoraGroup&, int64_t begin, int64_t end, const float* inner);
  void (*quantize_rows)(const QuantizeArgs&, int64_t begin, int64_t end);
  void (*quantize_int4)(const Int4Args&, int64_t begin, int64_t end);
  // First int8_rows for all rows of x, into args.rows; then panels as in linear.
  int64_t (*int8_rows_size)(const Int8Args&);
  void (*int8_rows)(const Int8Args&, int64_t begin, int64_t end);
  void (*linear_int8)(const Int8Args&, int64_t row0, int64_t begin, int64_t end);
  // As for int8: first wna16_rows for all rows of x, then panels.
  int64_t (*wna16_rows_size)(const Wna16Args&);
  void (*wna16_rows)(const Wna16Args&, int64_t begin, int64_t end);
  void (*linear_wna16)(const Wna16Args&, int64_t row0, int64_t begin, int64_t end);
  void (*embedding_wna16)(const Wna16Args&, const int64_t* ids, int64_t begin, int64_t end);  // rows ids[t] into out
  // Rows [begin, end); scratch holds route_scratch(args) bytes.
  int64_t (*route_scratch)(const RouteArgs&);
  void (*route)(const RouteArgs&, int64_t begin, int64_t end, char* scratch);
  void (*combine)(const CombineArgs&, int64_t begin, int64_t end);
  int64_t (*delta_scratch)(const DeltaArgs&);
  void (*gated_delta)(const DeltaArgs&, const StateRow&, int64_t key_head, char* scratch);
  void (*short_conv)(const ConvArgs&, const StateRow&, int64_t begin, int64_t end);
  void (*gate_heads)(const GateHeadsArgs&, int64_t begin, int64_t end);
  // attend: a whole tile into out.  attend_split: one split of it into `partial`; merge_splits: its partials into out.
  int64_t (*attention_scratch)(const AttentionArgs&);
  int64_t (*attention_partial)(const AttentionArgs&, int64_t queries);  // floats of one split's partial result
  void (*attend)(const AttentionArgs&, const AttentionTile&, char* scratch);
  void (*attend_split)(const AttentionArgs&, const AttentionTile&, int64_t split, float* partial, char* scratch);
  void (*merge_splits)(const AttentionArgs&, const AttentionTile&, float* partials);
  void (*activation_gradients)(const ActivationGradientsArgs&, int64_t begin, int64_t end);
  void (*norm_gradients)(const NormGradientsArgs&, int64_t begin, int64_t end,
                         float* weight_sum);  // [H], of these rows
  // A task's grad_q, and its part of grad_k and grad_v into `partial`; then those of tokens [begin, end) are added.
  int64_t (*attention_gradients_scratch)(const AttentionGradientsArgs&, const AttentionGradientsTask&);
  int64_t (*attention_gradients_partial)(const AttentionGradientsArgs&, const AttentionGradientsTask&);  // floats
  void (*attention_gradients)(const AttentionGradientsArgs&, const AttentionGradientsTask&, float* partial,
                              char* scratch);
  void (*merge_attention_gradients)(const AttentionGradientsArgs&, const AttentionGradientsTask&, const float* partial,
                                    int64_t begin, int64_t end);
  int64_t (*sampling_scratch)(int64_t vocab, int64_t k);
  void (*logprobs)(const LogprobArgs&, int64_t row, char* scratch);
  void (*sample)(const SampleArgs&, int64_t row);
  // Returns false, with nothing written, if the row's largest logit is not finite.  `logits`: the row.
  bool (*sample_fused)(const SampleFusedArgs&, int64_t row, const float* logits, char* scratch);
  void (*sampling_mask)(const MaskArgs&, int64_t row);
  void (*filter_logits)(const FilterArgs&, int64_t row, char* scratch);
  void (*penalize)(const PenaltyArgs&, int64_t row, char* scratch);
  int64_t (*difference)(const DifferenceArgs&);  // how many elements differ
  // state_scan: one task of a row; then, when all of them are done, state_keep: the row's inputs into rings, and
  // state_gate: the outputs of tokens [begin, end), in place.
  int64_t (*state_scratch)(const StateSpaceArgs&);
  void (*state_scan)(const StateSpaceArgs&, const StateRow&, int64_t task, char* scratch);
  void (*state_keep)(const StateSpaceArgs&, const StateRow&);
  void (*state_gate)(const StateSpaceArgs&, int64_t begin, int64_t end, char* scratch);
};

namespace portable {
extern const Kernels table;
}
namespace neon {
extern const Kernels table;
}
namespace neon_dot {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx2_vnni {
extern const Kernels table;
}
namespace avx512f {
extern const Kernels table;
}
namespace avx512_vnni {
extern const Kernels table;
}
namespace avx512_bf16 {
extern const Kernels table;
}
namespace amx {
extern const Kernels table;
}
namespace amx_software {  // amx on software tiles, for tests: runs where avx512_bf16 does
extern const Kernels table;
}

}  // namespace tokserve
