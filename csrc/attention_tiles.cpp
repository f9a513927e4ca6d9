// Requests that share pages, as choices of one prompt do, are found by their block tables alone: they are ordered as in
// a trie, and adjacent ones share most.  A request's pages are compared at most once with another's, and pages that are
// shared need no check of their own: for requests that share nothing this costs one comparison each.
#include "attention_tiles.h"

#include <algorithm>

#include "bind.h"

namespace tokserve {

namespace {

// A request among those of a batch.
struct Place {
  int64_t row;
  int64_t length;        // of its block table, in pages
  int64_t shared;        // so many pages, its first, are those of the place before
  const int32_t* pages;  // its row of the block table
  int32_t branch;        // its page where it is compared; -1: it has none there
};

// Orders places whose first `depth` pages are the same; `shared` of the first one is left alone.
void arrange(Place* begin, Place* end, int64_t depth) {
  for (Place* place = begin; place < end; place++) place->branch = depth < place->length ? place->pages[depth] : -1;
  std::sort(begin, end,
            [](const Place& a, const Place& b) { return a.branch != b.branch ? a.branch < b.branch : a.row < b.row; });
  for (Place *first = begin, *next; first < end; first = next) {
    if (first > begin) first->shared = depth;
    for (next = first + 1; next < end && next->branch == first->branch; next++) continue;
    if (next == first + 1) continue;
    if (first->branch < 0) {  // their tables are the same and end here
      for (Place* place = first + 1; place < next; place++) place->shared = depth;
      continue;
    }
    int64_t common = first->length;
    for (const Place* place = first + 1; place < next; place++) {
      common = std::min(common, place->length);
      common = std::mismatch(first->pages + depth, first->pages + common, place->pages + depth).first - first->pages;
    }
    const int64_t before = first->shared;
    arrange(first, next, common);
    first->shared = before;
  }
}

class Divider {
 public:
  Divider(const AttentionArgs& a, int64_t blocks, const AttentionRows& batch) : a_(a), batch_(batch), blocks_(blocks) {}

  AttentionTiles run(int64_t threads) {
    read_rows();
    arrange(places_.data(), places_.data() + places_.size(), 0);
    check_pages();
    const int64_t rows = a_.q_rope ? kLatentRows : kQueryRows;
    most_ = std::max<int64_t>(1, rows / group_);
    most_joined_ = std::max<int64_t>(1, rows_for(threads, rows) / group_);
    tiles_.members.reserve(places_.size() + batch_.tokens / most_ + 1);
    for (const Place& place : places_) add(place);
    const AttentionMember* first = tiles_.members.data();
    for (AttentionTile& tile : tiles_.tiles) tile.members = first, first += tile.count;
    return std::move(tiles_);
  }

 private:
  static constexpr const char* kOp = "paged_attention";

  int64_t first_key(int64_t position) const {
    return a_.window > 0 ? std::max<int64_t>(0, position - a_.window + 1) : 0;
  }
  int64_t queries_of(int64_t row) const { return batch_.start[row + 1] - batch_.start[row]; }
  int64_t first_position(int64_t row) const { return batch_.lens[row] - queries_of(row); }

  void read_rows() {
    require(batch_.start[0] == 0 && batch_.start[batch_.rows] == batch_.tokens, kOp, "query_start must go from 0 to T");
    places_.reserve(batch_.rows);
    for (int64_t r = 0; r < batch_.rows; r++) {
      const int64_t length = batch_.lens[r];
      require(queries_of(r) >= 0 && first_position(r) >= 0, kOp, "a row has more queries than positions");
      if (queries_of(r) == 0) continue;
      require(length <= batch_.width * a_.page, kOp, "a row is longer than its block table");
      places_.push_back({r, (length + a_.page - 1) / a_.page, 0, batch_.tables + r * batch_.stride, 0});
      splits_ += queries_of(r) * ((length - 1) / kSplit - first_key(first_position(r)) / kSplit + 1);
    }
  }

  // Pages that a row sees are in the cache; those that it shares with the place before have been checked there.
  void check_pages() const {
    int64_t checked = 0;  // from this page on
    for (const Place& place : places_) {
      const int64_t first = first_key(first_position(place.row)) / a_.page;
      for (int64_t i = first >= checked ? std::max(first, place.shared) : first; i < place.length; i++) {
        require(place.pages[i] >= 0 && place.pages[i] < blocks_, kOp, "a page is outside the cache");
      }
      checked = first;
    }
  }

  // Rows of a tile of several requests: fewer than `most` where threads would lack work.
  int64_t rows_for(int64_t threads, int64_t most) const {
    constexpr int64_t least = 8;
    while (threads > 1 && most > least && splits_ * a_.heads < 4 * threads * most) most /= 2;
    return most;
  }

  void add(const Place& place) {
    const int64_t queries = queries_of(place.row), first = first_position(place.row), length = batch_.lens[place.row];
    const int64_t end = batch_.bidirectional && batch_.bidirectional[place.row] ? length : 0;
    const int64_t shared = place.shared * a_.page, shared_blocks = shared / kKeyBlock * kKeyBlock;
    bool joins = shared_blocks > first_key(first);
    for (int64_t q = 0; q < queries; joins = false) {
      if (!joins || tiles_.tiles.back().queries >= most_joined_) {
        tiles_.tiles.push_back({nullptr, 0, 0, 0, INT64_MAX, 0, false});
        joins = false;
      }
      AttentionTile& tile = tiles_.tiles.back();
      const int64_t count = std::min((joins ? most_joined_ : most_) - tile.queries, queries - q), position = first + q;
      const int64_t last = end > 0 ? end - 1 : position + count - 1, key = first_key(position);
      tiles_.members.push_back({place.pages, batch_.start[place.row] + q, position, count, end, joins ? shared : 0});
      tile.count++;
      tile.queries += count;
      tile.split_begin = std::min(tile.split_begin, key / kSplit);
      tile.split_end = std::max(tile.split_end, last / kSplit + 1);
      tiles_.keys += last - key + 1;
      if (joins) tiles_.shared += std::max<int64_t>(0, std::min(shared_blocks, last + 1) - key);
      tiles_.cost += (last - key + kKeyBlock) * (0.1 + 0.02 * count * group_) * a_.dim * a_.kv_heads;
      q += count;
    }
  }

  const AttentionArgs& a_;
  const AttentionRows& batch_;
  const int64_t blocks_, group_ = a_.heads / a_.kv_heads;
  std::vector<Place> places_;
  int64_t splits_ = 0;                  // of keys, of all queries
  int64_t most_ = 1, most_joined_ = 1;  // queries of a tile: of one request, and of several
  AttentionTiles tiles_;
};

}  // namespace

AttentionTiles make_tiles(const AttentionArgs& a, int64_t blocks, const AttentionRows& batch, int64_t threads) {
  return Divider(a, blocks, batch).run(threads);
}

}  // namespace tokserve
