// linear_wna16: rows of x, not rounded, times integer weights of 4 or 8 bits with a scale per group of inputs.
// An output is one chain over the groups in ascending order: the group's products, summed in float32 as linear sums
// them, times its scale, then, if it has one, its minimum times the sum of the group's x.  A folded weight's scales are
// powers of two that belong to its values, so that its chain is that of linear: sums are kept in units of the group's
// scale, which rounds alike, or, for many rows and where scales are far apart, values are scaled before they are
// multiplied.  Codes are unpacked once for all rows of a task, into memory that the first-level cache holds, or, for
// few rows, into registers.
#include "epilogue.h"
#include "float8.h"
#include "table.h"
#include "tile.h"
#include "unpack.h"
#include "wna16_groups.h"
#include "wna16_tiles.h"
#include "wna8.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// The layout of Wna16Args::rows: sums [M][groups] of each group's x if there are minima, then [M][padded K] rows,
// unless products read x in place.
float* sums_of(const Wna16Args& a) { return reinterpret_cast<float*>(a.rows); }
template <class T>
RowOf<T>* rows_of(const Wna16Args& a) {
  return reinterpret_cast<RowOf<T>*>(a.rows + (a.mins.values ? a.m * groups_of(a) * sizeof(float) : 0));
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

constexpr int64_t kGroupsAtOnce = 16;  // that are unpacked at a time, at most
constexpr int64_t kFewRowsDepth = 32;  // elements of K that are unpacked into memory at a time for one tile of rows

// The product of a task's rows with one panel.
template <class Format>
struct PanelProduct {
  const Wna16Args& a;
  const typename Format::Row* x;
  int64_t stride, rows;
  int64_t groups = groups_of(a), depth = padded(a), group = groups > 1 ? a.group : depth;  // the last may be shorter
  alignas(64) float sums[kRowBlock * kPanel];
  alignas(64) float partial[kRowBlock * kPanel];  // of a group that is longer than what is unpacked at a time
  alignas(64) typename Format::Weight weights[kUnpackedDepth * kPanel];
  alignas(64) float scales[kGroupsAtOnce * kPanel];
  alignas(64) float mins[kGroupsAtOnce * kPanel];

  // Not an aggregate, whose memory would be set to zero.
  PanelProduct(const Wna16Args& args, const typename Format::Row* first, int64_t x_stride, int64_t count)
      : a(args), x(first), stride(x_stride), rows(count) {}

  // f(reader, weights of a panel from element k of K on).
  template <class F>
  TOKSERVE_INLINE void read(const uint8_t* panel, int64_t k, const F& f) {
    with_reader<Format>(a.bits, a.factors, [&](const auto& reader) { f(reader, panel + k * kPanel * a.bits / 8); });
  }
  void unpack_factors(const uint8_t* panel, int64_t k, int64_t count) {
    read(panel, k, [&](const auto& reader, const uint8_t* from) { unpack<Format>(reader, from, count, weights); });
  }

  // A folded weight, at most kTileRows rows, with sums in units of the group's scale: a power of two changes no
  // rounding.  False, with nothing kept, if a scale is not between 2^-32 and 2^31: sums might leave the range of
  // float32.
  bool run_in_units(const uint8_t* panel, int64_t index) {
    constexpr uint32_t lowest = 95u << 23, range = 64u << 23;
    if (group > kUnpackedDepth) return false;
    uint32_t before[kPanel] = {};
    for (int64_t g = 0; g < groups; g++) {
      expand(a.scales, index, groups, g, 1, scales);
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
      const int64_t k = g * group;
      read(panel, k, [&](const auto& reader, const uint8_t* from) {
        with_rows<kTileRows>(rows, [&](auto n) {
          continue_chain<Format, n()>(x + k, stride, from, reader, min(group, depth - k), sums, g ? partial : nullptr);
        });
      });
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
      const int64_t count = min(kUnpackedDepth, end - k);
      unpack_factors(panel, k, count);
      if (a.folded) scale_weights(weights, count, scales);
      for_tiles<kTileRows>(rows, [&](int64_t row, int64_t tile) {
        multiply_up_to<Format, 0>(tile, x + row * stride + k, stride, weights, count / Format::kDepth,
                                  to + row * kPanel, begin, nullptr);
      });
    }
  }

  // A folded weight, as values that were scaled before.
  void run_scaled(const uint8_t* panel, int64_t index) {
    for (int64_t g = 0; g < groups; g++) {
      expand(a.scales, index, groups, g, 1, scales);
      multiply(panel, g * group, min((g + 1) * group, depth), g == 0, sums);
    }
  }

  // Whether weights are unpacked in registers, for each tile of rows, or into memory, for all.
  bool unpacks_in_registers() const {
    const bool converts_slowly = std::is_same_v<Format, Pairs> && a.bits == 8;
    return rows <= (converts_slowly ? 2 : kTileRows);
  }

  // Elements of K in groups that are worked on at a time, at least a group.  Products of few rows are so short that
  // the next part should be unpacked meanwhile.
  int64_t depth_at_once() const { return unpacks_in_registers() || rows > kTileRows ? kUnpackedDepth : kFewRowsDepth; }

  // Elements [k, end) of K in groups, at most kUnpackedDepth.
  void add(const uint8_t* panel, int64_t k, int64_t end, const GroupTerms& terms) {
    if (unpacks_in_registers()) {
      read(panel, k, [&](const auto& reader, const uint8_t* from) {
        with_rows<kTileRows>(rows, [&](auto n) {
          add_packed_groups<Format, n()>(x + k, stride, from, reader, end - k, group, sums, terms);
        });
      });
      return;
    }
    unpack_factors(panel, k, end - k);
    for_tiles<kGroupRows>(rows, [&](int64_t row, int64_t count) {
      with_rows<kGroupRows>(count, [&](auto n) {
        add_groups<Format, n()>(x + row * stride + k, stride, weights, end - k, group, sums + row * kPanel,
                                terms.at(row, 0));
      });
    });
  }

  // Elements [k, end) of K of a group that is longer than kUnpackedDepth.
  void add_long(const uint8_t* panel, int64_t k, int64_t end, const GroupTerms& terms) {
    multiply(panel, k, end, true, partial);
    for (int64_t r = 0; r < rows; r++) {
      f32x16 sum[1][kPanelVectors];
      load_tile(partial + r * kPanel, sum);
      terms.at(r, 0).add_to(0, sum, sums + r * kPanel);
    }
  }

  void run(int64_t index, int64_t row0) {
    const uint8_t* panel = a.packed + index * depth * kPanel * a.bits / 8;
    if (a.folded) {
      if (rows > kTileRows || !run_in_units(panel, index)) run_scaled(panel, index);  // the bits are the same
      return;
    }
    std::memset(sums, 0, rows * kPanel * sizeof(float));
    const int64_t step = max(int64_t{1}, min(kGroupsAtOnce, depth_at_once() / group));
    for (int64_t g = 0; g < groups; g += step) {
      const int64_t count = min(step, groups - g);
      expand(a.scales, index, groups, g, count, scales);
      if (a.mins.values) expand(a.mins, index, groups, g, count, mins);
      const GroupTerms terms{scales, a.mins.values ? mins : nullptr, sums_of(a) + row0 * groups + g, groups};
      const int64_t k = g * group, end = min(k + count * group, depth);
      if (end - k > kUnpackedDepth) add_long(panel, k, end, terms);
      else add(panel, k, end, terms);
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
    expand(a.scales, id / kPanel, groups, g, 1, scales);
    if (a.mins.values) expand(a.mins, id / kPanel, groups, g, 1, mins);
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
          const uint8_t byte = panel[(at / 2 * kPanel + column) * 2 + at % 2];
          values[i] = a.float8 ? float8_number(byte) : static_cast<int8_t>(byte);
        }
        values[i] = values[i] * scales[column] + mins[column];
      }
      store_partial(out + k, load(values), n);
    }
  }
}

}  // namespace

int64_t wna16_rows_size(const Wna16Args& a) {
  if (a.float8) return float8_rows_size(a);
  if (a.rounded) return rounded_rows_size(a);
  int64_t size = a.mins.values ? a.m * groups_of(a) * static_cast<int64_t>(sizeof(float)) : 0;
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    if (!reads_in_place<T>(a)) size += a.m * padded(a) * static_cast<int64_t>(sizeof(RowOf<T>));
  });
  return size;
}

void wna16_rows(const Wna16Args& a, int64_t begin, int64_t end) {
  if (a.float8) return float8_rows(a, begin, end);
  if (a.rounded) return rounded_rows(a, begin, end);
  with_type(a.dtype, [&](auto x) { wna16_rows_typed<decltype(x)>(a, begin, end); });
}

void linear_wna16(const Wna16Args& a, int64_t row0, int64_t begin, int64_t end) {
  if (a.float8) return linear_float8(a, row0, begin, end);
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
