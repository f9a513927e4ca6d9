// Arguments of the kernels that sample and score; a part of kernels.h, whose rules hold here too.
#pragma once

#include <cstdint>

namespace tokserve {

struct LogprobArgs {
  const float* logits;       // [R, V]
  const int64_t* token_ids;  // [R]
  const float* temperature;  // [R] or null
  const int64_t* named;      // [R, m] or null
  float* token_logprobs;     // [R]
  int32_t* ranks;            // [R]
  int32_t* top_ids;          // [R, k + m]
  float* top_logprobs;       // [R, k + m]
  int64_t vocab, k, m;
};

struct SampleArgs {
  const float* logits;       // [R, V]
  const int64_t* seeds;      // [R]
  const int64_t* positions;  // [R]
  const uint8_t* greedy;     // [R] bool
  int64_t* ids;              // [R]
  int64_t vocab;
};

struct SampleFusedArgs {
  SampleArgs sample;
  uint8_t* finite;           // [R] bool
  const float* temperature;  // [R] or null
  bool scaled;               // logprobs are of logits / temperature
  LogprobArgs logprobs;      // of sample.ids; token_logprobs null: no logprobs
};

struct MaskArgs {
  const float* logits;       // [R, V]
  const float* processed;    // [R, V], -inf: cannot be drawn
  const int64_t* token_ids;  // [R]
  const uint8_t* greedy;     // [R] bool
  const float* temperature;  // [R]
  int32_t* counts;           // [R]
  int32_t* ids;              // [R, limit]
  float* kept_logprobs;      // [R]
  float* logprobs;           // [R]
  int64_t vocab, limit;
};

struct FilterArgs {
  const float* logits;   // [R, V]
  const int32_t* top_k;  // [R], 0: off
  const float* top_p;    // [R]
  const float* min_p;    // [R]
  float* out;            // [R, V]
  int64_t vocab;
};

struct PenaltyArgs {
  const float* logits;         // [R, V]
  const int32_t* history;      // [R, L]: prompt, then output, padded with -1
  const int32_t* prompt_lens;  // [R]
  const int32_t* lens;         // [R]
  const float* presence;
  const float* frequency;
  const float* repetition;
  float* out;  // [R, V]
  int64_t vocab, length;
};

}  // namespace tokserve
