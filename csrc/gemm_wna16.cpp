// linear_wna16: rows of x, not rounded, times integer weights of 4 or 8 bits with a scale per group of inputs.
// An output is one chain over the groups in ascending order: the group's products, summed in float32 as linear sums
// them, times its scale, then, if it has one, its minimum times the sum of the group's x.  A folded weight's scales are
// powers of two that belong to its values, so that its chain is that of linear: sums are kept in units of the group's
// scale, which rounds alike, or, for many rows and where scales are far apart, values are scaled before they are
// multiplied.  Codes are unpacked once for all rows of a task, into memory that the first-level cache holds; those of a
// folded weight, for few rows, into registers.
#include "epilogue.h"
#include "table.h"
#include "tile.h"
#include "unpack.h"
#include "wna16_groups.h"
#include "wna8.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

template <class T>
using RowOf = typename UnpackedFor<T>::Format::Row;

// Whether products read x where it is.
template <class T>
bool reads_in_place(const Wna16Args& a) {
  return sizeof(RowOf<T>) == sizeof(T) && !a.order && a.k == padded(a);
}

// The layout of Wna16Args::rows: sums [M][groups] of each group's x if there are minima, then [M][padded K] rows,
// unless products read x in place.
float* sums_of(const Wna16Args& a) { return reinterpret_cast<float*>(a.rows); }
template <class T>
RowOf<T>* rows_of(const Wna16Args& a) {
  return reinterpret_cast<RowOf<T>*>(a.rows + (a.mins.values ? a.m * groups_of(a) * sizeof(float) : 0));
}

template <class T, class Row>
void convert_row(const Wna16Args& a, const T* x, Row* to) {
  T gathered[kLanes];
  for (int64_t i = 0; i < padded(a); i += kLanes) {
    const int64_t n = max(int64_t{0}, min(kLanes, a.k - i));
    const T* from = x + i;
    if (a.order) {
      for (int64_t j = 0; j < n; j++) gathered[j] = x[a.order[i + j]];
      from = gathered;
    }
    store_partial(to + i, load_partial(from, n), min(kLanes, padded(a) - i));
  }
}

template <class T>
void wna16_rows_typed(const Wna16Args& a, int64_t begin, int64_t end) {
  const int64_t groups = groups_of(a);
  const auto sum_groups = [&](const auto* row, float* sums) {
    for (int64_t g = 0; g < groups; g++) {
      const auto* x = row + g * a.group;
      const int64_t n = min(a.group, a.k - g * a.group);
      f32x16 total = zeros();
      for (int64_t i = 0; i < n; i += kLanes) total = total + load_partial(x + i, n - i);
      sums[g] = reduce_sum(total);
    }
  };
  for (int64_t r = begin; r < end; r++) {
    const T* x = static_cast<const T*>(a.x) + r * a.x_stride;
    float* sums = sums_of(a) + r * groups;
    if (reads_in_place<T>(a)) {
      if (a.mins.values) sum_groups(x, sums);
      continue;
    }
    RowOf<T>* row = rows_of<T>(a) + r * padded(a);
    convert_row(a, x, row);
    if (a.mins.values) sum_groups(row, sums);
  }
}

// What a group's sums are multiplied by, and what is added for it.
struct GroupTerms {
  const float* scales;    // [64]
  const float* mins;      // [64], or null
  const float* row_sums;  // of the group's x, rows row_stride apart
  int64_t row_stride;
};

TOKSERVE_INLINE void add_scaled(const GroupTerms& terms, int64_t row, int64_t column, f32x16 sum, float* to) {
  f32x16 total = fma(load(terms.scales + column), sum, load(to));
  if (terms.mins) total = fma(terms.row_sums[row * terms.row_stride], load(terms.mins + column), total);
  store(to, total);
}

// f(ROWS) with 1 <= rows <= kTileRows as a constant.
template <int ROWS = kTileRows, class F>
TOKSERVE_INLINE void with_rows(int64_t rows, const F& f) {
  if (rows == ROWS) return f(std::integral_constant<int, ROWS>());
  if constexpr (ROWS > 1) with_rows<ROWS - 1>(rows, f);
}

// sums [ROWS][64] += x [ROWS][K] times w, `steps` steps of K, scaled.
template <class Format, int ROWS>
void add_group(const typename Format::Row* x, int64_t x_stride, const typename Format::Weight* w, int64_t steps,
               float* sums, const GroupTerms& terms) {
  constexpr int vectors = ROWS == 1 ? kPanelVectors : kTileVectors;
  for (int64_t first = 0; first < kPanel; first += vectors * kLanes) {
    f32x16 sum[ROWS][vectors];
    for (int r = 0; r < ROWS; r++) {
      for (int v = 0; v < vectors; v++) sum[r][v] = zeros();
    }
    const auto* weights = w + first * Format::kDepth;
    const auto* row = x;
    for (int64_t step = 0; step < steps; step++) {
      for (int part = 0; part < Format::kParts; part++) {
        decltype(Format::load_weight(weights, part)) weight[vectors];
        for (int v = 0; v < vectors; v++) weight[v] = Format::load_weight(weights + v * kLanes * Format::kDepth, part);
        for (int r = 0; r < ROWS; r++) {
          for (int v = 0; v < vectors; v++) sum[r][v] = Format::add(row + r * x_stride, part, weight[v], sum[r][v]);
        }
      }
      row += Format::kDepth;
      weights += kPanel * Format::kDepth;
    }
    for (int r = 0; r < ROWS; r++) {
      for (int v = 0; v < vectors; v++) {
        const int64_t column = first + v * kLanes;
        add_scaled(terms, r, column, sum[r][v], sums + r * kPanel + column);
      }
    }
  }
}

// sums [ROWS][64], times `ratios` [64] (null: from zero on), += x [ROWS][K] times w, `steps` steps of K.
template <class Format, int ROWS>
void continue_chain(const typename Format::Row* x, int64_t x_stride, const typename Format::Weight* w, int64_t steps,
                    float* sums, const float* ratios) {
  constexpr int vectors = ROWS == 1 ? kPanelVectors : kTileVectors;
  for (int64_t first = 0; first < kPanel; first += vectors * kLanes) {
    f32x16 sum[ROWS][vectors];
    for (int v = 0; v < vectors; v++) {
      const int64_t column = first + v * kLanes;
      for (int r = 0; r < ROWS; r++)
        sum[r][v] = ratios ? load(sums + r * kPanel + column) * load(ratios + column) : zeros();
    }
    const auto* weights = w + first * Format::kDepth;
    const auto* row = x;
    for (int64_t step = 0; step < steps; step++) {
      for (int part = 0; part < Format::kParts; part++) {
        decltype(Format::load_weight(weights, part)) weight[vectors];
        for (int v = 0; v < vectors; v++) weight[v] = Format::load_weight(weights + v * kLanes * Format::kDepth, part);
        for (int r = 0; r < ROWS; r++) {
          for (int v = 0; v < vectors; v++) sum[r][v] = Format::add(row + r * x_stride, part, weight[v], sum[r][v]);
        }
      }
      row += Format::kDepth;
      weights += kPanel * Format::kDepth;
    }
    for (int r = 0; r < ROWS; r++) {
      for (int v = 0; v < vectors; v++) store(sums + r * kPanel + first + v * kLanes, sum[r][v]);
    }
  }
}

#if defined(__AVX512BF16__)
// The same of `depth` elements of K in codes of 4 bits, a multiple of kCodeDepth: each vector of them becomes weights
// in registers, once for all rows.
template <int ROWS>
void continue_chain_of_codes(const bf16* x, int64_t x_stride, const uint8_t* codes, const CodeTable& table,
                             int64_t depth, float* sums, const float* ratios) {
  f32x16 sum[ROWS][kPanelVectors];
  for (int v = 0; v < kPanelVectors; v++) {
    for (int r = 0; r < ROWS; r++)
      sum[r][v] = ratios ? load(sums + r * kPanel + v * kLanes) * load(ratios + v * kLanes) : zeros();
  }
  for (int64_t k = 0; k < depth; k += kCodeDepth) {
    for (int v = 0; v < kPanelVectors; v++) {
      __builtin_prefetch(codes + kCodesAhead, 0, 2);
      const __m512i words = _mm512_loadu_si512(codes);
      codes += sizeof words;
      const u32x16 weights[] = {table.at<0>(words), table.at<1>(words), table.at<2>(words), table.at<3>(words)};
      for (int j = 0; j < 4; j++) {
        for (int r = 0; r < ROWS; r++) sum[r][v] = Pairs::add(x + r * x_stride + 2 * j, 0, weights[j], sum[r][v]);
      }
    }
    x += kCodeDepth;
  }
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < kPanelVectors; v++) store(sums + r * kPanel + v * kLanes, sum[r][v]);
  }
}
#endif

// The product of a task's rows with one panel.
template <class Format>
struct PanelProduct {
  const Wna16Args& a;
  const typename Format::Row* x;
  int64_t stride, rows;
  alignas(64) float sums[kRowBlock * kPanel];
  alignas(64) float partial[kRowBlock * kPanel];  // of a group that is longer than what is unpacked at a time
  alignas(64) typename Format::Weight weights[kUnpackedDepth * kPanel];
  alignas(64) float scales[kPanel];
  alignas(64) float mins[kPanel];

  // Not an aggregate, whose memory would be set to zero.
  PanelProduct(const Wna16Args& args, const typename Format::Row* first, int64_t x_stride, int64_t count)
      : a(args), x(first), stride(x_stride), rows(count) {}

  // f(row, rows) for tiles of nearly equal height.
  template <class F>
  TOKSERVE_INLINE void for_tiles(const F& f) {
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
      const int64_t count = (rows - row) / (tiles - tile);
      f(row, count);
      row += count;
    }
  }

  void unpack_factors(const uint8_t* panel, int64_t k, int64_t depth) {
    if (a.bits == 4) unpack_codes(panel + k * kPanel / 2, depth, a.factors, weights);
    else unpack_bytes(panel + k * kPanel, depth, weights);
  }

  void unpack(const uint8_t* panel, int64_t k, int64_t depth) {
    unpack_factors(panel, k, depth);
    if (a.folded) scale_weights(weights, depth, scales);
  }

  // Elements [k, end) of K, at most kUnpackedDepth, of a tile of rows; `ratios` as in continue_chain.
  void continue_group(const uint8_t* panel, int64_t k, int64_t end, const float* ratios) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<Format, Pairs>) {
      if (a.bits == 4) {
        return with_rows(rows, [&](auto n) {
          continue_chain_of_codes<n()>(x + k, stride, panel + k * kPanel / 2, CodeTable(a.factors), end - k, sums,
                                       ratios);
        });
      }
    }
#endif
    unpack_factors(panel, k, end - k);
    with_rows(rows, [&](auto n) {
      continue_chain<Format, n()>(x + k, stride, weights, (end - k) / Format::kDepth, sums, ratios);
    });
  }

  // A folded weight, at most kTileRows rows, with sums in units of the group's scale: a power of two changes no
  // rounding.  False, with nothing kept, if a scale is not between 2^-32 and 2^31: sums might leave the range of
  // float32.
  bool run_in_units(const uint8_t* panel, int64_t index) {
    constexpr uint32_t lowest = 95u << 23, range = 64u << 23;
    const int64_t groups = groups_of(a), depth = padded(a);
    if ((groups > 1 && a.group > kUnpackedDepth) || depth - (groups - 1) * a.group > kUnpackedDepth) return false;
    uint32_t before[kPanel] = {};
    for (int64_t g = 0; g < groups; g++) {
      expand(a.scales, index, groups, g, scales);
      uint32_t outside = 0;
      for (int64_t c = 0; c < kPanel; c++) {
        uint32_t bits;
        std::memcpy(&bits, scales + c, sizeof bits);
        outside |= bits - lowest;
        const uint32_t ratio = before[c] - bits + (127u << 23);  // the last group's scale over this one's
        std::memcpy(partial + c, &ratio, sizeof ratio);
        before[c] = bits;
      }
      if (outside >= range) return false;
      const int64_t k = g * a.group, end = g + 1 < groups ? k + a.group : depth;
      continue_group(panel, k, end, g == 0 ? nullptr : partial);
    }
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = 0; c < kPanel; c += kLanes)
        store(sums + r * kPanel + c, load(sums + r * kPanel + c) * load(scales + c));
    }
    return true;
  }

  // Elements [k, end) of K, into `to`: the chain of linear.
  void multiply(const uint8_t* panel, int64_t k, int64_t end, bool begin, float* to) {
    for (; k < end; k += kUnpackedDepth, begin = false) {
      const int64_t depth = min(kUnpackedDepth, end - k);
      unpack(panel, k, depth);
      for_tiles([&](int64_t row, int64_t count) {
        multiply_up_to<Format, 0>(count, x + row * stride + k, stride, weights, depth / Format::kDepth,
                                  to + row * kPanel, begin, nullptr);
      });
    }
  }

  void run(int64_t index, int64_t row0) {
    const int64_t groups = groups_of(a), depth = padded(a);
    const uint8_t* panel = a.packed + index * depth * kPanel * a.bits / 8;
    if (a.folded && rows <= kTileRows && run_in_units(panel, index)) return;  // the bits are those of the other way
    if (!a.folded) std::memset(sums, 0, rows * kPanel * sizeof(float));
    for (int64_t g = 0; g < groups; g++) {
      const int64_t k = g * a.group, end = g + 1 < groups ? k + a.group : depth;  // the last one has the padding
      expand(a.scales, index, groups, g, scales);
      if (a.folded) {
        multiply(panel, k, end, g == 0, sums);
        continue;
      }
      if (a.mins.values) expand(a.mins, index, groups, g, mins);
      const GroupTerms terms{scales, a.mins.values ? mins : nullptr, sums_of(a) + row0 * groups + g, groups};
      if (end - k > kUnpackedDepth) {
        multiply(panel, k, end, true, partial);
        for (int64_t r = 0; r < rows; r++) {
          for (int64_t c = 0; c < kPanel; c += kLanes)
            add_scaled(terms, r, c, load(partial + r * kPanel + c), sums + r * kPanel + c);
        }
        continue;
      }
      unpack(panel, k, end - k);
      for_tiles([&](int64_t row, int64_t count) {
        GroupTerms tile = terms;
        tile.row_sums += row * groups;
        with_rows(count, [&](auto n) {
          add_group<Format, n()>(x + row * stride + k, stride, weights, (end - k) / Format::kDepth, sums + row * kPanel,
                                 tile);
        });
      });
    }
  }
};

template <class T>
void linear_wna16_typed(const Wna16Args& a, int64_t row0, int64_t begin, int64_t end) {
  using Format = typename UnpackedFor<T>::Format;
  const bool in_place = reads_in_place<T>(a);
  const int64_t stride = in_place ? a.x_stride : padded(a);
  const RowOf<T>* x = in_place ? reinterpret_cast<const RowOf<T>*>(a.x) : rows_of<T>(a);
  PanelProduct<Format> product(a, x + row0 * stride, stride, min(kRowBlock, a.m - row0));
  for (int64_t panel = begin; panel < end; panel++) {
    product.run(panel, row0);
    write_panel<T>(a, FloatSums{product.sums}, row0, product.rows, panel);
  }
}

// Row `id` of a packed weight.
template <class T>
void unpack_row(const Wna16Args& a, int64_t id, T* out) {
  const int64_t groups = groups_of(a), depth = padded(a), column = id % kPanel;
  const uint8_t* panel = a.packed + id / kPanel * depth * kPanel * a.bits / 8;
  alignas(64) float scales[kPanel], mins[kPanel] = {}, values[kLanes];
  for (int64_t g = 0; g < groups; g++) {
    expand(a.scales, id / kPanel, groups, g, scales);
    if (a.mins.values) expand(a.mins, id / kPanel, groups, g, mins);
    const int64_t end = min((g + 1) * a.group, a.k);
    for (int64_t k = g * a.group; k < end; k += kLanes) {
      const int64_t n = min(kLanes, end - k);
      for (int64_t i = 0; i < n; i++) {
        const int64_t at = k + i, step = at % kCodeDepth;
        if (a.bits == 4) {
          uint16_t word;
          std::memcpy(&word, panel + ((at / kCodeDepth * kPanel + column) * 2 + step % 2) * 2, sizeof word);
          values[i] = a.factors[word >> (step / 2 * 4) & 15];
        } else {
          values[i] = static_cast<int8_t>(panel[(at / 2 * kPanel + column) * 2 + at % 2]);
        }
        values[i] = values[i] * scales[column] + mins[column];
      }
      store_partial(out + k, load(values), n);
    }
  }
}

}  // namespace

int64_t wna16_rows_size(const Wna16Args& a) {
  if (a.rounded) return rounded_rows_size(a);
  int64_t size = a.mins.values ? a.m * groups_of(a) * static_cast<int64_t>(sizeof(float)) : 0;
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    if (!reads_in_place<T>(a)) size += a.m * padded(a) * static_cast<int64_t>(sizeof(RowOf<T>));
  });
  return size;
}

void wna16_rows(const Wna16Args& a, int64_t begin, int64_t end) {
  if (a.rounded) return rounded_rows(a, begin, end);
  with_type(a.dtype, [&](auto x) { wna16_rows_typed<decltype(x)>(a, begin, end); });
}

void linear_wna16(const Wna16Args& a, int64_t row0, int64_t begin, int64_t end) {
  if (a.rounded) return linear_rounded(a, row0, begin, end);
  with_type(a.dtype, [&](auto x) { linear_wna16_typed<decltype(x)>(a, row0, begin, end); });
}

void embedding_wna16(const Wna16Args& a, const int64_t* ids, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    for (int64_t t = begin; t < end; t++) unpack_row(a, ids[t], static_cast<T*>(a.out) + t * a.k);
  });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
