// Attention of a tile of queries (all heads of one group) over pages of keys and values.
// Keys come in blocks of 64 absolute positions, blocks make splits of 512, each split keeps its own online softmax, and
// splits merge in ascending order.  A row's arithmetic is that sequence for its own position: it depends neither on the
// rows that share its tile nor on how splits were divided among threads.  Masked keys get a weight of exactly zero, and
// blocks that no row of the tile sees are skipped.
#include "activation.h"
#include "attention_products.h"
#include "latent_gather.h"
#include "online_softmax.h"
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

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
  const int64_t width = round_up(a.value_dim, kLanes);
  const bool in_place = layout.arranged() && !a.q_rope;
  const int64_t last = last_visible(tile.position + tile.queries - 1);
  const int64_t first_key = first_visible(tile.position);

  float* scores;  // [rows][64]
  float* states;  // two states
  Row* queries;   // [rows][row_length]
  Row* probs;     // [rows][64]
  T* keys;        // [steps][64][depth], where pages are not read in place
  T* values;      // [64 / depth][value_dim][depth], likewise

  Tile(const AttentionArgs& args, const AttentionTile& which, char* scratch) : a(args), tile(which) {
    scores = reinterpret_cast<float*>(scratch);
    states = scores + rows * kKeyBlock;
    probs = reinterpret_cast<Row*>(states + 2 * state_floats(rows, width));
    queries = probs + rows * kKeyBlock;
    keys = reinterpret_cast<T*>(queries + rows * row_length);
    values = keys + row_length * kKeyBlock;
  }

  int64_t first_visible(int64_t position) const { return a.window > 0 ? max<int64_t>(0, position - a.window + 1) : 0; }
  int64_t last_visible(int64_t position) const { return tile.end > 0 ? tile.end - 1 : position; }
  int64_t position_of(int64_t row) const { return tile.position + row / group; }

  void load_queries() {
    const int64_t latent = a.value_dim, rope = a.dim - latent;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t token = tile.token + r / group, head = tile.kv_head * group + r % group;
      Row* to = queries + r * row_length;
      if (row_length > a.dim) to[a.dim] = Row{};
      load_query(static_cast<const T*>(a.q) + token * a.q_stride + head * latent, to, latent);
      if (a.q_rope) load_query(static_cast<const T*>(a.q_rope) + (token * a.heads + head) * rope, to + latent, rope);
    }
  }
  static void load_query(const T* from, Row* to, int64_t n) {
    if constexpr (sizeof(Row) == sizeof(T)) {
      std::memcpy(to, from, n * sizeof(T));
    } else {
      for (int64_t i = 0; i < n; i += kLanes) store_partial(to + i, load_partial(from + i, n - i), n - i);
    }
  }

  const T* head_at(const void* cache, int64_t position, int64_t head) const {
    const int64_t page = tile.pages[position / a.page];
    return static_cast<const T*>(cache) + (page * a.kv_heads + head) * a.page * a.dim;
  }

  // Addresses of the vectors of a block that overlap [begin, end); the others get the address of the first of these,
  // which may be read.
  void locate(int64_t base, int64_t begin, int64_t end, int64_t head, KvVectors<T>& key_vectors,
              KvVectors<T>& value_vectors) const {
    const int64_t first = begin / kLanes;
    for (int64_t i = 0; i < kKeyBlock / kLanes; i++) {
      const int64_t vector = i < first || i * kLanes >= end ? first : i, position = base + vector * kLanes;
      key_vectors.vector[i] = head_at(a.k_cache, position, head) + layout.key_at(position % a.page);
      value_vectors.vector[i] = head_at(a.v_cache, position, head) + layout.value_at(position % a.page);
    }
    key_vectors.step = a.page * kDepth, value_vectors.step = a.dim * kDepth;
  }

  // Copies positions [begin, end) of the block from pages of plain rows into scratch, as one arranged page.
  void gather(int64_t base, int64_t begin, int64_t end, KvVectors<T>& key_vectors, KvVectors<T>& value_vectors) const {
    const PageLayout<T> block{kKeyBlock, a.dim}, value_block{kKeyBlock, a.value_dim};
    const auto row_in = [&](const void* cache, int64_t i) {
      return head_at(cache, base + i, tile.kv_head) + (base + i) % a.page * a.dim;
    };
    if (a.q_rope) {
      const auto row = [&](int64_t i) { return row_in(a.k_cache, i); };
      gather_keys(row, begin, end, a.dim, keys);
      gather_values(row, begin, end, a.value_dim, values);
    } else {
      for (int64_t i = begin; i < end; i++) {
        block.arrange_key(keys, i, row_in(a.k_cache, i));
        block.arrange_value(values, i, row_in(a.v_cache, i));
      }
    }
    for (int64_t i = 0; i < kKeyBlock / kLanes; i++) {
      key_vectors.vector[i] = keys + block.key_at(i * kLanes);
      value_vectors.vector[i] = values + value_block.value_at(i * kLanes);
    }
    key_vectors.step = kKeyBlock * kDepth, value_vectors.step = a.value_dim * kDepth;
  }

  // Columns of a block: positions base + begin .. base + end - 1.
  struct Columns {
    int64_t begin, end;
  };
  // Columns that the window and the last visible keys leave to some query at positions from..to.
  Columns visible(int64_t from, int64_t to, int64_t base) const {
    return {max<int64_t>(0, first_visible(from) - base), min<int64_t>(kKeyBlock, last_visible(to) + 1 - base)};
  }

  // Scales row r's scores of the block and sets those of masked columns to -inf; returns the largest.
  float scale_and_mask(int64_t r, int64_t base) {
    const Columns columns = visible(position_of(r), position_of(r), base);
    if (columns.begin >= columns.end) return kNegInf;
    const bool all = columns.begin == 0 && columns.end == kKeyBlock;
    const f32x16 from = broadcast(static_cast<float>(columns.begin)), to = broadcast(static_cast<float>(columns.end));
    float* row = scores + r * kKeyBlock;
    f32x16 row_max = broadcast(kNegInf);
    for (int v = 0; v < kPanelVectors; v++) {
      f32x16 score = load(row + v * kLanes) * broadcast(a.scale);
      if (a.softcap > 0.0f) score = capped(score, a.softcap);
      if (!all) {
        const f32x16 column = from_i32(iota() + broadcast_u32(v * kLanes));
        score = select(column < to, select(column < from, broadcast(kNegInf), score), broadcast(kNegInf));
      }
      store(row + v * kLanes, score);
      row_max = vmax(row_max, score);
    }
    return reduce_max(row_max);
  }

  // Online softmax of rows [first, first + count), at most sixteen, over a block: scores become weights, and row_max,
  // row_sum and acc are rescaled to the new maximum.
  void softmax_block(int64_t first, int64_t count, int64_t base, const SoftmaxState& state) {
    float block_max[kLanes], rescale[kLanes];
    for (int64_t i = 0; i < kLanes; i++) block_max[i] = i < count ? scale_and_mask(first + i, base) : kNegInf;
    const f32x16 old_max = load(state.row_max + first), new_max = load(block_max);
    const f32x16 row_max = select(old_max < new_max, new_max, old_max);
    store(state.row_max + first, row_max);
    store(rescale, exp(old_max - row_max));
    for (int64_t i = 0; i < count; i++) {
      const int64_t r = first + i;
      const float* row = scores + r * kKeyBlock;
      Row* prob = probs + r * kKeyBlock;
      if (block_max[i] == kNegInf) {
        std::memset(prob, 0, kKeyBlock * sizeof(Row));
        continue;
      }
      f32x16 part[kPanelVectors];
      for (int v = 0; v < kPanelVectors; v++) {
        part[v] = store_probs(prob + v * kLanes, exp(load(row + v * kLanes) - broadcast(state.row_max[r])));
      }
      state.row_sum[r] = state.row_sum[r] * rescale[i] + reduce_sum((part[0] + part[1]) + (part[2] + part[3]));
      if (rescale[i] == 1.0f) continue;
      float* acc = state.acc + r * width;
      for (int64_t j = 0; j < width; j += kLanes) store(acc + j, load(acc + j) * broadcast(rescale[i]));
    }
  }

  // Calls f(first row, number of rows, visible columns) for row tiles of nearly equal height that see any column.
  template <class F>
  void for_row_tiles(int64_t base, F&& f) const {
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t i = 0, r = 0; i < tiles; i++) {
      const int64_t count = (rows - r) / (tiles - i);
      const Columns columns = visible(position_of(r), position_of(r + count - 1), base);
      if (columns.begin < columns.end) f(r, count, columns);
      r += count;
    }
  }

  void attend_block(int64_t base, const SoftmaxState& state) {
    const Columns all = visible(tile.position, last, base);
    if (all.begin >= all.end) return;
    KvVectors<T> key_vectors, value_vectors, next_keys, next_values;
    if (in_place) locate(base, all.begin, all.end, tile.kv_head, key_vectors, value_vectors);
    else gather(base, all.begin, all.end, key_vectors, value_vectors);
    const bool is_last = base + kKeyBlock > last, more = in_place && (!is_last || tile.next_head);
    if (more) {
      const int64_t next = is_last ? first_key / kKeyBlock * kKeyBlock : base + kKeyBlock;
      const Columns ahead = visible(tile.position, last, next);
      locate(next, ahead.begin, ahead.end, tile.kv_head + is_last, next_keys, next_values);
    }
    for_row_tiles(base, [&](int64_t r, int64_t count, Columns columns) {
      score_up_to<Format>(count, queries + r * row_length, row_length, key_vectors, columns.begin, columns.end, steps,
                          scores + r * kKeyBlock, r == 0 && in_place ? &value_vectors : nullptr);
    });
    for (int64_t r = 0; r < rows; r += kLanes) softmax_block(r, min(kLanes, rows - r), base, state);
    for_row_tiles(base, [&](int64_t r, int64_t count, Columns columns) {
      add_values_up_to<Format>(count, probs + r * kKeyBlock, value_vectors, columns.begin, columns.end, a.value_dim,
                               state.acc + r * width, width, r == 0 && more ? &next_keys : nullptr);
    });
  }

  void attend_split(int64_t split, const SoftmaxState& state) {
    reset(state, rows, width);
    for (int64_t base = split * kSplit; base < (split + 1) * kSplit && base <= last; base += kKeyBlock) {
      attend_block(base, state);
    }
  }

  void write_out(const SoftmaxState& state) {
    for (int64_t r = 0; r < rows; r++) {
      T* out = static_cast<T*>(a.out) +
               ((tile.token + r / group) * a.heads + tile.kv_head * group + r % group) * a.value_dim;
      float rescale = 1.0f, row_sum = state.row_sum[r];
      if (a.sinks) {
        const float sink = a.sinks[tile.kv_head * group + r % group], row_max = max(state.row_max[r], sink);
        rescale = exp(state.row_max[r] - row_max);
        row_sum = row_sum * rescale + exp(sink - row_max);
      }
      for (int64_t i = 0; i < a.value_dim; i += kLanes) {
        const f32x16 acc = load(state.acc + r * width + i) * broadcast(rescale);
        store_partial(out + i, acc / broadcast(row_sum), a.value_dim - i);
      }
    }
  }
};

template <class T>
void attend_typed(const AttentionArgs& a, const AttentionTile& which, char* scratch) {
  Tile<T> tile(a, which, scratch);
  const SoftmaxState total = state_in(tile.states, tile.rows);
  const SoftmaxState split_state = state_in(tile.states + state_floats(tile.rows, tile.width), tile.rows);
  tile.load_queries();
  tile.attend_split(which.split_begin, total);
  for (int64_t split = which.split_begin + 1; split < which.split_end; split++) {
    tile.attend_split(split, split_state);
    merge(total, split_state, tile.rows, tile.width);
  }
  tile.write_out(total);
}

template <class T>
void attend_split_typed(const AttentionArgs& a, const AttentionTile& which, int64_t split, float* partial,
                        char* scratch) {
  Tile<T> tile(a, which, scratch);
  tile.load_queries();
  tile.attend_split(split, state_in(partial, tile.rows));
}

template <class T>
void merge_splits_typed(const AttentionArgs& a, const AttentionTile& which, float* partials) {
  alignas(64) char none[1];
  Tile<T> tile(a, which, none);
  const SoftmaxState total = state_in(partials, tile.rows);
  for (int64_t i = 1; i < which.split_end - which.split_begin; i++) {
    merge(total, state_in(partials + i * state_floats(tile.rows, tile.width), tile.rows), tile.rows, tile.width);
  }
  tile.write_out(total);
}

}  // namespace

int64_t attention_scratch(const AttentionArgs& a) {
  const int64_t rows = max(a.q_rope ? kLatentRows : kQueryRows, a.heads / a.kv_heads);
  const int64_t width = round_up(a.value_dim, kLanes);
  const int64_t gathered = (2 * a.dim + 1) * kKeyBlock;
  const int64_t floats =
      rows * (2 * kKeyBlock + a.dim + 1) + 2 * state_floats(rows, width) + gathered;  // the widest type
  return floats * static_cast<int64_t>(sizeof(float));
}

int64_t attention_partial(const AttentionArgs& a, int64_t queries) {
  return state_floats(queries * (a.heads / a.kv_heads), round_up(a.value_dim, kLanes));
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
