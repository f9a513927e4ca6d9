// Low-rank adapters: each row gets what the adapter in its slot adds to a projection, out += scale * (x down^T) up.
// Neighbouring rows of one adapter share the reading of its weights.  An element's sums run over K, then over the rank,
// in an order that knows nothing of the rows beside it; a row without an adapter is not touched.
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// Rows that share a reading; rows of `down`, and vectors of columns of `up`, that are read at once.
constexpr int kLoraRows = 4;
#if defined(__AVX512F__)
constexpr int kLoraRanks = 4, kLoraVectors = 4;
#else
constexpr int kLoraRanks = 1, kLoraVectors = 1;
#endif

int64_t padded(int64_t k) { return (k + kLanes - 1) / kLanes * kLanes; }

template <class T>
void widen(const T* x, int64_t k, float* to) {
  for (int64_t i = 0; i < k; i += kLanes) store(to + i, load_part(x + i, k - i));
}

// inner [ROWS][r] = scale * x [ROWS][padded K] times RANKS rows of down, transposed.
template <class T, int ROWS, int RANKS>
TOKSERVE_INLINE void dot(const float* x, const T* down, int64_t k, int64_t r, float scale, float* inner) {
  const int64_t stride = padded(k), whole = whole_lanes(k);
  F sums[ROWS][RANKS];
  for (int row = 0; row < ROWS; row++) {
    for (int j = 0; j < RANKS; j++) sums[row][j] = fzero();
  }
  for (int64_t i = 0; i < whole; i += kLanes) {
    F weight[RANKS];
    for (int j = 0; j < RANKS; j++) weight[j] = load(down + j * k + i);
    for (int row = 0; row < ROWS; row++) {
      const F value = load(x + row * stride + i);
      for (int j = 0; j < RANKS; j++) sums[row][j] = fma(value, weight[j], sums[row][j]);
    }
  }
  if (whole < k) {
    for (int j = 0; j < RANKS; j++) {
      const F weight = load_part(down + j * k + whole, k - whole);
      for (int row = 0; row < ROWS; row++) sums[row][j] = fma(load(x + row * stride + whole), weight, sums[row][j]);
    }
  }
  for (int row = 0; row < ROWS; row++) {
    for (int j = 0; j < RANKS; j++) inner[row * r + j] = sum(sums[row][j]) * scale;
  }
}

// out [ROWS][columns] += inner [ROWS][rank] times up [rank][columns], for VECTORS vectors of columns or a part of one.
template <class T, int ROWS, int VECTORS>
TOKSERVE_INLINE void spread(const float* inner, int64_t r, int64_t rank, const T* up, int64_t n, T* out,
                            int64_t out_stride, int64_t columns) {
  F sums[ROWS][VECTORS];
  for (int row = 0; row < ROWS; row++) {
    for (int v = 0; v < VECTORS; v++) sums[row][v] = fzero();
  }
  for (int64_t j = 0; j < rank; j++) {
    F weight[VECTORS];
    for (int v = 0; v < VECTORS; v++) weight[v] = load_part(up + j * n + v * kLanes, columns - v * kLanes);
    for (int row = 0; row < ROWS; row++) {
      const F factor = fset(inner[row * r + j]);
      for (int v = 0; v < VECTORS; v++) sums[row][v] = fma(factor, weight[v], sums[row][v]);
    }
  }
  for (int row = 0; row < ROWS; row++) {
    for (int v = 0; v < VECTORS; v++) {
      T* place = out + row * out_stride + v * kLanes;
      store_part(place, load_part(place, columns - v * kLanes) + sums[row][v], columns - v * kLanes);
    }
  }
}

// ROWS rows from `row0` on, all of adapter `slot`.
template <class T, int ROWS>
void add_run(const LoraArgs& a, int64_t row0, int64_t slot, float* wide, float* inner) {
  const int64_t rank = a.ranks[slot];
  const T* down = static_cast<const T*>(a.down) + slot * a.r * a.k;
  const T* up = static_cast<const T*>(a.up) + slot * a.r * a.n;
  for (int row = 0; row < ROWS; row++) {
    widen(static_cast<const T*>(a.x) + (row0 + row) * a.x_stride, a.k, wide + row * padded(a.k));
  }
  int64_t j = 0;
  for (; j + kLoraRanks <= rank; j += kLoraRanks) dot<T, ROWS, kLoraRanks>(wide, down + j * a.k, a.k, a.r, a.scales[slot], inner + j);
  for (; j < rank; j++) dot<T, ROWS, 1>(wide, down + j * a.k, a.k, a.r, a.scales[slot], inner + j);
  T* out = static_cast<T*>(a.out) + row0 * a.out_stride;
  constexpr int64_t step = kLoraVectors * kLanes;
  int64_t c = 0;
  for (; c + step <= a.n; c += step) spread<T, ROWS, kLoraVectors>(inner, a.r, rank, up + c, a.n, out + c, a.out_stride, step);
  for (; c < a.n; c += kLanes) spread<T, ROWS, 1>(inner, a.r, rank, up + c, a.n, out + c, a.out_stride, least(kLanes, a.n - c));
}

template <class T, int ROWS = kLoraRows>
void add_rows(int64_t rows, const LoraArgs& a, int64_t row0, int64_t slot, float* wide, float* inner) {
  if (rows == ROWS) add_run<T, ROWS>(a, row0, slot, wide, inner);
  else if constexpr (ROWS > 1) add_rows<T, ROWS - 1>(rows, a, row0, slot, wide, inner);
}

template <class T>
void add_typed(const LoraArgs& a, int64_t begin, int64_t end, char* scratch) {
  float* wide = reinterpret_cast<float*>(scratch);
  float* inner = wide + kLoraRows * padded(a.k);
  for (int64_t row = begin; row < end;) {
    const int32_t slot = a.adapters[row];
    int64_t rows = 1;
    while (rows < kLoraRows && row + rows < end && a.adapters[row + rows] == slot) rows++;
    if (slot >= 0 && a.ranks[slot] > 0) add_rows<T>(rows, a, row, slot, wide, inner);
    row += rows;
  }
}

}  // namespace

int64_t lora_scratch(const LoraArgs& a) { return kLoraRows * (padded(a.k) + a.r) * static_cast<int64_t>(sizeof(float)); }

void add_lora(const LoraArgs& a, int64_t begin, int64_t end, char* scratch) {
  switch (a.dtype) {
    case DType::f32: return add_typed<float>(a, begin, end, scratch);
    case DType::bf16: return add_typed<bf16>(a, begin, end, scratch);
    case DType::f16: return add_typed<f16>(a, begin, end, scratch);
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
