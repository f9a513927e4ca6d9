// LoRA adapters: out += scale * (x down^T) up for the rows of one adapter, for each shard of a projection's outputs.
// These rows share the reading of the weights.  An element's sums run over K, then over the rank, in an order that
// depends neither on other rows nor on how the work was divided.
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// Rows of `down`, and vectors of columns of `up`, that are processed at once.
#if defined(__AVX512F__)
constexpr int kLoraRanks = 4, kLoraVectors = 4;
#else
constexpr int kLoraRanks = 1, kLoraVectors = 1;
#endif

template <class T>
void widen(const T* x, int64_t k, float* to) {
  for (int64_t i = 0; i < k; i += kLanes) store(to + i, load_partial(x + i, k - i));
}

// inner [ROWS][*] = scale * x [ROWS][padded K] times RANKS rows of down, transposed.  Prefetches as many rows
// from `ahead`: these weights are read once a step, in pieces too short for the hardware prefetcher.
template <class T, int ROWS, int RANKS>
TOKSERVE_INLINE void multiply_down(const float* x, const T* down, const T* ahead, int64_t k, int64_t stride,
                                   float scale, float* inner) {
  const int64_t row_stride = round_up(k, kLanes), whole = round_down_to_lanes(k);
  f32x16 sums[ROWS][RANKS];
  for (int row = 0; row < ROWS; row++) {
    for (int j = 0; j < RANKS; j++) sums[row][j] = zeros();
  }
  for (int64_t i = 0; i < whole; i += kLanes) {
    f32x16 weight[RANKS];
    for (int j = 0; j < RANKS; j++) {
      weight[j] = load(down + j * k + i);
      __builtin_prefetch(ahead + j * k + i, 0, 2);
    }
    for (int row = 0; row < ROWS; row++) {
      const f32x16 value = load(x + row * row_stride + i);
      for (int j = 0; j < RANKS; j++) sums[row][j] = fma(value, weight[j], sums[row][j]);
    }
  }
  if (whole < k) {
    for (int j = 0; j < RANKS; j++) {
      const f32x16 weight = load_partial(down + j * k + whole, k - whole);
      for (int row = 0; row < ROWS; row++) sums[row][j] = fma(load(x + row * row_stride + whole), weight, sums[row][j]);
    }
  }
  for (int row = 0; row < ROWS; row++) {
    for (int j = 0; j < RANKS; j++) inner[row * stride + j] = reduce_sum(sums[row][j]) * scale;
  }
}

// Rows of out += inner [ROWS][rank] times up [rank][columns], for VECTORS vectors of columns, or a part of one, from
// `column` on.  Prefetches the columns `ahead` further on.
template <class T, int ROWS, int VECTORS>
TOKSERVE_INLINE void add_up(const float* inner, int64_t stride, int64_t rank, const T* up, int64_t n, int64_t ahead,
                            T* const* out, int64_t column, int64_t columns) {
  f32x16 sums[ROWS][VECTORS];
  for (int row = 0; row < ROWS; row++) {
    for (int v = 0; v < VECTORS; v++) sums[row][v] = zeros();
  }
  for (int64_t j = 0; j < rank; j++) {
    f32x16 weight[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
      const T* element = up + j * n + column + v * kLanes;
      weight[v] = load_partial(element, columns - v * kLanes);
      __builtin_prefetch(element + ahead, 0, 2);
    }
    for (int row = 0; row < ROWS; row++) {
      const f32x16 factor = broadcast(inner[row * stride + j]);
      for (int v = 0; v < VECTORS; v++) sums[row][v] = fma(factor, weight[v], sums[row][v]);
    }
  }
  for (int row = 0; row < ROWS; row++) {
    for (int v = 0; v < VECTORS; v++) {
      T* element = out[row] + column + v * kLanes;
      store_partial(element, load_partial(element, columns - v * kLanes) + sums[row][v], columns - v * kLanes);
    }
  }
}

template <class T, int ROWS>
void down_rows(const LoraArgs& a, const LoraGroup& group, int64_t begin, int64_t end, float* inner, float* x_f32) {
  for (int row = 0; row < ROWS; row++) {
    widen(static_cast<const T*>(a.x) + group.rows[row] * a.x_stride, a.k, x_f32 + row * round_up(a.k, kLanes));
  }
  const int64_t stride = a.shards * a.r;
  for (int64_t shard = begin / a.r; shard * a.r < end; shard++) {
    const int64_t first = shard * a.r, at = group.slot * a.shards + shard;
    const int64_t last = min(end, first + a.ranks[at]);
    const T* down = static_cast<const T*>(a.down) + group.slot * stride * a.k;
    int64_t j = max(begin, first);
    for (; j + kLoraRanks <= last; j += kLoraRanks) {
      const int64_t next = j + 2 * kLoraRanks <= last ? j + kLoraRanks : j;
      multiply_down<T, ROWS, kLoraRanks>(x_f32, down + j * a.k, down + next * a.k, a.k, stride, a.scales[at],
                                         inner + j);
    }
    for (; j < last; j++)
      multiply_down<T, ROWS, 1>(x_f32, down + j * a.k, down + j * a.k, a.k, stride, a.scales[at], inner + j);
  }
}

template <class T, int ROWS>
void up_rows(const LoraArgs& a, const LoraGroup& group, int64_t begin, int64_t end, const float* inner) {
  constexpr int64_t step = kLoraVectors * kLanes;
  const T* up = static_cast<const T*>(a.up) + group.slot * a.r * a.n;
  T* out[ROWS];
  for (int row = 0; row < ROWS; row++) out[row] = static_cast<T*>(a.out) + group.rows[row] * a.out_stride;
  const int64_t stride = a.shards * a.r;
  for (int64_t shard = 0, first = 0; shard < a.shards && first < end; first += a.sizes[shard++], inner += a.r) {
    const int64_t rank = a.ranks[group.slot * a.shards + shard], last = min(end, first + a.sizes[shard]);
    if (rank == 0) continue;
    int64_t c = max(begin, first);
    for (; c + step <= last; c += step) {
      const int64_t ahead = c + 3 * step <= last ? 2 * step : 0;
      add_up<T, ROWS, kLoraVectors>(inner, stride, rank, up, a.n, ahead, out, c, step);
    }
    for (; c < last; c += kLanes) add_up<T, ROWS, 1>(inner, stride, rank, up, a.n, 0, out, c, min(kLanes, last - c));
  }
}

template <class T, int ROWS = kLoraRows>
void down_typed(const LoraArgs& a, const LoraGroup& group, int64_t begin, int64_t end, float* inner, float* x_f32) {
  if (group.count == ROWS) down_rows<T, ROWS>(a, group, begin, end, inner, x_f32);
  else if constexpr (ROWS > 1) down_typed<T, ROWS - 1>(a, group, begin, end, inner, x_f32);
}

template <class T, int ROWS = kLoraRows>
void up_typed(const LoraArgs& a, const LoraGroup& group, int64_t begin, int64_t end, const float* inner) {
  if (group.count == ROWS) up_rows<T, ROWS>(a, group, begin, end, inner);
  else if constexpr (ROWS > 1) up_typed<T, ROWS - 1>(a, group, begin, end, inner);
}

}  // namespace

int64_t lora_scratch(const LoraArgs& a) {
  return kLoraRows * round_up(a.k, kLanes) * static_cast<int64_t>(sizeof(float));
}

void lora_down(const LoraArgs& a, const LoraGroup& group, int64_t begin, int64_t end, float* inner, char* scratch) {
  float* x_f32 = reinterpret_cast<float*>(scratch);
  with_type(a.dtype, [&](auto x) { down_typed<decltype(x)>(a, group, begin, end, inner, x_f32); });
}

void lora_up(const LoraArgs& a, const LoraGroup& group, int64_t begin, int64_t end, const float* inner) {
  with_type(a.dtype, [&](auto x) { up_typed<decltype(x)>(a, group, begin, end, inner); });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
