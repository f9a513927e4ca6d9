// linear on AMX tiles, and with it the kernels of the arithmetic "amx": those of avx512_bf16 but for products of
// bfloat16.
//
// An output is one chain: for each 32 elements of K, in ascending order, one tile instruction adds their products to it
// (tiles.h). A last step of fewer elements is padded with zeros. A tile holds up to 16 rows of x; rows do not affect
// each other, so bits depend neither on the number of rows nor on the tile.
//
// Four tiles hold sums: 16 rows times the panel's 64 columns. A step loads one tile of x and four of weights for four
// products: 5 loads of 8 cycles against 4 products of 16 by Intel's figures. Two by two tiles would take 4 loads, but
// read each tile of x twice, and x comes from the L2 cache; so the shape is one by four, where x is read once a panel.
#include "amx.h"
#include "epilogue.h"
#include "float8.h"
#include "table.h"
#include "tiles.h"

#if defined(__AVX512BF16__)  // without it there are no kernels to complete

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr int64_t kTileRows = 16, kTileColumns = 16, kTileDepth = 32;
constexpr int64_t kStepSize = kPanel * kTileDepth;  // elements of a panel that a step reads: 4 KiB
constexpr int64_t kDepthBlockSteps = 4;             // whose weights stay in the L1 cache while all rows use them
constexpr int kX = 4, kWeights = 5;                 // registers; the sums are in 0 to 3

// `rows` rows of x and of the sums; weights are full tiles.
TileShapes shapes_of(int64_t rows) {
  TileShapes shapes{};
  shapes.palette = 1;
  for (int i = 0; i < 8; i++) {
    shapes.row_bytes[i] = 64;
    shapes.rows[i] = static_cast<uint8_t>(i < kWeights ? rows : kTileRows);
  }
  return shapes;
}

// The operands that all tiles of a row block share.
struct RowBlock {
  const bf16* x;  // whole steps of K, rows x_stride elements apart
  int64_t x_stride;
  int64_t steps;
  const bf16* rest;  // [rows][32], the last, partial step of K, padded with zeros
  float* sums;       // [rows][64]
};

template <int COLUMN, class Tiles>
TOKSERVE_INLINE void add_column(Tiles& tiles, const bf16* w) {
  constexpr int weights = kWeights + COLUMN % 3;
  tiles.template load<weights>(w + COLUMN * kTileColumns * 2, kPanel * 2 * sizeof(bf16));
  tiles.template multiply<COLUMN, kX, weights>();
}

template <class Tiles>
TOKSERVE_INLINE void add_step(Tiles& tiles, const bf16* x, int64_t x_stride, const bf16* w) {
  tiles.template load<kX>(x, x_stride * sizeof(bf16));
  add_column<0>(tiles, w);
  add_column<1>(tiles, w);
  add_column<2>(tiles, w);
  add_column<3>(tiles, w);
}

template <int COLUMN, class Tiles>
TOKSERVE_INLINE void begin_sums(Tiles& tiles, const float* sums, bool begin) {
  if (begin) tiles.template zero<COLUMN>();
  else tiles.template load<COLUMN>(sums + COLUMN * kTileColumns, kPanel * sizeof(float));
  if constexpr (COLUMN < 3) begin_sums<COLUMN + 1>(tiles, sums, begin);
}
template <int COLUMN, class Tiles>
TOKSERVE_INLINE void end_sums(Tiles& tiles, float* sums) {
  tiles.template store<COLUMN>(sums + COLUMN * kTileColumns, kPanel * sizeof(float));
  if constexpr (COLUMN < 3) end_sums<COLUMN + 1>(tiles, sums);
}

// Adds steps [begin, end) to a tile's sums, then the partial step if `rest`, its padded weights, is given. The first
// tile that reads a block of weights prefetches the next one.
template <class Tiles>
void add_depth_block(Tiles& tiles, const RowBlock& a, int64_t row, const bf16* panel, int64_t begin, int64_t end,
                     const bf16* rest, bool prefetch) {
  float* sums = a.sums + row * kPanel;
  const bf16* x = a.x + row * a.x_stride;
  begin_sums<0>(tiles, sums, begin == 0);
  for (int64_t step = begin; step < end; step++) {
    const bf16* w = panel + step * kStepSize;
    if (prefetch) {
      const char* next = reinterpret_cast<const char*>(w + kDepthBlockSteps * kStepSize);
      for (int64_t i = 0; i < kStepSize * static_cast<int64_t>(sizeof(bf16)); i += 64)
        __builtin_prefetch(next + i, 0, 2);
    }
    add_step(tiles, x + step * kTileDepth, a.x_stride, w);
  }
  if (rest) add_step(tiles, a.rest + row * kTileDepth, kTileDepth, rest);
  end_sums<0>(tiles, sums);
}

// Rows [first, last) in tiles of `height` rows. Sums are stored between two blocks of K, which is exact.
template <class Tiles>
void multiply_rows(Tiles& tiles, const RowBlock& a, int64_t first, int64_t last, int64_t height, const bf16* panel,
                   const bf16* rest) {
  const int64_t block = last - first > height ? kDepthBlockSteps : max(a.steps, int64_t{1});
  int64_t begin = 0;
  do {
    const int64_t end = min(begin + block, a.steps);
    for (int64_t row = first; row < last; row += height) {
      add_depth_block(tiles, a, row, panel, begin, end, end == a.steps ? rest : nullptr, row == first);
    }
    begin = end;
  } while (begin < a.steps);
}

// Scratch memory: the sums, then the padded last steps of x and of a panel.
constexpr int64_t kScratchBytes =
    kRowBlock * kPanel * sizeof(float) + (kRowBlock * kTileDepth + kStepSize) * sizeof(bf16);

template <class Tiles>
void linear_tiled(const LinearArgs& a, int64_t row0, int64_t begin, int64_t end, char* scratch) {
  const int64_t rows = min(kRowBlock, a.m - row0), steps = a.k / kTileDepth, remainder = a.k % kTileDepth;
  const int64_t full = rows / kTileRows * kTileRows, pairs = (a.k + 1) / 2 * 2;
  float* sums = reinterpret_cast<float*>(scratch);
  bf16* rest_x = reinterpret_cast<bf16*>(sums + kRowBlock * kPanel);
  bf16* rest_w = rest_x + kRowBlock * kTileDepth;
  const bf16* x = static_cast<const bf16*>(a.x) + row0 * a.x_stride;
  std::memset(rest_x, 0, (kRowBlock * kTileDepth + kStepSize) * sizeof(bf16));
  for (int64_t r = 0; remainder && r < rows; r++) {
    std::memcpy(rest_x + r * kTileDepth, x + r * a.x_stride + steps * kTileDepth, remainder * sizeof(bf16));
  }
  const RowBlock block{x, a.x_stride, steps, rest_x, sums};
  Tiles tiles;
  int64_t configured = 0;
  const auto multiply = [&](int64_t first, int64_t last, int64_t height, const bf16* panel) {
    if (first == last) return;
    if (configured != height) tiles.configure(shapes_of(height));
    configured = height;
    multiply_rows(tiles, block, first, last, height, panel, remainder ? rest_w : nullptr);
  };
  for (int64_t p = begin; p < end; p++) {
    const bf16* panel = static_cast<const bf16*>(a.packed) + p * pairs * kPanel;
    if (remainder) std::memcpy(rest_w, panel + steps * kStepSize, (remainder + 1) / 2 * 2 * kPanel * sizeof(bf16));
    multiply(0, full, kTileRows, panel);
    multiply(full, rows, rows - full, panel);
    write_panel<bf16>(a, FloatSums{sums}, row0, rows, p);
  }
}

template <class Tiles>
void linear_any(const LinearArgs& a, int64_t row0, int64_t begin, int64_t end, char* scratch) {
  if (a.dtype == DType::bf16) return linear_tiled<Tiles>(a, row0, begin, end, scratch);
  linear(a, row0, begin, end, scratch);
}

// The product with a float8 weight, bfloat16 for some steps at a time: of weights that are rounded to it, one chain as
// above; of rounded rows, a chain for each group of inputs, which has whole steps or is the only one.
template <class Tiles, bool ROUNDED>
struct Float8Tiles {
  const Wna16Args& a;
  int64_t row0, rows = min(kRowBlock, a.m - row0), depth = padded(a), groups = groups_of(a);
  int64_t steps = depth / kTileDepth, all = (depth + kTileDepth - 1) / kTileDepth;
  bool in_place = !ROUNDED && reads_in_place<bf16>(a);
  int64_t stride = in_place ? a.x_stride : depth;
  const bf16* x =
      reinterpret_cast<const bf16*>(in_place ? static_cast<const char*>(a.x) : a.rows + scales_size(a)) + row0 * stride;
  Tiles tiles;
  int64_t configured = 0;
  Float8Pairs<!ROUNDED> reader;
  alignas(64) float sums[kRowBlock * kPanel];
  alignas(64) float partial[kRowBlock * kPanel];
  alignas(64) float scales[kPanel];
  alignas(64) bf16 rest[kRowBlock * kTileDepth];  // of x: the last, partial step
  alignas(64) bf16 weights[kDepthBlockSteps * kStepSize];

  Float8Tiles(const Wna16Args& args, int64_t first) : a(args), row0(first) {
    const int64_t remainder = depth % kTileDepth;
    if (remainder) std::memset(rest, 0, sizeof rest);
    for (int64_t r = 0; remainder && r < rows; r++)
      std::memcpy(rest + r * kTileDepth, x + r * stride + steps * kTileDepth, remainder * sizeof(bf16));
  }

  void unpack_steps(int64_t panel, int64_t step, int64_t stop) {
    const int64_t k = step * kTileDepth, end = min(stop * kTileDepth, depth), filled = (end - k) * kPanel;
    if constexpr (ROUNDED) unpack<Pairs>(reader, a.packed + (panel * depth + k) * kPanel, end - k, weights);
    else unpack_scaled<Pairs>(a, reader, panel, k, end, weights);
    std::memset(weights + filled, 0, ((stop - step) * kStepSize - filled) * sizeof(bf16));
  }

  // Rows [first, last) in tiles of `height` rows, of weights that were unpacked.
  void multiply(int64_t first, int64_t last, int64_t height, int64_t step, int64_t stop, bool begin, float* to) {
    if (first == last) return;
    if (configured != height) tiles.configure(shapes_of(height));
    configured = height;
    for (int64_t row = first; row < last; row += height) {
      begin_sums<0>(tiles, to + row * kPanel, begin);
      for (int64_t i = step; i < stop; i++) {
        const bool whole = i < steps;
        const bf16* from = whole ? x + row * stride + i * kTileDepth : rest + row * kTileDepth;
        add_step(tiles, from, whole ? stride : kTileDepth, weights + (i - step) * kStepSize);
      }
      end_sums<0>(tiles, to + row * kPanel);
    }
  }

  // A chain over steps [first, last) of a panel.
  void chain(int64_t panel, int64_t first, int64_t last, float* to) {
    const int64_t full = rows / kTileRows * kTileRows;
    for (int64_t step = first; step < last; step += kDepthBlockSteps) {
      const int64_t stop = min(step + kDepthBlockSteps, last);
      unpack_steps(panel, step, stop);
      multiply(0, full, kTileRows, step, stop, step == first, to);
      multiply(full, rows, rows - full, step, stop, step == first, to);
    }
  }

  void run(int64_t panel) {
    if constexpr (!ROUNDED) {
      chain(panel, 0, all, sums);
      return write_panel<bf16>(a, FloatSums{sums}, row0, rows, panel);
    }
    if (groups == 1) {
      unit_scales(a, panel, 0, scales);
      chain(panel, 0, all, sums);
    } else {
      std::memset(sums, 0, rows * kPanel * sizeof(float));
      for (int64_t g = 0, unit = a.group / kTileDepth; g < groups; g++) {
        unit_scales(a, panel, g, scales);
        chain(panel, g * unit, min((g + 1) * unit, all), partial);
        add_scaled(partial, rows, scales, sums);
      }
    }
    const float* of_rows = reinterpret_cast<const float*>(a.rows) + row0;
    write_panel<bf16>(a, RoundedSums{sums, of_rows, groups == 1 ? scales : nullptr}, row0, rows, panel);
  }
};

template <class Tiles, bool ROUNDED>
void float8_tiled(const Wna16Args& a, int64_t row0, int64_t begin, int64_t end) {
  Float8Tiles<Tiles, ROUNDED> product(a, row0);
  for (int64_t panel = begin; panel < end; panel++) product.run(panel);
}

template <class Tiles>
void wna16_any(const Wna16Args& a, int64_t row0, int64_t begin, int64_t end) {
  const bool whole_steps = groups_of(a) == 1 || a.group % kTileDepth == 0;
  if (!a.float8 || a.dtype != DType::bf16 || (a.rounded && !whole_steps)) return linear_wna16(a, row0, begin, end);
  if (a.rounded) float8_tiled<Tiles, true>(a, row0, begin, end);
  else float8_tiled<Tiles, false>(a, row0, begin, end);
}

int64_t scratch_bytes(const LinearArgs& a) { return a.dtype == DType::bf16 ? kScratchBytes : linear_scratch(a); }

template <class Tiles>
void multiply_once(const uint16_t* a, const uint16_t* b, float* c, int rows) {
  Tiles tiles;
  tiles.configure(shapes_of(rows));
  tiles.template load<0>(c, 64);
  tiles.template load<kX>(a, 64);
  tiles.template load<kWeights>(b, 64);
  tiles.template multiply<0, kX, kWeights>();
  tiles.template store<0>(c, 64);
}

template <class Tiles>
constexpr Kernels make_table(const char* name) {
  Kernels all{};
#define TOKSERVE_ASSIGN(kernel) all.kernel = kernel;
  TOKSERVE_KERNELS(TOKSERVE_ASSIGN)
#undef TOKSERVE_ASSIGN
  all.name = name;
  all.arithmetic = "amx";
  all.linear_scratch = scratch_bytes;
  all.linear = linear_any<Tiles>;
  all.linear_wna16 = wna16_any<Tiles>;
  return all;
}

}  // namespace

}  // namespace TOKSERVE_ISA

#if defined(__AMX_BF16__)
namespace amx {
constexpr Kernels table = TOKSERVE_ISA::make_table<TOKSERVE_ISA::HardwareTiles>("amx");
void multiply_tile(const uint16_t* a, const uint16_t* b, float* c, int rows) {
  TOKSERVE_ISA::multiply_once<TOKSERVE_ISA::HardwareTiles>(a, b, c, rows);
}
}  // namespace amx
#endif

namespace amx_software {
constexpr Kernels table = TOKSERVE_ISA::make_table<TOKSERVE_ISA::SoftwareTiles>("amx_software");
void multiply_tile(const uint16_t* a, const uint16_t* b, float* c, int rows) {
  TOKSERVE_ISA::multiply_once<TOKSERVE_ISA::SoftwareTiles>(a, b, c, rows);
}
}  // namespace amx_software

}  // namespace tokserve

#endif
