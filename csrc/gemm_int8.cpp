// linear_int8: rows of x quantized to int8, times packed int8 weights, summed in int32: exact in any order.
// Each rounding is one fixed expression per element, without fma, so all instruction sets give the same bits; only the
// activation of a gated weight differs.
#include "epilogue.h"
#include "rounding.h"
#include "table.h"
#include "tile.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

#if defined(TOKSERVE_NEON)
constexpr uint32_t kOffset = 0;
#else
constexpr uint32_t kOffset = 128;  // a packed weight is its value plus this: vpdpbusd takes one unsigned operand
#endif

// Groups of four elements of K, weights unsigned: [ceil(K / 4)][64][4].  Sums are of x (w + kOffset), modulo 2^32.
struct Quads {
  using Weight = uint8_t;
  using Sum = u32x16;
  using Element = uint32_t;
  static constexpr int64_t kDepth = 4;
  static constexpr int kParts = 1;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
  using Row = int8_t;
  TOKSERVE_INLINE static u32x16 load_weight(const uint8_t* w, int) {
    const u32x16 words = load(reinterpret_cast<const uint32_t*>(w));
#if defined(TOKSERVE_NEON)  // back to signed: SMULL and SDOT take two signed operands
    return words ^ broadcast_u32(0x80808080);
#else
    return words;
#endif
  }
  TOKSERVE_INLINE static int64_t column(int64_t i) { return i; }
#else  // products of 16-bit words: the weights' even and odd bytes are separated, and x is permuted to match: 0 2 1 3
  using Row = int16_t;
  struct Words {
    u32x16 even, odd;
  };
  TOKSERVE_INLINE static Words load_weight(const uint8_t* w, int) {
    const u32x16 words = load(reinterpret_cast<const uint32_t*>(w));  // a memcpy goes through the stack
    return {words & broadcast_u32(0x00ff00ff), shr<8>(words) & broadcast_u32(0x00ff00ff)};
  }
  TOKSERVE_INLINE static int64_t column(int64_t i) { return (i & ~int64_t{3}) | (i & 1) << 1 | (i >> 1 & 1); }
#endif

  template <class Weights>
  TOKSERVE_INLINE static u32x16 add(const Row* x, int, Weights w, u32x16 sum) {
    int quad[sizeof(Row)];  // four values of int8, or two pairs of int16
    std::memcpy(quad, x, sizeof quad);
#if defined(__AVX512VNNI__)
    return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(quad[0]))};
#elif defined(__AVXVNNI__)
    const __m256i values = _mm256_set1_epi32(quad[0]);
    return {_mm256_dpbusd_avx_epi32(sum.a, w.a, values), _mm256_dpbusd_avx_epi32(sum.b, w.b, values)};
#elif defined(__AVX512F__)
    const __m512i even = _mm512_madd_epi16(w.even.v, _mm512_set1_epi32(quad[0]));
    const __m512i odd = _mm512_madd_epi16(w.odd.v, _mm512_set1_epi32(quad[1]));
    return {_mm512_add_epi32(sum.v, _mm512_add_epi32(even, odd))};
#elif defined(__AVX2__)
    const __m256i even = _mm256_set1_epi32(quad[0]), odd = _mm256_set1_epi32(quad[1]);
    const u32x16 products = {_mm256_add_epi32(_mm256_madd_epi16(w.even.a, even), _mm256_madd_epi16(w.odd.a, odd)),
                             _mm256_add_epi32(_mm256_madd_epi16(w.even.b, even), _mm256_madd_epi16(w.odd.b, odd))};
    return sum + products;
#elif defined(__ARM_FEATURE_DOTPROD) && defined(TOKSERVE_NEON)
    const int8x8_t values = vreinterpret_s8_s32(vset_lane_s32(quad[0], vdup_n_s32(0), 0));
    return per_quarter<u32x16>([&](int i) {
      return vreinterpretq_u32_s32(
          vdotq_lane_s32(vreinterpretq_s32_u32(sum.v[i]), vreinterpretq_s8_u32(w.v[i]), values, 0));
    });
#elif defined(TOKSERVE_NEON)  // two products fit into 16 bits: 2 * 127 * 127 < 2^15
    const int8x16_t values = vreinterpretq_s8_s32(vdupq_n_s32(quad[0]));
    return per_quarter<u32x16>([&](int i) {
      const int8x16_t weights = vreinterpretq_s8_u32(w.v[i]);
      const int16x8_t low = vmull_s8(vget_low_s8(weights), vget_low_s8(values)), high = vmull_high_s8(weights, values);
      return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(sum.v[i]), vpaddq_s16(low, high)));
    });
#else
    uint8_t bytes[64];
    std::memcpy(bytes, w.v, sizeof bytes);
    for (int i = 0; i < 16; i++) {
      int32_t products = 0;
      for (int j = 0; j < 4; j++) products += x[j] * bytes[4 * i + j];
      sum.v[i] += static_cast<uint32_t>(products);
    }
    return sum;
#endif
  }
};

// The layout of Int8Args::rows: scales and offsets, then the values, rows apart by a multiple of kDepth.
struct Rows {
  float* scales;      // [M]
  uint32_t* offsets;  // [M]: kOffset times the sum of the row's values, subtracted from its sums
  Quads::Row* values;
  int64_t stride;
};

int64_t padded(int64_t k) { return (k + Quads::kDepth - 1) / Quads::kDepth * Quads::kDepth; }

Rows rows_in(const Int8Args& a) {
  float* scales = reinterpret_cast<float*>(a.rows);
  uint32_t* offsets = reinterpret_cast<uint32_t*>(scales + a.m);
  return {scales, offsets, reinterpret_cast<Quads::Row*>(offsets + a.m), padded(a.k)};
}

template <class T>
void quantize_typed(const QuantizeArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) {
    int8_t* to = a.values + r * a.k;
    a.scales[r] = quantize(static_cast<const T*>(a.x) + r * a.x_stride, a.k, [&](int64_t i, const int32_t* values) {
      const int64_t n = min(kLanes, a.k - i);
      for (int64_t j = 0; j < n; j++) to[i + j] = static_cast<int8_t>(values[j]);
    });
  }
}

template <class T>
void int8_rows_typed(const Int8Args& a, int64_t begin, int64_t end) {
  const Rows rows = rows_in(a);
  for (int64_t r = begin; r < end; r++) {
    Quads::Row* to = rows.values + r * rows.stride;
    uint32_t total[kLanes] = {};
    rows.scales[r] = quantize(static_cast<const T*>(a.x) + r * a.x_stride, a.k, [&](int64_t i, const int32_t* values) {
      const int64_t n = min(kLanes, rows.stride - i);  // values past K are zero
      for (int64_t j = 0; j < kLanes; j++) total[j] += static_cast<uint32_t>(values[j]);
      if (n == kLanes) {
        for (int64_t j = 0; j < kLanes; j++) to[i + Quads::column(j)] = static_cast<Quads::Row>(values[j]);
      } else {
        for (int64_t j = 0; j < n; j++) to[i + Quads::column(j)] = static_cast<Quads::Row>(values[j]);
      }
    });
    uint32_t sum = 0;
    for (int64_t j = 0; j < kLanes; j++) sum += total[j];
    rows.offsets[r] = sum * kOffset;
  }
}

// Sums without the weights' offset, times both scales.
struct ScaledSums {
  const uint32_t* sums;     // [rows][64]
  const float* row_scales;  // [rows]
  const uint32_t* offsets;  // [rows]
  const float* scales;      // of the weight's rows
  TOKSERVE_INLINE f32x16 at(int64_t row, int64_t column, int64_t output, int64_t n) const {
    const f32x16 dot = from_i32(load(sums + row * kPanel + column) - broadcast_u32(offsets[row]));
    return dot * broadcast(row_scales[row]) * load_partial(scales + output, n);
  }
};

template <class T>
void linear_int8_typed(const Int8Args& a, int64_t row0, int64_t begin, int64_t end) {
  alignas(64) uint32_t sums[kRowBlock * kPanel];
  const Rows rows = rows_in(a);
  const int64_t count = min(kRowBlock, a.m - row0);
  const Quads::Row* x = rows.values + row0 * rows.stride;
  for (int64_t panel = begin; panel < end; panel++) {
    multiply_panel<Quads>(x, rows.stride, count, a.packed + panel * rows.stride * kPanel, rows.stride, sums, nullptr);
    write_panel<T>(a, ScaledSums{sums, rows.scales + row0, rows.offsets + row0, a.scales}, row0, count, panel);
  }
}

}  // namespace

void quantize_rows(const QuantizeArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { quantize_typed<decltype(x)>(a, begin, end); });
}

int64_t int8_rows_size(const Int8Args& a) {
  return a.m * (static_cast<int64_t>(sizeof(float) + sizeof(uint32_t)) +
                padded(a.k) * static_cast<int64_t>(sizeof(Quads::Row)));
}

void int8_rows(const Int8Args& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { int8_rows_typed<decltype(x)>(a, begin, end); });
}

void linear_int8(const Int8Args& a, int64_t row0, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { linear_int8_typed<decltype(x)>(a, row0, begin, end); });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
