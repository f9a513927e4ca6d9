// Attention of a tile of queries (all heads of one group) over pages of keys and values.
// Keys come in blocks of 64 absolute positions, blocks make splits of 512, each split keeps its own online softmax, and
// splits merge in ascending order.  A row's arithmetic is that sequence for its own position: it depends neither on the
// rows that share its tile nor on how splits were divided among threads.  Masked keys get a weight of exactly zero, and
// blocks that no row of the tile sees are skipped.
// So a tile may hold queries of several requests.  In each split a block that is in the same pages for adjacent members
// is read once, for the rows of all of them; where their pages part, each goes on with its own.
#include "activation.h"
#include "attention_products.h"
#include "latent_gather.h"
#include "online_softmax.h"
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// Adjacent members of a tile and a range of whole blocks of keys, within one split, that are the same for all of them.
struct Run {
  const int32_t* pages;
  int64_t row, rows;            // of the members, in the tile
  int64_t begin, end;           // positions of the blocks
  int64_t first_key, last_key;  // of the keys that some of their queries see, in whatever split
};

// The keys that a row of a tile sees.
struct Keys {
  int64_t first, last;
};

template <class T>
struct Tile {
  using Format = typename FormatOf<T>::Format;
  using Row = typename Format::Row;
  static constexpr int64_t kDepth = Format::kDepth;

  const AttentionArgs& a;
  const AttentionTile& tile;
  const PageLayout<T> layout{a.page, a.dim};
  const int64_t group = a.heads / a.kv_heads;
  const int64_t rows = tile.queries * group;  // of the members, query * group + head of the group
  const int64_t steps = (a.dim + kDepth - 1) / kDepth;
  const int64_t row_length = steps * kDepth;  // elements of a query row in scratch
  const int64_t width = round_up(a.value_dim, kLanes);
  const bool in_place = layout.arranged() && !a.q_rope;

  Keys* seen;     // [padded rows]
  float* scores;  // [rows][64]
  float* states;  // two states
  Row* queries;   // [rows][row_length]
  Row* probs;     // [rows][64]
  T* keys;        // [steps][64][depth], where pages are not read in place
  T* values;      // [64 / depth][value_dim][depth], likewise

  Tile(const AttentionArgs& args, const AttentionTile& which, char* scratch) : a(args), tile(which) {
    seen = reinterpret_cast<Keys*>(scratch);
    scores = reinterpret_cast<float*>(seen + round_up(rows, kLanes));
    states = scores + rows * kKeyBlock;
    probs = reinterpret_cast<Row*>(states + 2 * state_floats(rows, width));
    queries = probs + rows * kKeyBlock;
    keys = reinterpret_cast<T*>(queries + rows * row_length);
    values = keys + row_length * kKeyBlock;
  }

  int64_t first_visible(int64_t position) const { return a.window > 0 ? max<int64_t>(0, position - a.window + 1) : 0; }
  static int64_t last_visible(const AttentionMember& member, int64_t position) {
    return member.end > 0 ? member.end - 1 : position;
  }

  // Calls f(row, token, position, member) for the first head's row of each query.
  template <class F>
  void for_queries(F&& f) const {
    int64_t row = 0;
    for (int64_t m = 0; m < tile.count; m++) {
      const AttentionMember& member = tile.members[m];
      for (int64_t i = 0; i < member.queries; i++, row += group) f(row, member.token + i, member.position + i, member);
    }
  }

  void load_queries() {
    const int64_t latent = a.value_dim, rope = a.dim - latent;
    for_queries([&](int64_t row, int64_t token, int64_t position, const AttentionMember& member) {
      for (int64_t i = 0; i < group; i++) {
        const int64_t r = row + i, head = tile.kv_head * group + i;
        seen[r] = {first_visible(position), last_visible(member, position)};
        Row* to = queries + r * row_length;
        if (row_length > a.dim) to[a.dim] = Row{};
        load_query(static_cast<const T*>(a.q) + token * a.q_stride + head * latent, to, latent);
        if (a.q_rope) load_query(static_cast<const T*>(a.q_rope) + (token * a.heads + head) * rope, to + latent, rope);
      }
    });
  }
  static void load_query(const T* from, Row* to, int64_t n) {
    if constexpr (sizeof(Row) == sizeof(T)) {
      std::memcpy(to, from, n * sizeof(T));
    } else {
      for (int64_t i = 0; i < n; i += kLanes) store_partial(to + i, load_partial(from + i, n - i), n - i);
    }
  }

  const T* head_at(const void* cache, const int32_t* pages, int64_t position, int64_t head) const {
    const int64_t page = pages[position / a.page];
    return static_cast<const T*>(cache) + (page * a.kv_heads + head) * a.page * a.dim;
  }

  // Columns of a block: positions base + begin .. base + end - 1.
  struct Columns {
    int64_t begin, end;
  };
  // Columns of the keys first .. last.
  static Columns columns_of(int64_t first, int64_t last, int64_t base) {
    return {max<int64_t>(0, first - base), min<int64_t>(kKeyBlock, last + 1 - base)};
  }

  // A block of keys: of these pages, this head and from this position on, and the columns that some query sees.
  struct Block {
    const int32_t* pages;
    int64_t head, base;
    Columns columns;
  };
  Block block_of(const Run& run, int64_t base) const {
    return {run.pages, tile.kv_head, base, columns_of(run.first_key, run.last_key, base)};
  }

  // Addresses of the vectors of a block that overlap its columns; the others get the address of the first of these,
  // which may be read.
  void locate(const Block& block, KvVectors<T>& key_vectors, KvVectors<T>& value_vectors) const {
    const int64_t first = block.columns.begin / kLanes;
    for (int64_t i = 0; i < kKeyBlock / kLanes; i++) {
      const int64_t vector = i < first || i * kLanes >= block.columns.end ? first : i;
      const int64_t position = block.base + vector * kLanes;
      key_vectors.vector[i] = head_at(a.k_cache, block.pages, position, block.head) + layout.key_at(position % a.page);
      value_vectors.vector[i] =
          head_at(a.v_cache, block.pages, position, block.head) + layout.value_at(position % a.page);
    }
    key_vectors.step = a.page * kDepth, value_vectors.step = a.dim * kDepth;
  }

  // Copies the columns of a block from pages of plain rows into scratch, as one arranged page.
  void gather(const Block& from, KvVectors<T>& key_vectors, KvVectors<T>& value_vectors) const {
    const PageLayout<T> block{kKeyBlock, a.dim}, value_block{kKeyBlock, a.value_dim};
    const auto [begin, end] = from.columns;
    const auto row_in = [&](const void* cache, int64_t i) {
      const int64_t position = from.base + i;
      return head_at(cache, from.pages, position, from.head) + position % a.page * a.dim;
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

  // Scales row r's scores of the block and sets those of masked columns to -inf; returns the largest.
  float scale_and_mask(int64_t r, int64_t base) {
    const Columns columns = columns_of(seen[r].first, seen[r].last, base);
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

  // Online softmax over a block of the rows [first, first + 16) that are in [begin, end): scores become weights, and
  // row_max, row_sum and acc are rescaled to the new maximum.
  void softmax_block(int64_t first, int64_t begin, int64_t end, int64_t base, const SoftmaxState& state) {
    float block_max[kLanes], rescale[kLanes];
    for (int64_t i = 0; i < kLanes; i++) {
      block_max[i] = first + i >= begin && first + i < end ? scale_and_mask(first + i, base) : kNegInf;
    }
    const f32x16 old_max = load(state.row_max + first), new_max = load(block_max);
    const f32x16 row_max = select(old_max < new_max, new_max, old_max);
    store(state.row_max + first, row_max);
    store(rescale, exp(old_max - row_max));
    for (int64_t r = max(first, begin); r < min(first + kLanes, end); r++) {
      const int64_t i = r - first;
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
  void for_row_tiles(const Run& run, int64_t base, F&& f) const {
    const int64_t tiles = (run.rows + kTileRows - 1) / kTileRows, end = run.row + run.rows;
    for (int64_t i = 0, r = run.row; i < tiles; i++) {
      const int64_t count = (end - r) / (tiles - i);
      Keys keys = seen[r];
      for (int64_t j = 1; j < count; j++) {
        keys = {min(keys.first, seen[r + j].first), max(keys.last, seen[r + j].last)};
      }
      const Columns columns = columns_of(keys.first, keys.last, base);
      if (columns.begin < columns.end) f(r, count, columns);
      r += count;
    }
  }

  // `next`: what is read after this block, or null.
  void attend_block(const Run& run, int64_t base, const Block* next, const SoftmaxState& state) {
    KvVectors<T> key_vectors, value_vectors, next_keys, next_values;
    if (in_place) locate(block_of(run, base), key_vectors, value_vectors);
    else gather(block_of(run, base), key_vectors, value_vectors);
    const bool more = in_place && next;
    if (more) locate(*next, next_keys, next_values);
    for_row_tiles(run, base, [&](int64_t r, int64_t count, Columns columns) {
      score_up_to<Format>(count, queries + r * row_length, row_length, key_vectors, columns.begin, columns.end, steps,
                          scores + r * kKeyBlock, r == run.row && in_place ? &value_vectors : nullptr);
    });
    const int64_t end = run.row + run.rows;
    for (int64_t r = round_down_to_lanes(run.row); r < end; r += kLanes) softmax_block(r, run.row, end, base, state);
    for_row_tiles(run, base, [&](int64_t r, int64_t count, Columns columns) {
      add_values_up_to<Format>(count, probs + r * kKeyBlock, value_vectors, columns.begin, columns.end, a.value_dim,
                               state.acc + r * width, width, r == run.row && more ? &next_keys : nullptr);
    });
  }

  // Writes the runs of `count` members, from `member` on, with positions in [begin, end) to `to`; returns the end of
  // what it wrote, at most 2 * count - 1.  `row`: the first of these members.
  Run* divide(int64_t member, int64_t count, int64_t row, int64_t begin, int64_t end, Run* to) const {
    const AttentionMember* members = tile.members + member;
    const auto shared = [&](int64_t i) { return members[i].shared / kKeyBlock * kKeyBlock; };
    int64_t common = end;
    Run run{members->pages, row, 0, begin, 0, first_visible(members->position), 0};
    for (int64_t i = 0; i < count; i++) {
      const int64_t last = members[i].position + members[i].queries - 1;
      if (i > 0) common = min(common, shared(i));
      run.rows += members[i].queries * group;
      run.first_key = min(run.first_key, first_visible(members[i].position));
      run.last_key = max(run.last_key, last_visible(members[i], last));
    }
    run.begin = max(begin, run.first_key / kKeyBlock * kKeyBlock);
    run.end = min(common, (run.last_key / kKeyBlock + 1) * kKeyBlock);
    if (run.begin < run.end) *to++ = run;
    begin = max(begin, common);
    for (int64_t first = 0, next; begin < end && first < count; first = next) {
      int64_t queries_of = members[first].queries;
      for (next = first + 1; next < count && shared(next) > begin; next++) queries_of += members[next].queries;
      to = divide(member + first, next - first, row, begin, end, to);
      row += queries_of * group;
    }
    return to;
  }

  // The first block of the first member in this split, or of another head; false if it sees none.
  bool first_block(int64_t head, int64_t split, Block& block) const {
    const AttentionMember& member = *tile.members;
    const int64_t first = first_visible(member.position);
    const int64_t last = last_visible(member, member.position + member.queries - 1);
    const int64_t base = max(split * kSplit, first / kKeyBlock * kKeyBlock);
    block = {member.pages, head, base, columns_of(first, last, base)};
    return block.columns.begin < block.columns.end;
  }

  void attend_split(int64_t split, const SoftmaxState& state) {
    Run runs[2 * kMostMembers];
    reset(state, rows, width);
    const Run* const stop = divide(0, tile.count, 0, split * kSplit, (split + 1) * kSplit, runs);
    for (const Run* run = runs; run < stop; run++) {
      for (int64_t base = run->begin; base < run->end; base += kKeyBlock) {
        Block next;
        bool more = true;
        if (base + kKeyBlock < run->end) next = block_of(*run, base + kKeyBlock);
        else if (run + 1 < stop) next = block_of(run[1], run[1].begin);
        else if (split + 1 < tile.split_end) more = first_block(tile.kv_head, split + 1, next);
        else more = tile.next_head && first_block(tile.kv_head + 1, tile.split_begin, next);
        attend_block(*run, base, more ? &next : nullptr, state);
      }
    }
  }

  void write_out(const SoftmaxState& state) {
    for_queries([&](int64_t row, int64_t token, int64_t, const AttentionMember&) {
      T* out = static_cast<T*>(a.out) + (token * a.heads + tile.kv_head * group) * a.value_dim;
      for (int64_t i = 0; i < group; i++) write_row(state, row + i, tile.kv_head * group + i, out + i * a.value_dim);
    });
  }

  void write_row(const SoftmaxState& state, int64_t r, int64_t head, T* out) {
    float rescale = 1.0f, row_sum = state.row_sum[r];
    if (a.sinks) {
      const float sink = a.sinks[head], row_max = max(state.row_max[r], sink);
      rescale = exp(state.row_max[r] - row_max);
      row_sum = row_sum * rescale + exp(sink - row_max);
    }
    for (int64_t i = 0; i < a.value_dim; i += kLanes) {
      const f32x16 acc = load(state.acc + r * width + i) * broadcast(rescale);
      store_partial(out + i, acc / broadcast(row_sum), a.value_dim - i);
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
  const int64_t seen = round_up(rows, kLanes) * static_cast<int64_t>(sizeof(Keys) / sizeof(float));
  const int64_t floats =
      seen + rows * (2 * kKeyBlock + a.dim + 1) + 2 * state_floats(rows, width) + gathered;  // the widest type
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
