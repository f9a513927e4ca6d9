// Weights stored as float8 (e4m3), in the layout of 8 bits of unpack.h, read as numbers that products take, and the
// products (gemm_float8.cpp).
//
// A byte with its exponent and mantissa one bit lower, in the upper half of a word, is a half-precision number: the
// float8 number over 256, subnormal ones too.  Scales are multiplied by 256 to make up for it, which is exact.  The
// byte that means not-a-number would be read as a number: packing gives the scale of such a group that meaning.
#pragma once

#include "epilogue.h"
#include "kernels.h"
#include "unpack.h"
#include "vec.h"
#include "wna16_groups.h"

namespace tokserve {
namespace TOKSERVE_ISA {

int64_t float8_rows_size(const Wna16Args& a);
void float8_rows(const Wna16Args& a, int64_t begin, int64_t end);
void linear_float8(const Wna16Args& a, int64_t row0, int64_t begin, int64_t end);

constexpr float kFloat8Unit = 256.0f;

#if defined(__AVX2__)
using Words16 = __m256i;  // sixteen words of two bytes
TOKSERVE_INLINE Words16 load_words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
// The lower or the upper bytes, over 256.
template <bool UPPER>
TOKSERVE_INLINE f32x16 float8_of(Words16 words) {
  const __m256i bytes = UPPER ? words : _mm256_slli_epi16(words, 8);
  const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(bytes, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
#if defined(__AVX512F__)
  return {_mm512_cvtph_ps(halves)};
#else
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
}
#else
struct Words16 {
  uint16_t v[16];
};
TOKSERVE_INLINE Words16 load_words(const uint8_t* p) {
  Words16 words;
  std::memcpy(words.v, p, sizeof words.v);
  return words;
}
template <bool UPPER>
TOKSERVE_INLINE f32x16 float8_of(Words16 words) {
  f16 halves[kLanes];
  for (int i = 0; i < kLanes; i++) {
    const uint16_t byte = UPPER ? words.v[i] : static_cast<uint16_t>(words.v[i] << 8);
    halves[i].bits = static_cast<uint16_t>(byte & 0x8000) | (byte >> 1 & 0x3f80);
  }
  return load(halves);
}
#endif

// The number of one byte.
inline float float8_number(uint8_t byte) {
  alignas(64) uint8_t words[2 * kLanes] = {byte};
  alignas(64) float numbers[kLanes];
  store(numbers, float8_of<false>(load_words(words)) * broadcast(kFloat8Unit));
  return numbers[0];
}

// x rounded to T; not-a-number must be one that rounding leaves what it is.
template <class T>
TOKSERVE_INLINE f32x16 nearest(f32x16 x) {
  return rounded<T>(x);
}
template <>
TOKSERVE_INLINE f32x16 nearest<bf16>(f32x16 x) {
  const u32x16 word = as_u32(x);
  const u32x16 up = word + broadcast_u32(0x7fff) + (shr<16>(word) & broadcast_u32(1));
  return as_f32(up & broadcast_u32(0xffff0000));
}

// As float32: times the scale of each column, rounded to T; without SCALED, over 256.
template <class T, bool SCALED>
struct Float8Values {
  static constexpr int kBits = 8;
  alignas(64) float scales[kPanel];

  void set_scales(const float* panel) {
    for (int64_t c = 0; c < kPanel; c += kLanes) store(scales + c, load(panel + c) * broadcast(kFloat8Unit));
  }
  TOKSERVE_INLINE f32x16 scaled(f32x16 value, int64_t column) const {
    if constexpr (SCALED) return nearest<T>(value * load(scales + column));
    else return value;
  }
  template <class F>
  TOKSERVE_INLINE void read(const uint8_t* block, int64_t column, const F& f) const {
    for (int k = 0; k < kCodeDepth; k += 2, block += kPanel * 2) {
      if (column % (2 * kLanes) == 0) __builtin_prefetch(block + column * 2 + kCodesAhead, 0, 2);
      const Words16 words = load_words(block + column * 2);
      f(k, scaled(float8_of<false>(words), column));
      f(k + 1, scaled(float8_of<true>(words), column));
    }
  }
};

// Whether columns [kPanel / 2] share the first one's scale, with which no weight of bfloat16 is subnormal or infinite.
inline bool share_scale(const float* columns) {
  const float scale = columns[0], magnitude = scale < 0 ? -scale : scale;
  bool same = magnitude > 0x1p-100f && magnitude < 0x1p100f;
  for (int64_t c = 1; c < kPanel / 2; c++) same &= columns[c] == scale;
  return same;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
#define TOKSERVE_FLOAT8_TABLES
// Weights of bfloat16 as float32 where a half of the panel's columns has one scale.  A number's bits are the sum of its
// mantissa times the scale, which is one of sixteen, and of its exponent and sign.
struct Float8Tables {
  static constexpr int kBits = 8;
  static constexpr int64_t kHalf = kPanel / 2;
  // The lower and upper bytes of eight subnormal numbers, then of eight normal ones less their exponent; twice.
  __m256i low[2], high[2];

  // Takes the scales [64] of numbers; false: they cannot be read so.
  bool set_scales(const float* panel) {
    if (!share_scale(panel) || !share_scale(panel + kHalf)) return false;
    for (int half = 0; half < 2; half++) set_half(half, panel[half * kHalf]);
    return true;
  }
  TOKSERVE_INLINE void set_half(int half, float scale) {
    const __m256 places = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), unit = _mm256_set1_ps(0x1p-9f);
    const f32x16 numbers = {_mm256_mul_ps(places, unit),  // the normal ones have the smallest exponent
                            _mm256_mul_ps(_mm256_add_ps(places, _mm256_set1_ps(8)), unit)};
    const u32x16 rounded = shr<16>(as_u32(nearest<bf16>(numbers * broadcast(scale))));
    const __m256i normal = _mm256_sub_epi32(rounded.b, _mm256_set1_epi32(0x80));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded.a, in_word(normal)), 0xd8);
    const __m256i lower = _mm256_and_si256(words, _mm256_set1_epi16(0xff)), upper = _mm256_srli_epi16(words, 8);
    low[half] = _mm256_permute4x64_epi64(_mm256_packus_epi16(lower, lower), 0x88);
    high[half] = _mm256_permute4x64_epi64(_mm256_packus_epi16(upper, upper), 0x88);
  }
  static TOKSERVE_INLINE __m256i in_word(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi32(0xffff)); }
  // `upper`: bytes in the upper halves of words.
  static TOKSERVE_INLINE __m256i with_exponent(__m256i mantissa, __m256i upper) {
    const __m256i rest = _mm256_and_si256(_mm256_srai_epi16(upper, 4), _mm256_set1_epi16(static_cast<short>(0x8780)));
    return _mm256_add_epi16(mantissa, rest);
  }
  static TOKSERVE_INLINE f32x16 as_floats(__m256i first, __m256i second) {
    return {_mm256_castsi256_ps(first), _mm256_castsi256_ps(second)};
  }
  template <class F>
  TOKSERVE_INLINE void read(const uint8_t* block, int64_t column, const F& f) const {
    const __m256i lows = low[column / kHalf], highs = high[column / kHalf];
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    for (int k = 0; k < kCodeDepth; k += 2, block += kPanel * 2) {
      if (column % (2 * kLanes) == 0) __builtin_prefetch(block + column * 2 + kCodesAhead, 0, 2);
      // Unpacking works on halves of the register: each gets eight bytes of either half of the columns.
      const __m256i bytes = _mm256_permute4x64_epi64(load_words(block + column * 2), 0xd8);
      const __m256i code = _mm256_and_si256(bytes, _mm256_set1_epi8(0x7f));
      const __m256i normal = _mm256_or_si256(_mm256_and_si256(bytes, _mm256_set1_epi8(7)), _mm256_set1_epi8(8));
      const __m256i index = _mm256_min_epu8(code, normal);
      const __m256i lower = _mm256_shuffle_epi8(lows, index), upper = _mm256_shuffle_epi8(highs, index);
      const __m256i zero = _mm256_setzero_si256();
      const __m256i first = with_exponent(_mm256_unpacklo_epi8(lower, upper), _mm256_unpacklo_epi8(zero, bytes));
      const __m256i second = with_exponent(_mm256_unpackhi_epi8(lower, upper), _mm256_unpackhi_epi8(zero, bytes));
      f(k, as_floats(_mm256_slli_epi32(first, 16), _mm256_slli_epi32(second, 16)));
      f(k + 1, as_floats(_mm256_and_si256(first, odd), _mm256_and_si256(second, odd)));
    }
  }
};
#endif

#if defined(__AVX512BF16__)
// The same as pairs of bfloat16.
template <bool SCALED>
struct Float8Pairs {
  static constexpr int kBits = 8;
  alignas(64) float scales[2 * kPanel];  // two of each column
  bool tiny = false;                     // a weight may be subnormal, which the instruction does not round

  void set_scales(const float* panel) {
    constexpr float least = 0x1p-109f;  // times the smallest of the numbers that are read: the least normal number
    int below = 0;
    for (int64_t c = 0; c < kPanel; c++) {
      const float scale = panel[c] * kFloat8Unit;
      below |= scale < least && scale > -least;
      scales[2 * c] = scales[2 * c + 1] = scale;
    }
    tiny = below;
  }
  TOKSERVE_INLINE __m512 scaled(__m256i halves, int64_t at) const {
    const __m512 values = _mm512_cvtph_ps(halves);
    if constexpr (SCALED) return _mm512_mul_ps(values, _mm512_load_ps(scales + at));
    else return values;
  }
  TOKSERVE_INLINE u32x16 pairs(__m512 low, __m512 high) const {
    if (SCALED && __builtin_expect(tiny, 0)) {
      bf16 words[2 * kLanes];
      store(words, f32x16{low});
      store(words + kLanes, f32x16{high});
      return load(reinterpret_cast<const uint32_t*>(words));
    }
    return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low))};
  }
  template <class F>
  TOKSERVE_INLINE void read(const uint8_t* block, int64_t column, const F& f) const {
    const __m512i mask = _mm512_set1_epi16(static_cast<short>(0xbf80));
    for (int k = 0; k < kCodeDepth; k += 2, block += kPanel * 2) {
      if (column % (2 * kLanes) == 0) __builtin_prefetch(block + column * 2 + kCodesAhead, 0, 2);
      const __m512i bytes = _mm512_cvtepi8_epi16(load_words(block + column * 2));
      const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(bytes, 7), mask);
      f(k, pairs(scaled(_mm512_castsi512_si256(halves), column * 2),
                 scaled(_mm512_extracti64x4_epi64(halves, 1), column * 2 + kLanes)));
    }
  }
};
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define TOKSERVE_FLOAT8_TABLES
// The same where a half of the panel's columns has one scale: a table has what each of the 128 numbers without a sign
// becomes.
struct Float8PairTables {
  static constexpr int kBits = 8;
  static constexpr int64_t kHalf = kPanel / 2;
  __m512i low[2][2], high[2][2];  // lower and upper bytes, by half of the columns and of the numbers

  // Takes the scales [64] of numbers; false: they cannot be read so.
  bool set_scales(const float* panel) {
    if (!share_scale(panel) || !share_scale(panel + kHalf)) return false;
    set_half(0, panel[0]);
    if (panel[kHalf] != panel[0]) {
      set_half(1, panel[kHalf]);
      return true;
    }
    for (int part = 0; part < 2; part++) low[1][part] = low[0][part], high[1][part] = high[0][part];
    return true;
  }
  void set_half(int half, float scale) {
    alignas(64) int16_t places[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; i++) places[i] = static_cast<int16_t>(i);
    const __m512 factor = _mm512_set1_ps(scale * kFloat8Unit);
    __m256i lower[4], upper[4];
    for (int i = 0; i < 4; i++) {  // 32 numbers each
      const __m512i codes = _mm512_add_epi16(_mm512_load_si512(places), _mm512_set1_epi16(static_cast<short>(32 * i)));
      const __m512i halves = _mm512_slli_epi16(codes, 7);
      const __m512 first = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), factor);
      const __m512 second = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), factor);
      const __m512i words = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
      lower[i] = _mm512_cvtepi16_epi8(words);
      upper[i] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8));
    }
    for (int part = 0; part < 2; part++) {
      low[half][part] = joined(lower[2 * part], lower[2 * part + 1]);
      high[half][part] = joined(upper[2 * part], upper[2 * part + 1]);
    }
  }
  static TOKSERVE_INLINE __m512i joined(__m256i first, __m256i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }
  template <class F>
  TOKSERVE_INLINE void read(const uint8_t* block, int64_t column, const F& f) const {
    const int64_t half = column / kHalf;
    // Unpacking works on quarters of the register: each gets eight bytes of either pair of elements of K.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    for (int k = 0; k < kCodeDepth; k += 4, block += kPanel * 4) {
      const uint8_t *one = block + column * 2, *other = one + kPanel * 2;
      if (column % (2 * kLanes) == 0) {
        __builtin_prefetch(one + kCodesAhead, 0, 2);
        __builtin_prefetch(other + kCodesAhead, 0, 2);
      }
      const __m512i bytes = _mm512_permutexvar_epi64(order, joined(load_words(one), load_words(other)));
      const __m512i lower = _mm512_permutex2var_epi8(low[half][0], bytes, low[half][1]);  // the sign does not matter
      const __m512i unsigned_upper = _mm512_permutex2var_epi8(high[half][0], bytes, high[half][1]);
      const __m512i upper = _mm512_ternarylogic_epi64(unsigned_upper, bytes, sign, 0x78);  // the first ^ (bytes & sign)
      f(k, u32x16{_mm512_unpacklo_epi8(lower, upper)});
      f(k + 2, u32x16{_mm512_unpackhi_epi8(lower, upper)});
    }
  }
};
#endif

// What reads weights for products of T in a format.
template <class T, class Format, bool SCALED>
struct Float8ReaderOf {
  using Reader = Float8Values<T, SCALED>;
};
#if defined(__AVX512BF16__)
template <class T, bool SCALED>
struct Float8ReaderOf<T, Pairs, SCALED> {
  using Reader = Float8Pairs<SCALED>;
};
#endif

// What reads the weights of a group of inputs faster than Reader, if their scales allow it.
template <class Reader>
struct Float8TablesFor {
  using Tables = void;
};
#if defined(TOKSERVE_FLOAT8_TABLES) && defined(__AVX512BF16__)
template <>
struct Float8TablesFor<Float8Pairs<true>> {
  using Tables = Float8PairTables;
};
#elif defined(TOKSERVE_FLOAT8_TABLES)
template <>
struct Float8TablesFor<Float8Values<bf16, true>> {
  using Tables = Float8Tables;
};
#endif

// f(reader) with what reads the weights of a group of inputs, whose scales are [64].
template <class Reader, class F>
TOKSERVE_INLINE void with_scales(Reader& reader, const float* scales, const F& f) {
  using Tables = typename Float8TablesFor<Reader>::Tables;
  if constexpr (!std::is_void_v<Tables>) {
    Tables tables;
    if (tables.set_scales(scales)) return f(tables);
  }
  reader.set_scales(scales);
  f(reader);
}

// Elements [k, end) of K of panel `index`, multiples of kCodeDepth, times their scales, in the format's layout.
template <class Format, class Reader>
void unpack_scaled(const Wna16Args& a, Reader& reader, int64_t index, int64_t k, int64_t end,
                   typename Format::Weight* out) {
  alignas(64) float scales[kPanel];
  const int64_t groups = groups_of(a), group = groups > 1 ? a.group : padded(a);
  const uint8_t* panel = a.packed + index * padded(a) * kPanel;
  while (k < end) {
    const int64_t stop = min(end, (k / group + 1) * group);
    expand(a.scales, index, groups, k / group, 1, scales);
    with_scales(reader, scales, [&](const auto& now) { unpack<Format>(now, panel + k * kPanel, stop - k, out); });
    out += (stop - k) * kPanel;
    k = stop;
  }
}

// The layout of Wna16Args::rows: of rounded rows their scales [M]; then [M][padded K] rows, unless products read x in
// place.
inline int64_t scales_size(const Wna16Args& a) {
  return a.rounded ? round_up(a.m * static_cast<int64_t>(sizeof(float)), 64) : 0;
}
// The scales of a panel's group, of numbers over 256.
inline void unit_scales(const Wna16Args& a, int64_t index, int64_t group, float* scales) {
  expand(a.scales, index, groups_of(a), group, 1, scales);
  for (int64_t c = 0; c < kPanel; c += kLanes) store(scales + c, load(scales + c) * broadcast(kFloat8Unit));
}

// sums [rows][64] += partial times the scales of the columns.
inline void add_scaled(const float* partial, int64_t rows, const float* scales, float* sums) {
  for (int64_t i = 0; i < rows * kPanel; i += kLanes)
    store(sums + i, load(sums + i) + load(partial + i) * load(scales + i % kPanel));
}

// Sums times the scales of rows and, if there is one for all inputs, of columns.
struct RoundedSums {
  const float* sums;    // [rows][64]
  const float* rows;    // [rows]
  const float* scales;  // [64] or null
  TOKSERVE_INLINE f32x16 at(int64_t row, int64_t column, int64_t, int64_t) const {
    const f32x16 sum = load(sums + row * kPanel + column) * broadcast(rows[row]);
    return scales ? sum * load(scales + column) : sum;
  }
};

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
