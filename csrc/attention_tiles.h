// Attention's work: the rows of a batch in tiles, of one request or of several that share their first pages.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace tokserve {

// The rows of a batch.
struct AttentionRows {
  int64_t rows, tokens;
  const int32_t* start;   // [rows + 1]
  const int32_t* lens;    // [rows]
  const int32_t* tables;  // [rows][width], `stride` apart
  int64_t width, stride;
  const bool* bidirectional = nullptr;  // [rows]: a row's queries see all of its keys; null: those up to themselves
};

// The tasks of one call, without kv_head.
struct AttentionTiles {
  std::vector<AttentionMember> members;  // of all tiles, one tile's after the other's
  std::vector<AttentionTile> tiles;
  double cost = 0;     // in ns of one core, as estimated
  int64_t keys = 0;    // that queries see, counted once per request and tile
  int64_t shared = 0;  // those of them that a tile reads for an earlier member
};

// Divides the rows, whose pages are numbers below `blocks`, into tiles for so many threads.  Throws if the rows do not
// fit their block tables or the cache.
AttentionTiles make_tiles(const AttentionArgs& a, int64_t blocks, const AttentionRows& batch, int64_t threads);

}  // namespace tokserve
