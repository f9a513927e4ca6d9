// linear_int8: rows quantized to int8 as they come, times packed int8 weights, in int32: exact in any order.
// What is rounded, is rounded by one fixed expression for each element, without fma: all instruction sets give the
// same bits.  Only a gate's activation is not that strict.
#include "epilogue.h"
#include "table.h"
#include "tile.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr float kLevels = 127.0f;  // values are -127 .. 127
constexpr float kLeast = 1e-30f;   // a row of smaller magnitude is scaled as if this were its largest: zeros stay zeros
#if defined(TOKSERVE_NEON)
constexpr uint32_t kOffset = 0;
#else
constexpr uint32_t kOffset = 128;  // a packed weight is its value plus this: vpdpbusd wants one unsigned operand
#endif

// Four elements of K side by side, weights unsigned: [ceil(K / 4)][64][4].  Sums are of x (w + kOffset), modulo 2^32.
struct Quads {
  using Weight = uint8_t;
  using Sum = I;
  using Element = uint32_t;
  static constexpr int64_t kDepth = 4;
  static constexpr int kParts = 1;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
  using Row = int8_t;
  TOKSERVE_INLINE static I load_weight(const uint8_t* w, int) {
#if defined(TOKSERVE_NEON)  // signed again: SMULL and SDOT take two signed operands
    return iload(reinterpret_cast<const uint32_t*>(w)) ^ iset(0x80808080);
#else
    I words;
    std::memcpy(&words, w, sizeof words);
    return words;
#endif
  }
  TOKSERVE_INLINE static int64_t place(int64_t i) { return i; }
#else  // products of 16-bit words: the weights' even and odd bytes apart, and so x: 0 2 1 3
  using Row = int16_t;
  struct Words {
    I even, odd;
  };
  TOKSERVE_INLINE static Words load_weight(const uint8_t* w, int) {
    I words;
    std::memcpy(&words, w, sizeof words);
    return {words & iset(0x00ff00ff), shr<8>(words) & iset(0x00ff00ff)};
  }
  TOKSERVE_INLINE static int64_t place(int64_t i) { return (i & ~int64_t{3}) | (i & 1) << 1 | (i >> 1 & 1); }
#endif

  template <class Weights>
  TOKSERVE_INLINE static I add(const Row* x, int, Weights w, I sum) {
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
    const I products = {_mm256_add_epi32(_mm256_madd_epi16(w.even.a, even), _mm256_madd_epi16(w.odd.a, odd)),
                        _mm256_add_epi32(_mm256_madd_epi16(w.even.b, even), _mm256_madd_epi16(w.odd.b, odd))};
    return sum + products;
#elif defined(__ARM_FEATURE_DOTPROD) && defined(TOKSERVE_NEON)
    const int8x8_t values = vreinterpret_s8_s32(vset_lane_s32(quad[0], vdup_n_s32(0), 0));
    return quarters<I>([&](int i) {
      return vreinterpretq_u32_s32(
          vdotq_lane_s32(vreinterpretq_s32_u32(sum.v[i]), vreinterpretq_s8_u32(w.v[i]), values, 0));
    });
#elif defined(TOKSERVE_NEON)  // two products fit into 16 bits: 2 * 127 * 127 < 2^15
    const int8x16_t values = vreinterpretq_s8_s32(vdupq_n_s32(quad[0]));
    return quarters<I>([&](int i) {
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
  uint32_t* offsets;  // [M]: 128 times the sum of the row's values, which is to be taken away again
  Quads::Row* values;
  int64_t stride;
};

int64_t padded(int64_t k) { return (k + Quads::kDepth - 1) / Quads::kDepth * Quads::kDepth; }

Rows rows_of(const Int8Args& a) {
  float* scales = reinterpret_cast<float*>(a.rows);
  uint32_t* offsets = reinterpret_cast<uint32_t*>(scales + a.m);
  return {scales, offsets, reinterpret_cast<Quads::Row*>(offsets + a.m), padded(a.k)};
}

// The scale of n values: the largest magnitude over 127, not-a-number if any value is not finite.
template <class T>
float scale_of(const T* x, int64_t n, float& inverse) {
  F largest_yet = fzero(), not_finite = fzero();  // x - x is zero only for finite x
  for (int64_t i = 0; i < n; i += kLanes) {
    const F value = load_part(x + i, n - i);
    largest_yet = vmax(as_float(as_int(value) & iset(0x7fffffff)), largest_yet);
    not_finite = not_finite + (value - value);
  }
  if (sum(not_finite) != 0.0f) {
    inverse = 0.0f;
    return __builtin_nanf("");
  }
  const float magnitude = most(largest(largest_yet), kLeast);
  inverse = kLevels / magnitude;
  return magnitude / kLevels;
}

// Calls put(i, values) with n <= 16 whole numbers at a time; returns the scale.  Without a finite scale all are zero.
template <class T, class Put>
TOKSERVE_INLINE float quantize(const T* x, int64_t n, Put put) {
  float inverse;
  const float scale = scale_of(x, n, inverse);
  for (int64_t i = 0; i < n; i += kLanes) {
    int32_t values[kLanes];
    const F scaled = load_part(x + i, n - i) * fset(inverse);
    istore(reinterpret_cast<uint32_t*>(values), scale == scale ? to_int(scaled) : iset(0));
    put(i, values);
  }
  return scale;
}

template <class T>
void quantize_typed(const QuantizeArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) {
    int8_t* to = a.values + r * a.k;
    a.scales[r] = quantize(static_cast<const T*>(a.x) + r * a.x_stride, a.k, [&](int64_t i, const int32_t* values) {
      const int64_t n = least(kLanes, a.k - i);
      for (int64_t j = 0; j < n; j++) to[i + j] = static_cast<int8_t>(values[j]);
    });
  }
}

template <class T>
void int8_rows_typed(const Int8Args& a, int64_t begin, int64_t end) {
  const Rows rows = rows_of(a);
  for (int64_t r = begin; r < end; r++) {
    Quads::Row* to = rows.values + r * rows.stride;
    uint32_t total[kLanes] = {};
    rows.scales[r] = quantize(static_cast<const T*>(a.x) + r * a.x_stride, a.k, [&](int64_t i, const int32_t* values) {
      const int64_t n = least(kLanes, rows.stride - i);  // what is past K is zero
      for (int64_t j = 0; j < kLanes; j++) total[j] += static_cast<uint32_t>(values[j]);
      if (n == kLanes) {
        for (int64_t j = 0; j < kLanes; j++) to[i + Quads::place(j)] = static_cast<Quads::Row>(values[j]);
      } else {
        for (int64_t j = 0; j < n; j++) to[i + Quads::place(j)] = static_cast<Quads::Row>(values[j]);
      }
    });
    uint32_t sum = 0;
    for (int64_t j = 0; j < kLanes; j++) sum += total[j];
    rows.offsets[r] = sum * kOffset;
  }
}

// What was added to the weights is taken away, both scales multiplied.
struct ScaledSums {
  const uint32_t* sums;     // [rows][64]
  const float* row_scales;  // [rows]
  const uint32_t* offsets;  // [rows]
  const float* scales;      // of the weight's rows
  TOKSERVE_INLINE auto columns(int64_t place, int64_t output, int64_t n) const {
    return [this, place, scale = load_part(scales + output, n)](int64_t row) {
      const F dot = from_int(iload(sums + row * kPanel + place) - iset(offsets[row]));
      return dot * fset(row_scales[row]) * scale;
    };
  }
};

template <class T>
void linear_int8_typed(const Int8Args& a, int64_t row0, int64_t begin, int64_t end) {
  alignas(64) uint32_t sums[kRowBlock * kPanel];
  const Rows rows = rows_of(a);
  const int64_t count = least(kRowBlock, a.m - row0);
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
