// Attention of a tile of queries (all heads of one group) over pages of keys and values.
// Keys come in blocks of 64 absolute positions, blocks make splits of 512, each split keeps its own online softmax, and
// splits merge in ascending order.  A row's arithmetic is that sequence for its own position: which other rows share
// its tile, and whether splits were computed by one thread or several, changes nothing.  Keys a row must not see weigh
// exactly zero, and blocks without any key for the tile are left out.
#include "pages.h"
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr float kNever = -__builtin_inff();

int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The softmax so far of each row: largest score, sum of exponentials, weighted sum of values.
struct State {
  float* top;   // [padded rows]
  float* mass;  // [padded rows]
  float* sums;  // [rows][padded dim]
};

State state_at(float* memory, int64_t rows) {
  const int64_t padded = rounded_up(rows, kLanes);
  return {memory, memory + padded, memory + 2 * padded};
}
int64_t state_floats(int64_t rows, int64_t width) { return 2 * rounded_up(rows, kLanes) + rows * width; }

void clear(const State& state, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rounded_up(rows, kLanes); r++) state.top[r] = kNever, state.mass[r] = 0.0f;
  std::memset(state.sums, 0, rows * width * sizeof(float));
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
    const float old_share = exp(into.top[r] - top), share = exp(from.top[r] - top);
    into.top[r] = top;
    into.mass[r] = into.mass[r] * old_share + from.mass[r] * share;
    for (int64_t i = 0; i < width; i += kLanes) {
      store(sums + i, fma(load(sums + i), fset(old_share), load(more + i) * fset(share)));
    }
  }
}

// Rounds sixteen weights to what the product takes; returns what it then counts them as.
[[maybe_unused]] TOKSERVE_INLINE F put_weights(float* to, F weights) {
  store(to, weights);
  return weights;
}
#if defined(__AVX512BF16__)
TOKSERVE_INLINE F put_weights(bf16* to, F weights) {
  const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weights.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
#endif

// Where the keys or values of a block are, sixteen positions at a time, as PageLayout says.
template <class T>
struct Runs {
  const T* at[kKeyBlock / kLanes];
  int64_t step;  // elements from one step of the product to the next
};

// scores [ROWS][64] = queries [ROWS][steps * depth] times the keys of VECTORS runs from `run` on.
// Pages lie anywhere, so the processor does not see what comes next: meanwhile the same runs of `next` are fetched, if
// there is one.
template <class Format, int ROWS, int VECTORS, class T>
TOKSERVE_INLINE void score(const typename Format::Row* queries, int64_t stride, const Runs<T>& keys, int run,
                           int64_t steps, float* scores, const Runs<T>* next) {
  F sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) sum[r][v] = fzero();
  }
  for (int64_t i = 0; i < steps; i++) {
    for (int v = 0; v < VECTORS; v++) {
      if (next) __builtin_prefetch(next->at[run + v] + i * kLanes * Format::kDepth, 0, 2);
    }
    for (int part = 0; part < Format::kParts; part++) {
      decltype(Format::load_weight(keys.at[0], part)) key[VECTORS];
      for (int v = 0; v < VECTORS; v++) key[v] = Format::load_weight(keys.at[run + v] + i * keys.step, part);
      for (int r = 0; r < ROWS; r++) {
        const auto* query = queries + r * stride + i * Format::kDepth;
        for (int v = 0; v < VECTORS; v++) sum[r][v] = Format::add(query, part, key[v], sum[r][v]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) store(scores + r * kKeyBlock + (run + v) * kLanes, sum[r][v]);
  }
}

// The same for 1 <= rows <= kTileRows and the runs that touch [begin, end), and perhaps more: several chains at once
// hide latency.
template <class Format, int ROWS = kTileRows, class T>
void score_up_to(int64_t rows, const typename Format::Row* queries, int64_t stride, const Runs<T>& keys, int64_t begin,
                 int64_t end, int64_t steps, float* scores, const Runs<T>* next) {
  if (rows != ROWS) {
    if constexpr (ROWS > 1) score_up_to<Format, ROWS - 1>(rows, queries, stride, keys, begin, end, steps, scores, next);
    return;
  }
  constexpr int vectors = ROWS == 1 ? kPanelVectors : kTileVectors;
  int run = static_cast<int>(begin / kLanes);
  const int stop = static_cast<int>((end + kLanes - 1) / kLanes);
  if constexpr (vectors == kPanelVectors) {
    if (stop - run > 2) return score<Format, ROWS, 4>(queries, stride, keys, 0, steps, scores, next);
    return score<Format, ROWS, 2>(queries, stride, keys, least(run, 2), steps, scores, next);
  }
  for (; run < stop; run++) score<Format, ROWS, 1>(queries, stride, keys, run, steps, scores, next);
}

// One part of the values of a step of positions for sixteen elements of the head, or for the first n of them and zeros.
template <class Format, bool WHOLE, class T>
TOKSERVE_INLINE auto load_values(const T* p, int part, int64_t n) {
  if (WHOLE || n >= kLanes) return Format::load_weight(p, part);
  T words[kLanes * Format::kDepth] = {};
  std::memcpy(words, p, n * Format::kDepth * sizeof(T));
  return Format::load_weight(words, part);
}

// Of a part of the values of positions [at, at + depth): those outside [begin, end) become zero.  They may hold
// anything, so a weight of zero would not hide them.
TOKSERVE_INLINE I visible(I pair, int, int64_t at, int64_t begin, int64_t end) {
  if (at < begin) pair = pair & iset(0xffff0000);
  if (at + 1 >= end) pair = pair & iset(0x0000ffff);
  return pair;
}
TOKSERVE_INLINE F visible(F values, int part, int64_t at, int64_t begin, int64_t end) {
  return at + part < begin || at + part >= end ? fzero() : values;
}

// sums [ROWS][width] += weights [ROWS][64] times values of positions [begin, end), for VECTORS vectors of the head from
// `column` on.  Fetches as many keys of `next`, if there is one.
template <class Format, int ROWS, int VECTORS, class T>
TOKSERVE_INLINE void add_values(const typename Format::Row* weights, const Runs<T>& values, int64_t begin, int64_t end,
                                int64_t dim, int64_t column, float* sums, int64_t width, const Runs<T>* next) {
  constexpr int64_t depth = Format::kDepth;
  F sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) sum[r][v] = load(sums + r * width + column + v * kLanes);
  }
  int64_t at = begin / depth * depth;
  for (int64_t run = begin / kLanes; run * kLanes < end; run++) {
    const int64_t stop = least(end, (run + 1) * kLanes);
    for (; at < stop; at += depth) {
      const int64_t row = at % kLanes / depth;
      const T* value = values.at[run] + row * values.step + column * depth;
      const bool edge = depth > 1 && (at < begin || at + depth > end);
      for (int v = 0; v < VECTORS; v++) {
        if (next) __builtin_prefetch(next->at[run] + ((row * dim + column) / kLanes + v) * next->step, 0, 2);
      }
      for (int part = 0; part < Format::kParts; part++) {
        decltype(Format::load_weight(value, part)) loaded[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
          loaded[v] = load_values<Format, (VECTORS > 1)>(value + v * kLanes * depth, part, dim - column);
          if (edge) loaded[v] = visible(loaded[v], part, at, begin, end);
        }
        for (int r = 0; r < ROWS; r++) {
          const auto* weight = weights + r * kKeyBlock + at;
          for (int v = 0; v < VECTORS; v++) sum[r][v] = Format::add(weight, part, loaded[v], sum[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) store(sums + r * width + column + v * kLanes, sum[r][v]);
  }
}

template <class Format, int ROWS = kTileRows, class T>
void add_values_up_to(int64_t rows, const typename Format::Row* weights, const Runs<T>& values, int64_t begin,
                      int64_t end, int64_t dim, float* sums, int64_t width, const Runs<T>* next) {
  if (rows != ROWS) {
    if constexpr (ROWS > 1)
      add_values_up_to<Format, ROWS - 1>(rows, weights, values, begin, end, dim, sums, width, next);
    return;
  }
  int64_t column = 0;
  for (; column + kTileVectors * kLanes <= dim; column += kTileVectors * kLanes) {
    add_values<Format, ROWS, kTileVectors>(weights, values, begin, end, dim, column, sums, width, next);
  }
  if constexpr (kTileVectors > 2) {  // several chains at once for what is left, too
    for (; column + 2 * kLanes <= dim; column += 2 * kLanes) {
      add_values<Format, ROWS, 2>(weights, values, begin, end, dim, column, sums, width, next);
    }
  }
  for (; column < dim; column += kLanes) {
    add_values<Format, ROWS, 1>(weights, values, begin, end, dim, column, sums, width, next);
  }
}

template <class T>
struct Tile {
  using Format = typename FormatOf<T>::Format;
  using Row = typename Format::Row;
  static constexpr int64_t kDepth = Format::kDepth;

  const AttentionArgs& a;
  const AttentionTile& tile;
  const PageLayout<T> layout{a.page, a.dim};
  const int64_t group = a.heads / a.kv_heads;
  const int64_t rows = tile.queries * group;  // query * group + head of the group
  const int64_t steps = (a.dim + kDepth - 1) / kDepth;
  const int64_t row_length = steps * kDepth;  // elements of a query row in scratch
  const int64_t width = rounded_up(a.dim, kLanes);
  const int64_t last = tile.position + tile.queries - 1;
  const int64_t first_key = first_seen(tile.position);

  float* scores;  // [rows][64]
  float* states;  // two states
  Row* queries;   // [rows][row_length]
  Row* weights;   // [rows][64]
  T* keys;        // [steps][64][depth], where pages are not arranged
  T* values;      // [64 / depth][dim][depth], likewise

  Tile(const AttentionArgs& args, const AttentionTile& which, char* scratch) : a(args), tile(which) {
    scores = reinterpret_cast<float*>(scratch);
    states = scores + rows * kKeyBlock;
    weights = reinterpret_cast<Row*>(states + 2 * state_floats(rows, width));
    queries = weights + rows * kKeyBlock;
    keys = reinterpret_cast<T*>(queries + rows * row_length);
    values = keys + row_length * kKeyBlock;
  }

  int64_t first_seen(int64_t position) const { return a.window > 0 ? most<int64_t>(0, position - a.window + 1) : 0; }
  int64_t position_of(int64_t row) const { return tile.position + row / group; }

  void read_queries() {
    for (int64_t r = 0; r < rows; r++) {
      const T* from = static_cast<const T*>(a.q) + (tile.token + r / group) * a.q_stride +
                      (tile.kv_head * group + r % group) * a.dim;
      Row* to = queries + r * row_length;
      if (row_length > a.dim) to[a.dim] = Row{};
      if constexpr (sizeof(Row) == sizeof(T)) {
        std::memcpy(to, from, a.dim * sizeof(T));
      } else {
        for (int64_t i = 0; i < a.dim; i += kLanes) store_part(to + i, load_part(from + i, a.dim - i), a.dim - i);
      }
    }
  }

  const T* head_at(const void* cache, int64_t position, int64_t head) const {
    const int64_t page = tile.pages[position / a.page];
    return static_cast<const T*>(cache) + (page * a.kv_heads + head) * a.page * a.dim;
  }

  // The runs of a block that touch [begin, end); the others point to one that may be read.
  void find(int64_t base, int64_t begin, int64_t end, int64_t head, Runs<T>& key_runs, Runs<T>& value_runs) const {
    const int64_t first = begin / kLanes;
    for (int64_t i = 0; i < kKeyBlock / kLanes; i++) {
      const int64_t run = i < first || i * kLanes >= end ? first : i, position = base + run * kLanes;
      key_runs.at[i] = head_at(a.k_cache, position, head) + layout.key_at(position % a.page);
      value_runs.at[i] = head_at(a.v_cache, position, head) + layout.value_at(position % a.page);
    }
    key_runs.step = a.page * kDepth, value_runs.step = a.dim * kDepth;
  }

  // Rows [begin, end) of the block from pages that are not arranged, as if they were one page that is.
  void gather(int64_t base, int64_t begin, int64_t end, Runs<T>& key_runs, Runs<T>& value_runs) const {
    const PageLayout<T> block{kKeyBlock, a.dim};
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = (base + i) % a.page * a.dim;
      block.arrange_key(keys, i, head_at(a.k_cache, base + i, tile.kv_head) + row);
      block.arrange_value(values, i, head_at(a.v_cache, base + i, tile.kv_head) + row);
    }
    for (int64_t run = 0; run < kKeyBlock / kLanes; run++) {
      key_runs.at[run] = keys + block.key_at(run * kLanes);
      value_runs.at[run] = values + block.value_at(run * kLanes);
    }
    key_runs.step = kKeyBlock * kDepth, value_runs.step = a.dim * kDepth;
  }

  // Columns of the block that a row at `position` sees.
  struct Seen {
    int64_t begin, end;
  };
  Seen seen(int64_t from, int64_t to, int64_t base) const {  // by any of the positions from..to
    return {most<int64_t>(0, first_seen(from) - base), least<int64_t>(kKeyBlock, to + 1 - base)};
  }

  // Scales the scores of row r for the block and hides those it does not see; returns the largest.
  float scale(int64_t r, int64_t base) {
    const Seen columns = seen(position_of(r), position_of(r), base);
    if (columns.begin >= columns.end) return kNever;
    const bool all = columns.begin == 0 && columns.end == kKeyBlock;
    const F from = fset(static_cast<float>(columns.begin)), to = fset(static_cast<float>(columns.end));
    float* row = scores + r * kKeyBlock;
    F highest = fset(kNever);
    for (int v = 0; v < kPanelVectors; v++) {
      F score = load(row + v * kLanes) * fset(a.scale);
      if (!all) {
        const F column = from_int(iota() + iset(v * kLanes));
        score = select(column < to, select(column < from, fset(kNever), score), fset(kNever));
      }
      store(row + v * kLanes, score);
      highest = vmax(highest, score);
    }
    return largest(highest);
  }

  // Scores of rows [first, first + count), at most sixteen, become weights; their states move to the new tops.
  void weigh(int64_t first, int64_t count, int64_t base, const State& state) {
    float tops[kLanes], kept[kLanes];
    for (int64_t i = 0; i < kLanes; i++) tops[i] = i < count ? scale(first + i, base) : kNever;
    const F old = load(state.top + first), block = load(tops);
    const F top = select(old < block, block, old);
    store(state.top + first, top);
    store(kept, exp(old - top));
    for (int64_t i = 0; i < count; i++) {
      const int64_t r = first + i;
      const float* row = scores + r * kKeyBlock;
      Row* weight = weights + r * kKeyBlock;
      if (tops[i] == kNever) {
        std::memset(weight, 0, kKeyBlock * sizeof(Row));
        continue;
      }
      F part[kPanelVectors];
      for (int v = 0; v < kPanelVectors; v++) {
        part[v] = put_weights(weight + v * kLanes, exp(load(row + v * kLanes) - fset(state.top[r])));
      }
      state.mass[r] = state.mass[r] * kept[i] + sum((part[0] + part[1]) + (part[2] + part[3]));
      if (kept[i] == 1.0f) continue;
      float* sums = state.sums + r * width;
      for (int64_t j = 0; j < width; j += kLanes) store(sums + j, load(sums + j) * fset(kept[i]));
    }
  }

  // Calls f(first row, number of rows, columns they see) for tiles of nearly equal height that see any.
  template <class Each>
  void over_tiles(int64_t base, Each&& f) const {
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t i = 0, r = 0; i < tiles; i++) {
      const int64_t count = (rows - r) / (tiles - i);
      const Seen columns = seen(position_of(r), position_of(r + count - 1), base);
      if (columns.begin < columns.end) f(r, count, columns);
      r += count;
    }
  }

  void attend_block(int64_t base, const State& state) {
    const Seen all = seen(tile.position, last, base);
    if (all.begin >= all.end) return;
    Runs<T> key_runs, value_runs, next_keys, next_values;
    if (layout.arranged()) find(base, all.begin, all.end, tile.kv_head, key_runs, value_runs);
    else gather(base, all.begin, all.end, key_runs, value_runs);
    const bool is_last = base + kKeyBlock > last, more = layout.arranged() && (!is_last || tile.next_head);
    if (more) {
      const int64_t next = is_last ? first_key / kKeyBlock * kKeyBlock : base + kKeyBlock;
      const Seen then = seen(tile.position, last, next);
      find(next, then.begin, then.end, tile.kv_head + is_last, next_keys, next_values);
    }
    over_tiles(base, [&](int64_t r, int64_t count, Seen columns) {
      score_up_to<Format>(count, queries + r * row_length, row_length, key_runs, columns.begin, columns.end, steps,
                          scores + r * kKeyBlock, r == 0 && layout.arranged() ? &value_runs : nullptr);
    });
    for (int64_t r = 0; r < rows; r += kLanes) weigh(r, least(kLanes, rows - r), base, state);
    over_tiles(base, [&](int64_t r, int64_t count, Seen columns) {
      add_values_up_to<Format>(count, weights + r * kKeyBlock, value_runs, columns.begin, columns.end, a.dim,
                               state.sums + r * width, width, r == 0 && more ? &next_keys : nullptr);
    });
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
      for (int64_t i = 0; i < a.dim; i += kLanes)
        store_part(out + i, load(state.sums + r * width + i) / mass, a.dim - i);
    }
  }
};

template <class T>
void attend_typed(const AttentionArgs& a, const AttentionTile& which, char* scratch) {
  Tile<T> tile(a, which, scratch);
  const State all = state_at(tile.states, tile.rows);
  const State next = state_at(tile.states + state_floats(tile.rows, tile.width), tile.rows);
  tile.read_queries();
  tile.attend_split(which.split_begin, all);
  for (int64_t split = which.split_begin + 1; split < which.split_end; split++) {
    tile.attend_split(split, next);
    merge(all, next, tile.rows, tile.width);
  }
  tile.write_out(all);
}

template <class T>
void attend_split_typed(const AttentionArgs& a, const AttentionTile& which, int64_t split, float* partial,
                        char* scratch) {
  Tile<T> tile(a, which, scratch);
  tile.read_queries();
  tile.attend_split(split, state_at(partial, tile.rows));
}

template <class T>
void merge_splits_typed(const AttentionArgs& a, const AttentionTile& which, float* partials) {
  alignas(64) char none[1];
  Tile<T> tile(a, which, none);
  const State all = state_at(partials, tile.rows);
  for (int64_t i = 1; i < which.split_end - which.split_begin; i++) {
    merge(all, state_at(partials + i * state_floats(tile.rows, tile.width), tile.rows), tile.rows, tile.width);
  }
  tile.write_out(all);
}

}  // namespace

int64_t attention_scratch(const AttentionArgs& a) {
  const int64_t rows = most(kQueryRows, a.heads / a.kv_heads), width = rounded_up(a.dim, kLanes);
  const int64_t gathered = (2 * a.dim + 1) * kKeyBlock;
  const int64_t floats =
      rows * (2 * kKeyBlock + a.dim + 1) + 2 * state_floats(rows, width) + gathered;  // the widest type
  return floats * static_cast<int64_t>(sizeof(float));
}

int64_t attention_partial(const AttentionArgs& a, int64_t queries) {
  return state_floats(queries * (a.heads / a.kv_heads), rounded_up(a.dim, kLanes));
}

void attend(const AttentionArgs& a, const AttentionTile& tile, char* scratch) {
  with_type(a.dtype, [&](auto x) { attend_typed<decltype(x)>(a, tile, scratch); });
}

void attend_split(const AttentionArgs& a, const AttentionTile& tile, int64_t split, float* partial, char* scratch) {
  with_type(a.dtype, [&](auto x) { attend_split_typed<decltype(x)>(a, tile, split, partial, scratch); });
}

void merge_splits(const AttentionArgs& a, const AttentionTile& tile, float* partials) {
  with_type(a.dtype, [&](auto x) { merge_splits_typed<decltype(x)>(a, tile, partials); });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
