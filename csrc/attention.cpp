// Attention of a tile of queries (all heads of one group) over pages of keys and values.
// Keys come in blocks of 64 absolute positions, blocks make splits of 512, each split keeps its own online softmax, and
// splits merge in ascending order.  A row's arithmetic is that sequence for its own position: which other rows share
// its tile, and whether splits were computed by one thread or several, changes nothing.  Keys a row must not see weigh
// exactly zero, and blocks without any key for the tile are left out.
#include "table.h"
#include "tile.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr float kNever = -__builtin_inff();

int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The format in which T's scores are computed: pairs where the processor multiplies them, else float32.
template <class T>
struct ScoreFormat {
  using Format = Plain<float>;
};
#if defined(__AVX512BF16__)
template <>
struct ScoreFormat<bf16> {
  using Format = Pairs;
};
#endif

// The softmax so far of each row: largest score, sum of exponentials, weighted sum of values.
struct State {
  float* top;   // [rows]
  float* mass;  // [rows]
  float* sums;  // [rows][padded dim]
};

State state_at(float* memory, int64_t rows, int64_t width) {
  (void)width;
  return {memory, memory + rows, memory + 2 * rows};
}
int64_t state_floats(int64_t rows, int64_t width) { return rows * (2 + width); }

void clear(const State& state, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++) state.top[r] = kNever, state.mass[r] = 0.0f;
  std::memset(state.sums, 0, rows * width * sizeof(float));
}

float exp_of(float x) {
  float lanes[kLanes];
  store(lanes, exp(fset(x)));
  return lanes[0];
}

// Folds a later split's state into `into`.
void merge(const State& into, const State& from, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++) {
    if (from.top[r] == kNever) continue;
    float* sums = into.sums + r * width;
    const float* more = from.sums + r * width;
    if (into.top[r] == kNever) {
      into.top[r] = from.top[r], into.mass[r] = from.mass[r];
      std::memcpy(sums, more, width * sizeof(float));
      continue;
    }
    const float top = most(into.top[r], from.top[r]);
    const float old_share = exp_of(into.top[r] - top), share = exp_of(from.top[r] - top);
    into.top[r] = top;
    into.mass[r] = into.mass[r] * old_share + from.mass[r] * share;
    for (int64_t i = 0; i < width; i += kLanes) {
      store(sums + i, fma(load(sums + i), fset(old_share), load(more + i) * fset(share)));
    }
  }
}

// Sixteen rows of sixteen words, `stride` bytes apart, become sixteen columns.
#if defined(__AVX512F__)
TOKSERVE_INLINE __m512i quarter(const char* row, int64_t stride) {  // four words of rows 0, 4, 8 and 12
  const auto four = [&](int64_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i * stride)); };
  __m512i words = _mm512_castsi128_si512(four(0));
  words = _mm512_inserti32x4(words, four(4), 1);
  words = _mm512_inserti32x4(words, four(8), 2);
  return _mm512_inserti32x4(words, four(12), 3);
}

TOKSERVE_INLINE void transpose(const char* rows, int64_t stride, I* columns) {
  for (int j = 0; j < 16; j += 4, rows += 16) {
    const __m512i a = quarter(rows, stride), b = quarter(rows + stride, stride);
    const __m512i c = quarter(rows + 2 * stride, stride), d = quarter(rows + 3 * stride, stride);
    const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
    const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
    columns[j].v = _mm512_unpacklo_epi64(ab_low, cd_low);
    columns[j + 1].v = _mm512_unpackhi_epi64(ab_low, cd_low);
    columns[j + 2].v = _mm512_unpacklo_epi64(ab_high, cd_high);
    columns[j + 3].v = _mm512_unpackhi_epi64(ab_high, cd_high);
  }
}
#else
TOKSERVE_INLINE void transpose(const char* rows, int64_t stride, I* columns) {
  for (int j = 0; j < kLanes; j++) {
    uint32_t column[kLanes];
    for (int i = 0; i < kLanes; i++) std::memcpy(column + i, rows + i * stride + 4 * j, 4);
    columns[j] = iload(column);
  }
}
#endif

// Up to sixteen words of a key from word `at` on: floats, or pairs of bfloat16.  What lies past `dim` is zero.
template <class Format, class T>
TOKSERVE_INLINE I key_words(const T* key, int64_t at, int64_t dim) {
  if constexpr (Format::kDepth == 2) {
    if (2 * (at + kLanes) <= dim) return iload(reinterpret_cast<const uint32_t*>(key + 2 * at));
    uint32_t words[kLanes] = {};
    std::memcpy(words, key + 2 * at, (dim - 2 * at) * sizeof(T));
    return iload(words);
  } else {
    return as_int(load_part(key + at, dim - at));
  }
}

// Where the rows of a block of keys or values are: sixteen positions at a time lie one after another.
template <class T>
struct Runs {
  const T* at[kKeyBlock / kLanes];
};

// Pages lie anywhere, so the processor does not see what comes next: whoever works on row i of one array asks for row i
// of the array that follows.
template <class T>
TOKSERVE_INLINE void fetch(const T* row, int64_t at, int64_t elements) {
  const char* line = reinterpret_cast<const char*>(row + at);
  for (int64_t i = 0; i < elements * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(line + i, 0, 2);
}

// A block's keys (rows of dim elements) as a panel: [steps][64] words.  Only runs that touch [begin, end).
// Fetches the same rows of `next`.
template <class Format, class T>
void make_panel(const Runs<T>& keys, int64_t begin, int64_t end, int64_t dim, uint32_t* panel, const Runs<T>& next) {
  const int64_t steps = (dim + Format::kDepth - 1) / Format::kDepth;
  for (int64_t run = begin / kLanes; run * kLanes < end; run++) {
    const T* keys_of_run = keys.at[run];
    for (int64_t at = 0; at < steps; at += kLanes) {
      for (int i = 0; i < kLanes; i++) fetch(next.at[run] + i * dim, at * Format::kDepth, kLanes * Format::kDepth);
      I words[kLanes];
      if (Format::kDepth * sizeof(T) == 4 && Format::kDepth * (at + kLanes) <= dim) {  // as they lie
        transpose(reinterpret_cast<const char*>(keys_of_run + at * Format::kDepth), dim * sizeof(T), words);
      } else {
        uint32_t rows[kLanes][kLanes];
        for (int i = 0; i < kLanes; i++) istore(rows[i], key_words<Format>(keys_of_run + i * dim, at, dim));
        transpose(reinterpret_cast<const char*>(rows), sizeof rows[0], words);
      }
      const int64_t count = least(kLanes, steps - at);
      for (int64_t i = 0; i < count; i++) istore(panel + (at + i) * kPanel + run * kLanes, words[i]);
    }
  }
}

// sums [ROWS][width] += weights [ROWS][64] times values, for VECTORS vectors of the head from `column` on.  Fetches the
// same columns of `next`, if there is one.
template <class T, int ROWS, int VECTORS>
TOKSERVE_INLINE void add_values(const float* weights, const Runs<T>& values, int64_t begin, int64_t end, int64_t dim,
                                int64_t column, float* sums, int64_t width, const Runs<T>* next) {
  F sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) sum[r][v] = load(sums + r * width + column + v * kLanes);
  }
  const int64_t part = least(kLanes, dim - column);
  for (int64_t run = begin / kLanes; run * kLanes < end; run++) {
    const int64_t stop = least(end, (run + 1) * kLanes);
    for (int64_t key = most(begin, run * kLanes); key < stop; key++) {
      const int64_t row = key % kLanes * dim + column;
      const T* value = values.at[run] + row;
      if (next) fetch(next->at[run], row, VECTORS * kLanes);
      F loaded[VECTORS];
      for (int v = 0; v < VECTORS; v++) loaded[v] = VECTORS == 1 ? load_part(value, part) : load(value + v * kLanes);
      for (int r = 0; r < ROWS; r++) {
        const F weight = fset(weights[r * kKeyBlock + key]);
        for (int v = 0; v < VECTORS; v++) sum[r][v] = fma(weight, loaded[v], sum[r][v]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) store(sums + r * width + column + v * kLanes, sum[r][v]);
  }
}

template <class T, int ROWS = kTileRows>
void add_values_up_to(int64_t rows, const float* weights, const Runs<T>& values, int64_t begin, int64_t end, int64_t dim,
                      float* sums, int64_t width, const Runs<T>* next) {
  if (rows != ROWS) {
    if constexpr (ROWS > 1) add_values_up_to<T, ROWS - 1>(rows, weights, values, begin, end, dim, sums, width, next);
    return;
  }
  int64_t column = 0;
  for (; column + kTileVectors * kLanes <= dim; column += kTileVectors * kLanes) {
    add_values<T, ROWS, kTileVectors>(weights, values, begin, end, dim, column, sums, width, next);
  }
  if constexpr (kTileVectors > 2) {  // several chains at once for what is left, too
    for (; column + 2 * kLanes <= dim; column += 2 * kLanes) {
      add_values<T, ROWS, 2>(weights, values, begin, end, dim, column, sums, width, next);
    }
  }
  for (; column < dim; column += kLanes) {
    add_values<T, ROWS, 1>(weights, values, begin, end, dim, column, sums, width, next);
  }
}

template <class T>
struct Tile {
  using Format = typename ScoreFormat<T>::Format;

  const AttentionArgs& a;
  const AttentionTile& tile;
  const int64_t group = a.heads / a.kv_heads;
  const int64_t rows = tile.queries * group;  // query * group + head of the group
  const int64_t steps = (a.dim + Format::kDepth - 1) / Format::kDepth;
  const int64_t row_length = steps * Format::kDepth;  // elements of a query row in scratch
  const int64_t width = rounded_up(a.dim, kLanes);
  const int64_t last = tile.position + tile.queries - 1;
  const int64_t first_key = a.window > 0 ? most<int64_t>(0, tile.position - a.window + 1) : 0;

  typename Format::Row* queries;  // [rows][row_length]
  uint32_t* panel;                // [steps][64]
  float* scores;                  // [rows][64]
  float* states;                  // two states
  T* gathered;                    // [2][64][dim]: a block's keys and values, where no run of a page holds sixteen

  Tile(const AttentionArgs& args, const AttentionTile& which, char* scratch) : a(args), tile(which) {
    panel = reinterpret_cast<uint32_t*>(scratch);
    scores = reinterpret_cast<float*>(panel + steps * kPanel);
    states = scores + rows * kKeyBlock;
    gathered = reinterpret_cast<T*>(states + 2 * state_floats(rows, width));
    queries = reinterpret_cast<typename Format::Row*>(gathered + (in_place() ? 0 : 2 * kKeyBlock * a.dim));
  }

  void read_queries() {
    for (int64_t r = 0; r < rows; r++) {
      const T* from = static_cast<const T*>(a.q) + (tile.token + r / group) * a.q_stride +
                      (tile.kv_head * group + r % group) * a.dim;
      typename Format::Row* to = queries + r * row_length;
      if constexpr (Format::kDepth == 2) {
        std::memcpy(to, from, a.dim * sizeof(T));
        if (row_length > a.dim) to[a.dim].bits = 0;
      } else {
        for (int64_t i = 0; i < a.dim; i += kLanes) store_part(to + i, load_part(from + i, a.dim - i), a.dim - i);
      }
    }
  }

  bool in_place() const { return a.page % kLanes == 0; }

  const T* row_at(const void* cache, int64_t position) const {
    const int64_t page = tile.pages[position / a.page];
    return static_cast<const T*>(cache) + ((page * a.kv_heads + tile.kv_head) * a.page + position % a.page) * a.dim;
  }

  // The runs that touch [begin, end) of the block; the others point to one that may be read.  Unless they are in place,
  // rows [begin, end) are copied to `copies` and the rest there means nothing.
  Runs<T> find(const void* cache, int64_t base, int64_t begin, int64_t end, T* copies) const {
    Runs<T> runs;
    const int64_t first = begin / kLanes;
    for (int64_t i = begin; i < end && !in_place(); i++) {
      std::memcpy(copies + i * a.dim, row_at(cache, base + i), a.dim * sizeof(T));
    }
    for (int64_t run = first; run * kLanes < end; run++) {
      runs.at[run] = in_place() ? row_at(cache, base + run * kLanes) : copies + run * kLanes * a.dim;
    }
    for (int64_t run = 0; run < first; run++) runs.at[run] = runs.at[first];
    for (int64_t run = (end + kLanes - 1) / kLanes; run < kKeyBlock / kLanes; run++) runs.at[run] = runs.at[first];
    return runs;
  }

  // Scores of row r for the block become weights; its state moves to the new top.
  void weigh(int64_t r, int64_t base, const State& state) {
    const int64_t position = tile.position + r / group;
    const float from = static_cast<float>(a.window > 0 ? most<int64_t>(0, position - a.window + 1 - base) : 0);
    const float to = static_cast<float>(least<int64_t>(kKeyBlock, position + 1 - base));  // columns [from, to) are seen
    float* row = scores + r * kKeyBlock;
    F score[kPanelVectors];
    F highest = fset(kNever);
    for (int v = 0; v < kPanelVectors; v++) {
      const F column = from_int(iota() + iset(v * kLanes));
      const F scaled = load(row + v * kLanes) * fset(a.scale);
      score[v] = select(column < fset(to), select(column < fset(from), fset(kNever), scaled), fset(kNever));
      highest = vmax(highest, score[v]);
    }
    const float block_top = largest(highest);
    if (block_top == kNever) return std::memset(row, 0, kKeyBlock * sizeof(float)), void();
    const float top = most(state.top[r], block_top), kept = exp_of(state.top[r] - top);
    F part[kPanelVectors];
    for (int v = 0; v < kPanelVectors; v++) {
      part[v] = exp(score[v] - fset(top));
      store(row + v * kLanes, part[v]);
    }
    state.top[r] = top;
    state.mass[r] = state.mass[r] * kept + sum((part[0] + part[1]) + (part[2] + part[3]));
    if (kept == 1.0f) return;
    float* sums = state.sums + r * width;
    for (int64_t i = 0; i < width; i += kLanes) store(sums + i, load(sums + i) * fset(kept));
  }

  void attend_block(int64_t base, const State& state) {
    const int64_t begin = most<int64_t>(0, first_key - base), end = least(kKeyBlock, last + 1 - base);
    if (begin >= end) return;
    const Runs<T> keys = find(a.k_cache, base, begin, end, gathered);
    const Runs<T> values = find(a.v_cache, base, begin, end, gathered + kKeyBlock * a.dim);
    make_panel<Format>(keys, begin, end, a.dim, panel, values);
    const auto* weights = reinterpret_cast<const typename Format::Weight*>(panel);
    for (int64_t r = 0; r < rows; r += kTileRows) {
      multiply_up_to<Format, 0>(least<int64_t>(kTileRows, rows - r), queries + r * row_length, row_length, weights, steps,
                                scores + r * kKeyBlock, true, nullptr);
    }
    for (int64_t r = 0; r < rows; r++) weigh(r, base, state);
    const int64_t after = least(kKeyBlock, last + 1 - (base + kKeyBlock));
    const bool more = after > 0 && in_place();
    const Runs<T> next = more ? find(a.k_cache, base + kKeyBlock, 0, after, nullptr) : keys;
    for (int64_t r = 0; r < rows; r += kTileRows) {
      add_values_up_to<T>(least<int64_t>(kTileRows, rows - r), scores + r * kKeyBlock, values, begin, end, a.dim,
                          state.sums + r * width, width, r == 0 && more ? &next : nullptr);
    }
  }

  void attend_split(int64_t split, const State& state) {
    clear(state, rows, width);
    for (int64_t base = split * kSplit; base < (split + 1) * kSplit && base <= last; base += kKeyBlock) {
      attend_block(base, state);
    }
  }

  void write_out(const State& state) {
    for (int64_t r = 0; r < rows; r++) {
      T* out = static_cast<T*>(a.out) + ((tile.token + r / group) * a.heads + tile.kv_head * group + r % group) * a.dim;
      const F mass = fset(state.mass[r]);
      for (int64_t i = 0; i < a.dim; i += kLanes) store_part(out + i, load(state.sums + r * width + i) / mass, a.dim - i);
    }
  }
};

template <class T>
void attend_typed(const AttentionArgs& a, const AttentionTile& which, char* scratch) {
  Tile<T> tile(a, which, scratch);
  const State all = state_at(tile.states, tile.rows, tile.width);
  const State next = state_at(tile.states + state_floats(tile.rows, tile.width), tile.rows, tile.width);
  tile.read_queries();
  tile.attend_split(which.split_begin, all);
  for (int64_t split = which.split_begin + 1; split < which.split_end; split++) {
    tile.attend_split(split, next);
    merge(all, next, tile.rows, tile.width);
  }
  tile.write_out(all);
}

template <class T>
void attend_split_typed(const AttentionArgs& a, const AttentionTile& which, int64_t split, float* partial, char* scratch) {
  Tile<T> tile(a, which, scratch);
  tile.read_queries();
  tile.attend_split(split, state_at(partial, tile.rows, tile.width));
}

template <class T>
void merge_splits_typed(const AttentionArgs& a, const AttentionTile& which, float* partials) {
  alignas(64) char none[1];
  Tile<T> tile(a, which, none);
  const State all = state_at(partials, tile.rows, tile.width);
  for (int64_t i = 1; i < which.split_end - which.split_begin; i++) {
    merge(all, state_at(partials + i * state_floats(tile.rows, tile.width), tile.rows, tile.width), tile.rows, tile.width);
  }
  tile.write_out(all);
}

}  // namespace

int64_t attention_scratch(const AttentionArgs& a) {
  const int64_t rows = most(kQueryRows, a.heads / a.kv_heads), width = rounded_up(a.dim, kLanes);
  const int64_t gathered = a.page % kLanes == 0 ? 0 : 2 * kKeyBlock * a.dim;  // in float32, the widest type
  const int64_t floats = a.dim * kPanel + rows * kKeyBlock + 2 * state_floats(rows, width) + gathered + rows * (a.dim + 1);
  return floats * static_cast<int64_t>(sizeof(float));
}

int64_t attention_partial(const AttentionArgs& a, int64_t queries) {
  return state_floats(queries * (a.heads / a.kv_heads), rounded_up(a.dim, kLanes));
}

void attend(const AttentionArgs& a, const AttentionTile& tile, char* scratch) {
  switch (a.dtype) {
    case DType::f32: return attend_typed<float>(a, tile, scratch);
    case DType::bf16: return attend_typed<bf16>(a, tile, scratch);
    case DType::f16: return attend_typed<f16>(a, tile, scratch);
  }
}

void attend_split(const AttentionArgs& a, const AttentionTile& tile, int64_t split, float* partial, char* scratch) {
  switch (a.dtype) {
    case DType::f32: return attend_split_typed<float>(a, tile, split, partial, scratch);
    case DType::bf16: return attend_split_typed<bf16>(a, tile, split, partial, scratch);
    case DType::f16: return attend_split_typed<f16>(a, tile, split, partial, scratch);
  }
}

void merge_splits(const AttentionArgs& a, const AttentionTile& tile, float* partials) {
  switch (a.dtype) {
    case DType::f32: return merge_splits_typed<float>(a, tile, partials);
    case DType::bf16: return merge_splits_typed<bf16>(a, tile, partials);
    case DType::f16: return merge_splits_typed<f16>(a, tile, partials);
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
