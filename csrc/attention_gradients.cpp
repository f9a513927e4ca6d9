// Gradients of causal attention of some queries of one KV head: from that of the result to those of q, k and v.
// Queries go in tiles of 64 rows (query * group + head of the group), a row to a lane, with keys as the rows of all
// products: softmax and its gradient are then sums from key to key in each lane.  A row's weights over all keys stay in
// scratch memory, so that each product is computed once.
//   weights = softmax(scale K Q^T)   slopes = weights (V G^T - delta),  delta the sum of weights V G^T over keys
//   grad_v += weights G              grad_k += scale slopes Q           grad_q = scale slopes^T K
// Sums go over keys, or rows, in ascending order, and every tile begins at a multiple of 64 rows of its task: the bits
// of a task depend on the task alone.
#include "activation.h"
#include "table.h"
#include "tile.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr int64_t kTileLanes = kPanel;  // rows of a tile
constexpr int64_t kVectors = kTileLanes / kLanes;

// How products are computed: in float32, or in pairs of bfloat16 where a processor has instructions for them.
template <class T>
struct GradientFormat {
  using Format = Plain<float>;
};
#if defined(__AVX512BF16__)
template <>
struct GradientFormat<bf16> {
  using Format = Pairs;
};
#endif

TOKSERVE_INLINE void put(float* to, f32x16 x) { store(to, x); }
// Sixteen columns of as many rows as a step has: the layout of one step of a panel.
TOKSERVE_INLINE void put_step(float* to, const f32x16* rows) { store(to, rows[0]); }
#if defined(__AVX512BF16__)
TOKSERVE_INLINE void put(bf16* to, f32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
}
TOKSERVE_INLINE void put_step(bf16* to, const f32x16* rows) {
  const __m512i low = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(rows[0].v)));
  const __m512i high = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(rows[1].v)));
  _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
#endif

// One row of n elements as a product takes it, followed by zeros up to `padded`.
template <class T>
TOKSERVE_INLINE void convert_row(const T* from, float* to, int64_t n, int64_t padded) {
  for (int64_t i = 0; i < n; i += kLanes) store_partial(to + i, load_partial(from + i, n - i), n - i);
  for (int64_t i = n; i < padded; i++) to[i] = 0.0f;
}
[[maybe_unused]] TOKSERVE_INLINE void convert_row(const bf16* from, bf16* to, int64_t n, int64_t padded) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) std::memcpy(to + i, from + i, kLanes * sizeof(bf16));  // without a call
  for (; i < padded; i++) to[i] = i < n ? from[i] : bf16{};
}

// sums [rows][64] (+)= x [rows][steps * depth] times a panel.
template <class Format>
void multiply(int64_t rows, const typename Format::Row* x, int64_t stride, const typename Format::Weight* panel,
              int64_t steps, float* sums, bool begin) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
    const int64_t count = (rows - row) / (tiles - tile);
    multiply_up_to<Format, 0>(count, x + row * stride, stride, panel, steps, sums + row * kPanel, begin, nullptr);
    row += count;
  }
}

// Divides memory into pieces that begin at cache lines; without memory it counts the bytes.
struct Scratch {
  char* memory;
  int64_t used = 0;
  template <class E>
  E* take(int64_t count) {
    E* piece = memory ? reinterpret_cast<E*>(memory + used) : nullptr;
    used += round_up(count * static_cast<int64_t>(sizeof(E)), 64);
    return piece;
  }
};

template <class T>
struct Task {
  using Format = typename GradientFormat<T>::Format;
  using E = typename Format::Row;
  static constexpr int64_t kDepth = Format::kDepth;

  const AttentionGradientsArgs& a;
  const AttentionGradientsTask& task;
  const int64_t group = a.heads / a.kv_heads;
  const int64_t rows = task.queries * group;
  const int64_t keys = task.position + task.queries - task.first_key;
  const int64_t padded_keys = round_up(keys, kDepth), depth = round_up(a.dim, kDepth);
  const int64_t panels = (a.dim + kPanel - 1) / kPanel;

  E *key_rows, *value_rows;     // [padded_keys][depth]
  E* key_columns;               // [dim][padded_keys]
  E *q, *grad;                  // [64][depth]: of a tile
  E *q_lanes, *grad_lanes;      // [depth] as a panel of the tile's rows
  E *q_panels, *grad_panels;    // [panels][64 rows] as panels of the head's elements
  float *weights, *slopes;      // [padded_keys][64]
  float* bends;                 // likewise: derivatives of capped scores
  float* sum_q;                 // [dim][64]
  E *weight_rows, *slope_rows;  // [64 keys][64]: of a block
  E* slope_lanes;               // [64 keys] as a panel
  int64_t scratch_bytes;

  Task(const AttentionGradientsArgs& args, const AttentionGradientsTask& which, char* scratch) : a(args), task(which) {
    Scratch memory{scratch};
    key_rows = memory.take<E>(padded_keys * depth), value_rows = memory.take<E>(padded_keys * depth);
    key_columns = memory.take<E>(a.dim * padded_keys);
    q = memory.take<E>(kTileLanes * depth), grad = memory.take<E>(kTileLanes * depth);
    q_lanes = memory.take<E>(kTileLanes * depth), grad_lanes = memory.take<E>(kTileLanes * depth);
    q_panels = memory.take<E>(panels * kTileLanes * kPanel), grad_panels = memory.take<E>(panels * kTileLanes * kPanel);
    weights = memory.take<float>(padded_keys * kTileLanes), slopes = memory.take<float>(padded_keys * kTileLanes);
    bends = memory.take<float>(a.softcap > 0.0f ? padded_keys * kTileLanes : 0);
    sum_q = memory.take<float>(a.dim * kTileLanes);
    weight_rows = memory.take<E>(kKeyBlock * kTileLanes), slope_rows = memory.take<E>(kKeyBlock * kTileLanes);
    slope_lanes = memory.take<E>(kKeyBlock * kTileLanes);
    scratch_bytes = memory.used;
  }

  void load_keys() const {
    std::memset(key_columns, 0, a.dim * padded_keys * sizeof(E));
    for (int64_t i = 0; i < padded_keys; i++) {
      E *key = key_rows + i * depth, *value = value_rows + i * depth;
      if (i >= keys) {
        std::memset(key, 0, depth * sizeof(E)), std::memset(value, 0, depth * sizeof(E));
        continue;
      }
      const int64_t token = task.path[task.first_key + i], head = task.kv_head * a.dim;
      convert_row(static_cast<const T*>(a.k) + token * a.k_stride + head, key, a.dim, depth);
      convert_row(static_cast<const T*>(a.v) + token * a.v_stride + head, value, a.dim, depth);
      for (int64_t d = 0; d < a.dim; d++) key_columns[d * padded_keys + i] = key[d];
    }
  }

  int64_t position_of(int64_t row) const { return task.position + row / group; }
  // The row of a tensor [T, heads * dim] at a token, and the head of it, that a row of the task stands for.
  int64_t offset_of(int64_t row, int64_t stride) const {
    return (task.token + row / group) * stride + (task.kv_head * group + row % group) * a.dim;
  }

  // Rows of a tile in both layouts.  Those from `count` on are zero.
  void load_rows(const void* from, int64_t stride, int64_t first, int64_t count, E* to, E* lanes, E* by_element) const {
    for (int64_t r = 0; r < kTileLanes; r++) {
      E* row = to + r * depth;
      if (r < count) convert_row(static_cast<const T*>(from) + offset_of(first + r, stride), row, a.dim, depth);
      else std::memset(row, 0, depth * sizeof(E));
      for (int64_t step = 0; step < depth / kDepth; step++)
        std::memcpy(lanes + (step * kTileLanes + r) * kDepth, row + step * kDepth, kDepth * sizeof(E));
    }
    for (int64_t panel = 0; panel < panels; panel++) {
      E* step = by_element + panel * kTileLanes * kPanel;
      for (int64_t r = 0; r < kTileLanes; r += kDepth) {
        for (int64_t i = panel * kPanel; i < (panel + 1) * kPanel; i += kLanes, step += kLanes * kDepth) {
          f32x16 pair[kDepth];
          for (int64_t k = 0; k < kDepth; k++)
            pair[k] = i < a.dim ? load_partial(to + (r + k) * depth + i, a.dim - i) : zeros();
          put_step(step, pair);
        }
      }
    }
  }

  struct Tile {
    int64_t first, count;  // rows
    int64_t begin, end;    // keys that some row sees, in whole steps
    alignas(64) float positions[kTileLanes];
  };

  Tile tile_at(int64_t first) const {
    Tile tile{first, min(kTileLanes, rows - first), 0, 0, {}};
    const int64_t low = position_of(first), high = position_of(first + tile.count - 1);
    if (a.window > 0) tile.begin = max<int64_t>(0, low - a.window + 1 - task.first_key) / kDepth * kDepth;
    tile.end = round_up(high + 1 - task.first_key, kDepth);
    for (int64_t r = 0; r < kTileLanes; r++)
      tile.positions[r] = static_cast<float>(position_of(first + min(r, tile.count - 1)));
    return tile;
  }

  // Whether all rows of the tile see the key.
  bool seen_by_all(const Tile& tile, int64_t key) const {
    const float position = static_cast<float>(task.first_key + key);
    return position <= tile.positions[0] &&
           (a.window == 0 || position > tile.positions[kTileLanes - 1] - static_cast<float>(a.window));
  }

  // Scores become weights, still to be multiplied by `inverse`, one over their sum; `delta` is the sum of the weights
  // times their gradients, which `slopes` holds.
  void softmax(const Tile& tile, f32x16* inverse, f32x16* delta) const {
    f32x16 largest[kVectors], sum[kVectors];
    for (int v = 0; v < kVectors; v++) largest[v] = broadcast(kNegInf), sum[v] = delta[v] = zeros();
    for (int64_t j = tile.begin; j < tile.end; j++) {
      const bool all = seen_by_all(tile, j);
      const f32x16 key = broadcast(static_cast<float>(task.first_key + j));
      for (int v = 0; v < kVectors; v++) {
        float* at = weights + j * kTileLanes + v * kLanes;
        f32x16 score = load(at) * broadcast(a.scale);
        if (a.softcap > 0.0f) {
          const f32x16 bent = tanh(score / broadcast(a.softcap));
          store(bends + j * kTileLanes + v * kLanes, broadcast(1.0f) - bent * bent);
          score = bent * broadcast(a.softcap);
        }
        if (!all) {
          const f32x16 position = load(tile.positions + v * kLanes);
          score = select(position < key, broadcast(kNegInf), score);
          if (a.window > 0)
            score = select(position - broadcast(static_cast<float>(a.window)) < key, score, broadcast(kNegInf));
        }
        store(at, score);
        largest[v] = vmax(largest[v], score);
      }
    }
    for (int64_t j = tile.begin; j < tile.end; j++) {
      for (int v = 0; v < kVectors; v++) {
        float* at = weights + j * kTileLanes + v * kLanes;
        const f32x16 weight = exp(load(at) - largest[v]);
        store(at, weight);
        sum[v] = sum[v] + weight;
        delta[v] = fma(weight, load(slopes + j * kTileLanes + v * kLanes), delta[v]);
      }
    }
    for (int v = 0; v < kVectors; v++) {
      inverse[v] = broadcast(1.0f) / sum[v];
      delta[v] = delta[v] * inverse[v];
    }
  }

  // Weights and slopes of keys [begin, begin + count) as the products take them.
  void round_block(int64_t begin, int64_t count, const f32x16* inverse, const f32x16* delta) const {
    for (int64_t j = 0; j < count; j += kDepth) {
      for (int v = 0; v < kVectors; v++) {
        f32x16 slope[kDepth];
        for (int64_t k = 0; k < kDepth; k++) {
          const int64_t from = (begin + j + k) * kTileLanes + v * kLanes, to = (j + k) * kTileLanes + v * kLanes;
          const f32x16 weight = load(weights + from) * inverse[v];
          slope[k] = weight * (load(slopes + from) - delta[v]);
          if (a.softcap > 0.0f) slope[k] = slope[k] * load(bends + from);
          put(weight_rows + to, weight), put(slope_rows + to, slope[k]);
        }
        put_step(slope_lanes + (j * kTileLanes + v * kLanes * kDepth), slope);
      }
    }
  }

  // `partial`: [2][panels][keys][64], the sums of grad_k / scale, then of grad_v.
  void add_tile(const Tile& tile, float* partial) const {
    const int64_t steps = depth / kDepth, row_steps = (tile.count + kDepth - 1) / kDepth;
    load_rows(a.q, a.q_stride, tile.first, tile.count, q, q_lanes, q_panels);
    load_rows(a.grad, a.grad_stride, tile.first, tile.count, grad, grad_lanes, grad_panels);
    const int64_t seen = tile.end - tile.begin, from = tile.begin * kTileLanes;
    multiply<Format>(seen, key_rows + tile.begin * depth, depth, q_lanes, steps, weights + from, true);
    multiply<Format>(seen, value_rows + tile.begin * depth, depth, grad_lanes, steps, slopes + from, true);
    f32x16 inverse[kVectors], delta[kVectors];
    softmax(tile, inverse, delta);
    for (int64_t begin = tile.begin; begin < tile.end; begin += kKeyBlock) {
      const int64_t count = min(kKeyBlock, tile.end - begin), real = min(count, keys - begin);
      round_block(begin, count, inverse, delta);
      for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t at = panel * kTileLanes * kPanel;
        float *to_k = partial + (panel * keys + begin) * kPanel, *to_v = to_k + panels * keys * kPanel;
        multiply<Format>(real, slope_rows, kTileLanes, q_panels + at, row_steps, to_k, false);
        multiply<Format>(real, weight_rows, kTileLanes, grad_panels + at, row_steps, to_v, false);
      }
      multiply<Format>(a.dim, key_columns + begin, padded_keys, slope_lanes, count / kDepth, sum_q,
                       begin == tile.begin);
    }
    for (int64_t r = 0; r < tile.count; r++) {
      float* to = a.grad_q + offset_of(tile.first + r, a.heads * a.dim);
      for (int64_t d = 0; d < a.dim; d++) to[d] = sum_q[d * kTileLanes + r] * a.scale;
    }
  }
};

}  // namespace

int64_t attention_gradients_scratch(const AttentionGradientsArgs& a, const AttentionGradientsTask& task) {
  int64_t bytes = 0;
  with_type(a.dtype, [&](auto x) { bytes = Task<decltype(x)>(a, task, nullptr).scratch_bytes; });
  return bytes;
}

int64_t attention_gradients_partial(const AttentionGradientsArgs& a, const AttentionGradientsTask& task) {
  const int64_t keys = task.position + task.queries - task.first_key;
  return 2 * keys * round_up(a.dim, kPanel);
}

void attention_gradients(const AttentionGradientsArgs& a, const AttentionGradientsTask& task, float* partial,
                         char* scratch) {
  std::memset(partial, 0, attention_gradients_partial(a, task) * sizeof(float));
  with_type(a.dtype, [&](auto x) {
    const Task<decltype(x)> whole(a, task, scratch);
    whole.load_keys();
    for (int64_t first = 0; first < whole.rows; first += kTileLanes) whole.add_tile(whole.tile_at(first), partial);
  });
}

void merge_attention_gradients(const AttentionGradientsArgs& a, const AttentionGradientsTask& task,
                               const float* partial, int64_t begin, int64_t end) {
  const int64_t keys = task.position + task.queries - task.first_key, panels = (a.dim + kPanel - 1) / kPanel;
  const int64_t* path = task.path + task.first_key;
  int64_t low = 0, high = keys;  // the first key whose token is not before `begin`
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (path[middle] < begin) low = middle + 1;
    else high = middle;
  }
  for (int64_t i = low; i < keys && path[i] < end; i++) {
    const int64_t to = (path[i] * a.kv_heads + task.kv_head) * a.dim;
    for (int64_t d = 0; d < a.dim; d += kLanes) {
      const int64_t from = (d / kPanel * keys + i) * kPanel + d % kPanel, left = a.dim - d;
      store_partial(a.grad_k + to + d,
                    fma(load(partial + from), broadcast(a.scale), load_partial(a.grad_k + to + d, left)), left);
      const f32x16 value = load(partial + panels * keys * kPanel + from);
      store_partial(a.grad_v + to + d, load_partial(a.grad_v + to + d, left) + value, left);
    }
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
