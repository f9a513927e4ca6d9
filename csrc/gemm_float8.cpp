// linear_wna16 of float8 weights (e4m3) with a scale per group of inputs.
//
// Where x is not rounded, a weight is its number times its scale, rounded to x's type; the product with it is bit for
// bit that of linear with the weight of that type.  Where x is rounded, a row of x becomes float8 with a scale of its
// own; products of numbers are summed in float32 within a group, in the order of linear, times the group's scale,
// groups ascending; the sum is multiplied by the row's scale.
#include "epilogue.h"
#include "float8.h"
#include "rounding.h"
#include "table.h"
#include "tile.h"
#include "wna16_tiles.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr float kMost = 448.0f;            // the largest number of float8
constexpr float kLeastNormal = 0.015625f;  // 2 ** -6

// The number of float8 nearest to x, whose magnitude is at most about kMost; ties to even.
f32x16 nearest_float8(f32x16 x) {
  const f32x16 inside = vmax(vmin(x, broadcast(kMost)), broadcast(-kMost));
  const u32x16 word = as_u32(inside);
  const u32x16 up = word + broadcast_u32(0x7ffff) + (shr<20>(word) & broadcast_u32(1));  // keeps three bits
  const f32x16 large = as_f32(up & broadcast_u32(0xfff00000));
  const f32x16 shift = broadcast(24576.0f);  // 1.5 * 2 ** 14, whose last bit is 2 ** -9, as that of small numbers
  return select(as_f32(word & broadcast_u32(0x7fffffff)) < broadcast(kLeastNormal), (inside + shift) - shift, large);
}

template <class T>
RowOf<T>* rows_of(const Wna16Args& a) {
  return reinterpret_cast<RowOf<T>*>(a.rows + scales_size(a));
}

// x [K] rounded, zeros past K; returns its scale.
template <class T, class Row>
float round_row(const Wna16Args& a, const T* x, Row* to) {
  float unused;
  const auto at = [x, &a](int64_t i) { return load_partial(x + i, a.k - i); };
  const float levels = scale_of(a.k, at, unused);  // of int8: not-a-number as here
  f32x16 magnitudes = zeros();
  for (int64_t i = 0; i < a.k; i += kLanes)
    magnitudes = vmax(as_f32(as_u32(at(i)) & broadcast_u32(0x7fffffff)), magnitudes);
  const bool finite = levels == levels;
  const float largest = max(reduce_max(magnitudes), kMinMagnitude), inverse = kMost / largest;
  for (int64_t i = 0; i < padded(a); i += kLanes) {
    const f32x16 value = finite && i < a.k ? nearest_float8(at(i) * broadcast(inverse)) : zeros();
    store_partial(to + i, value, min(kLanes, padded(a) - i));
  }
  return finite ? largest / kMost : __builtin_nanf("");
}

template <class T>
void rows_typed(const Wna16Args& a, int64_t begin, int64_t end) {
  if (!a.rounded && reads_in_place<T>(a)) return;
  float* scales = reinterpret_cast<float*>(a.rows);
  for (int64_t r = begin; r < end; r++) {
    const T* x = static_cast<const T*>(a.x) + r * a.x_stride;
    RowOf<T>* to = rows_of<T>(a) + r * padded(a);
    if (a.rounded) scales[r] = round_row(a, x, to);
    else convert_row(a, x, to);
  }
}

// The product of a task's rows with one panel.
template <class Format, class Reader>
struct Float8Product {
  const Wna16Args& a;
  const typename Format::Row* x;
  int64_t stride, rows;
  int64_t groups = groups_of(a), depth = padded(a), group = groups > 1 ? a.group : depth;  // the last may be shorter
  Reader reader;
  alignas(64) float scales[kPanel];
  alignas(64) float ones[kPanel];
  alignas(64) float sums[kRowBlock * kPanel];
  alignas(64) float partial[kRowBlock * kPanel];
  alignas(64) typename Format::Weight weights[kUnpackedDepth * kPanel];

  // Not an aggregate, whose memory would be set to zero.
  Float8Product(const Wna16Args& args, const typename Format::Row* first, int64_t x_stride, int64_t count)
      : a(args), x(first), stride(x_stride), rows(count) {
    for (float& one : ones) one = 1.0f;
  }

  // Whether weights are unpacked in registers, for each tile of rows, or into memory, for all.
  bool unpacks_in_registers() const { return rows <= (Format::kDepth == 2 ? 2 : 3); }

  // Elements [k, end) of K within one group, read by `with`, in registers, into `to`.
  template <class AnyReader>
  void continue_sums(const AnyReader& with, int64_t index, int64_t k, int64_t end, bool begin, float* to) {
    const uint8_t* panel = a.packed + (index * depth + k) * kPanel;
    with_rows<3>(rows, [&](auto n) {
      continue_chain<Format, n()>(x + k, stride, panel, with, end - k, to, begin ? nullptr : ones);
    });
  }

  // The same of weights that are in memory.
  void add_unpacked(int64_t k, int64_t end, bool begin, float* to) {
    for_tiles<kTileRows>(rows, [&](int64_t row, int64_t tile) {
      multiply_up_to<Format, 0>(tile, x + row * stride + k, stride, weights, (end - k) / Format::kDepth,
                                to + row * kPanel, begin, nullptr);
    });
  }

  void run_scaled(int64_t index) {
    if (unpacks_in_registers()) {
      for (int64_t g = 0; g < groups; g++) {
        expand(a.scales, index, groups, g, 1, scales);
        with_scales(reader, scales, [&](const auto& now) {
          continue_sums(now, index, g * group, min((g + 1) * group, depth), g == 0, sums);
        });
      }
      return;
    }
    for (int64_t k = 0; k < depth; k += kUnpackedDepth) {
      const int64_t end = min(k + kUnpackedDepth, depth);
      unpack_scaled<Format>(a, reader, index, k, end, weights);
      add_unpacked(k, end, k == 0, sums);
    }
  }

  // Products of numbers within one group, into `to`.
  void multiply(int64_t index, int64_t k, int64_t end, float* to) {
    if (unpacks_in_registers()) return continue_sums(reader, index, k, end, true, to);
    for (bool begin = true; k < end; k += kUnpackedDepth, begin = false) {
      const int64_t stop = min(k + kUnpackedDepth, end);
      unpack<Format>(reader, a.packed + (index * depth + k) * kPanel, stop - k, weights);
      add_unpacked(k, stop, begin, to);
    }
  }

  void run_rounded(int64_t index) {
    if (groups == 1) {
      unit_scales(a, index, 0, scales);
      return multiply(index, 0, depth, sums);
    }
    std::memset(sums, 0, rows * kPanel * sizeof(float));
    for (int64_t g = 0; g < groups; g++) {
      unit_scales(a, index, g, scales);
      multiply(index, g * group, min((g + 1) * group, depth), partial);
      add_scaled(partial, rows, scales, sums);
    }
  }
};

template <class T>
void linear_float8_typed(const Wna16Args& a, int64_t row0, int64_t begin, int64_t end) {
  using Format = typename UnpackedFor<T>::Format;
  const bool in_place = !a.rounded && reads_in_place<T>(a);
  const int64_t stride = in_place ? a.x_stride : padded(a), rows = min(kRowBlock, a.m - row0);
  const RowOf<T>* x = (in_place ? reinterpret_cast<const RowOf<T>*>(a.x) : rows_of<T>(a)) + row0 * stride;
  if (!a.rounded) {
    Float8Product<Format, typename Float8ReaderOf<T, Format, true>::Reader> product(a, x, stride, rows);
    for (int64_t panel = begin; panel < end; panel++) {
      product.run_scaled(panel);
      write_panel<T>(a, FloatSums{product.sums}, row0, rows, panel);
    }
    return;
  }
  Float8Product<Format, typename Float8ReaderOf<float, Format, false>::Reader> product(a, x, stride, rows);
  const float* scales = reinterpret_cast<const float*>(a.rows) + row0;
  for (int64_t panel = begin; panel < end; panel++) {
    product.run_rounded(panel);
    write_panel<T>(a, RoundedSums{product.sums, scales, product.groups == 1 ? product.scales : nullptr}, row0, rows,
                   panel);
  }
}

}  // namespace

int64_t float8_rows_size(const Wna16Args& a) {
  int64_t size = scales_size(a);
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    if (a.rounded || !reads_in_place<T>(a)) size += a.m * padded(a) * static_cast<int64_t>(sizeof(RowOf<T>));
  });
  return size;
}

void float8_rows(const Wna16Args& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { rows_typed<decltype(x)>(a, begin, end); });
}

void linear_float8(const Wna16Args& a, int64_t row0, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { linear_float8_typed<decltype(x)>(a, row0, begin, end); });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
