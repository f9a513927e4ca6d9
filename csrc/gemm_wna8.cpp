// linear_wna16 with rows of x rounded to int8, each group of inputs that shares a weight's scale with a scale of its
// own. An output is one chain over the groups in ascending order: the group's products, summed as integers and so
// exactly in any order, times the row's scale; that times the weight's scale; then, if it has one, the weight's minimum
// times the sum of the group's rounded x.  All instruction sets give the same bits.
//
// Weights are bytes of their factor less the smallest factor, so that products take one unsigned operand; what that
// adds is subtracted from a group's sum.
#include "epilogue.h"
#include "rounding.h"
#include "wna16_groups.h"
#include "wna8.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// The layout of Wna16Args::rows: for each row and group the scale, the scale times the sum of the values, and what the
// sum of products starts from; then the values, int8 [M][padded K], eight at a time in the order of the weight's bytes.
struct RoundedRows {
  float *scales, *totals;
  uint32_t* starts;
  int8_t* values;
};

RoundedRows rows_in(const Wna16Args& a) {
  const int64_t count = a.m * groups_of(a);
  float* scales = reinterpret_cast<float*>(a.rows);
  uint32_t* starts = reinterpret_cast<uint32_t*>(scales + 2 * count);
  return {scales, scales + count, starts, reinterpret_cast<int8_t*>(starts + count)};
}

// What the bytes of a weight mean: its factor is the byte less `offset`.
struct Bytes {
  alignas(16) uint8_t table[16];  // of 4-bit codes
  uint32_t offset;
  bool identity;       // the table maps each code to itself
  int64_t word_steps;  // of eight inputs, whose products a signed word holds; 0: not even one

  explicit Bytes(const Wna16Args& a) : table(), offset(128), identity(true), word_steps(0) {
    if (a.bits == 8) return;
    int lowest = a.factors[0], highest = a.factors[0];
    for (int i = 1; i < 16; i++) {
      lowest = min<int>(lowest, a.factors[i]);
      highest = max<int>(highest, a.factors[i]);
    }
    for (int i = 0; i < 16; i++) {
      table[i] = static_cast<uint8_t>(a.factors[i] - lowest);
      identity = identity && table[i] == i;
    }
    offset = static_cast<uint32_t>(-lowest);
    word_steps = 32767 / (4 * 127 * max(1, highest - lowest));
  }
};

// Where element i of eight lies: 4-bit codes come as their low nibbles, k 0 4 1 5, and their high ones, 2 6 3 7.
TOKSERVE_INLINE int64_t place(int64_t i, int bits) {
  constexpr int8_t places[] = {0, 2, 4, 6, 1, 3, 5, 7};
  return bits == 4 ? places[i] : i;
}

// Sixteen values, the first at a multiple of eight.
TOKSERVE_INLINE void put_sixteen(const int32_t* values, int bits, int8_t* to) {
#if defined(__AVX512F__)
  __m128i bytes = _mm512_cvtepi32_epi8(_mm512_loadu_si512(values));
  if (bits == 4) bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
  for (int64_t j = 0; j < kLanes; j++)
    to[j / kCodeDepth * kCodeDepth + place(j % kCodeDepth, bits)] = static_cast<int8_t>(values[j]);
#endif
}

template <class T>
void round_rows(const Wna16Args& a, int64_t begin, int64_t end) {
  const RoundedRows rows = rows_in(a);
  const Bytes bytes(a);
  const int64_t groups = groups_of(a), depth = padded(a);
  for (int64_t r = begin; r < end; r++) {
    const T* x = static_cast<const T*>(a.x) + r * a.x_stride;
    int8_t* to = rows.values + r * depth;
    std::memset(to + depth - kCodeDepth, 0, kCodeDepth);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t k = g * a.group, n = min(a.group, a.k - k);
      int32_t total = 0;
      const auto put = [&](int64_t i, const int32_t* values) {
        const int64_t count = min(kLanes, n - i);
        for (int64_t j = 0; j < kLanes; j++) total += values[j];  // past the last they are zero
        if (count == kLanes) return put_sixteen(values, a.bits, to + k + i);
        for (int64_t j = 0; j < count; j++) {
          const int64_t at = k + i + j;
          to[at / kCodeDepth * kCodeDepth + place(at % kCodeDepth, a.bits)] = static_cast<int8_t>(values[j]);
        }
      };
      float scale;
      if (a.order) {
        const auto gather = [&](int64_t i) {
          T values[kLanes];
          for (int64_t j = 0; j < min(kLanes, n - i); j++) values[j] = x[a.order[k + i + j]];
          return load_partial(values, n - i);
        };
        scale = quantize_loaded(n, gather, put);
      } else {
        scale = quantize(x + k, n, put);
      }
      rows.scales[r * groups + g] = scale;
      rows.totals[r * groups + g] = scale * static_cast<float>(total);
      rows.starts[r * groups + g] = 0u - static_cast<uint32_t>(total) * bytes.offset;
    }
  }
}

// sum += the four products of a byte of w and a byte of x, in each lane; w is unsigned, x is signed.
TOKSERVE_INLINE u32x16 add_quads(u32x16 w, int32_t x, u32x16 sum) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(x))};
#elif defined(__AVXVNNI__)
  const __m256i values = _mm256_set1_epi32(x);
  return {_mm256_dpbusd_avx_epi32(sum.a, w.a, values), _mm256_dpbusd_avx_epi32(sum.b, w.b, values)};
#elif defined(__AVX2__)  // as words: bytes 0 and 2, then 1 and 3
  int8_t values[4];
  std::memcpy(values, &x, sizeof values);
  const auto pair = [&](int i) { return (values[i] & 0xffff) | static_cast<int32_t>(values[i + 2] * 65536u); };
  const int32_t even = pair(0), odd = pair(1);
  const u32x16 low = w & broadcast_u32(0x00ff00ff), high = shr<8>(w) & broadcast_u32(0x00ff00ff);
#if defined(__AVX512F__)
  const __m512i products = _mm512_add_epi32(_mm512_madd_epi16(low.v, _mm512_set1_epi32(even)),
                                            _mm512_madd_epi16(high.v, _mm512_set1_epi32(odd)));
  return {_mm512_add_epi32(sum.v, products)};
#else
  const __m256i first = _mm256_set1_epi32(even), second = _mm256_set1_epi32(odd);
  const u32x16 products = {_mm256_add_epi32(_mm256_madd_epi16(low.a, first), _mm256_madd_epi16(high.a, second)),
                           _mm256_add_epi32(_mm256_madd_epi16(low.b, first), _mm256_madd_epi16(high.b, second))};
  return sum + products;
#endif
#else
  uint8_t bytes[4 * kLanes];
  int8_t values[4];
  uint32_t sums[kLanes];
  store(reinterpret_cast<uint32_t*>(bytes), w);
  store(sums, sum);
  std::memcpy(values, &x, sizeof values);
  for (int64_t i = 0; i < kLanes; i++) {
    int32_t products = 0;
    for (int j = 0; j < 4; j++) products += values[j] * bytes[4 * i + j];
    sums[i] += static_cast<uint32_t>(products);
  }
  return load(sums);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define TOKSERVE_WORD_SUMS  // products of bytes are added to words, which overflow unless they are emptied in time
TOKSERVE_INLINE u32x16 add_words(u32x16 w, int32_t x, u32x16 words) {
#if defined(__AVX512F__)
  return {_mm512_add_epi16(words.v, _mm512_maddubs_epi16(w.v, _mm512_set1_epi32(x)))};
#else
  const __m256i values = _mm256_set1_epi32(x);
  return {_mm256_add_epi16(words.a, _mm256_maddubs_epi16(w.a, values)),
          _mm256_add_epi16(words.b, _mm256_maddubs_epi16(w.b, values))};
#endif
}
TOKSERVE_INLINE u32x16 add_pairs(u32x16 words, u32x16 sum) {
#if defined(__AVX512F__)
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(words.v, _mm512_set1_epi16(1)))};
#else
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(words.a, one)),
          _mm256_add_epi32(sum.b, _mm256_madd_epi16(words.b, one))};
#endif
}
#endif

// Sixteen outputs' bytes of eight inputs, four in each of two vectors.
struct Eight {
  u32x16 first, second;
};

template <bool IDENTITY>
TOKSERVE_INLINE u32x16 bytes_of(u32x16 codes, const Bytes& bytes) {
  if constexpr (IDENTITY) return codes;
#if defined(__AVX512F__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes.table)));
  return {_mm512_shuffle_epi8(table, codes.v)};
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes.table)));
  return {_mm256_shuffle_epi8(table, codes.a), _mm256_shuffle_epi8(table, codes.b)};
#else
  uint8_t mapped[4 * kLanes];
  store(reinterpret_cast<uint32_t*>(mapped), codes);
  for (uint8_t& one : mapped) one = bytes.table[one];
  return load(reinterpret_cast<const uint32_t*>(mapped));
#endif
}

template <int BITS, bool IDENTITY>
TOKSERVE_INLINE Eight load_eight(const uint8_t* panel, int64_t column, const Bytes& bytes) {
  if constexpr (BITS == 4) {
    const u32x16 words = load(reinterpret_cast<const uint32_t*>(panel) + column), low = broadcast_u32(0x0f0f0f0f);
    return {bytes_of<IDENTITY>(words & low, bytes), bytes_of<IDENTITY>(shr<4>(words) & low, bytes)};
  } else {
    const auto pairs = [&](int64_t pair) {
      const uint8_t* at = panel + (pair * kPanel + column) * 2;
      return as_u32(load(reinterpret_cast<const bf16*>(at)));  // in the upper half
    };
    const u32x16 flip = broadcast_u32(0x80808080);
    return {(shr<16>(pairs(0)) + pairs(1)) ^ flip, (shr<16>(pairs(2)) + pairs(3)) ^ flip};
  }
}

// `to` += the products of one step, ROWS rows and VECTORS times sixteen outputs from `column` on; WORDS: as words.
template <int BITS, bool IDENTITY, bool WORDS, int ROWS, int VECTORS>
TOKSERVE_INLINE void add_step(const int8_t* x, int64_t stride, const uint8_t* panel, int64_t column, const Bytes& bytes,
                              u32x16 (&to)[ROWS][VECTORS]) {
  constexpr int64_t size = VECTORS * kLanes * BITS;  // bytes
  for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(panel + kCodesAhead + column * BITS + at, 0, 2);
  Eight weights[VECTORS];
  for (int v = 0; v < VECTORS; v++) weights[v] = load_eight<BITS, IDENTITY>(panel, column + v * kLanes, bytes);
  for (int r = 0; r < ROWS; r++) {
    int32_t first, second;  // not an array, which is loaded at once and then taken apart
    std::memcpy(&first, x + r * stride, sizeof first);
    std::memcpy(&second, x + r * stride + sizeof first, sizeof second);
    for (int v = 0; v < VECTORS; v++) {
#if defined(TOKSERVE_WORD_SUMS)
      if constexpr (WORDS) {
        to[r][v] = add_words(weights[v].second, second, add_words(weights[v].first, first, to[r][v]));
        continue;
      }
#endif
      to[r][v] = add_quads(weights[v].second, second, add_quads(weights[v].first, first, to[r][v]));
    }
  }
}

// `sum` += a group's products.
template <int BITS, bool IDENTITY, bool WORDS, int ROWS, int VECTORS>
TOKSERVE_INLINE void sum_group(const int8_t* x, int64_t stride, const uint8_t* panel, int64_t column, int64_t steps,
                               const Bytes& bytes, u32x16 (&sum)[ROWS][VECTORS]) {
  constexpr int64_t size = kPanel * kCodeDepth * BITS / 8;
#if defined(TOKSERVE_WORD_SUMS)
  if constexpr (WORDS) {
    for (int64_t step = 0; step < steps;) {
      const int64_t end = min(steps, step + bytes.word_steps);
      u32x16 words[ROWS][VECTORS];
      for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < VECTORS; v++) words[r][v] = broadcast_u32(0);
      }
      for (; step < end; step++)
        add_step<BITS, IDENTITY, true>(x + step * kCodeDepth, stride, panel + step * size, column, bytes, words);
      for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < VECTORS; v++) sum[r][v] = add_pairs(words[r][v], sum[r][v]);
      }
    }
    return;
  }
#endif
  u32x16 total[ROWS][VECTORS];  // the compiler keeps these in registers, and not what a reference names
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) total[r][v] = sum[r][v];
  }
  for (int64_t step = 0; step < steps; step++)
    add_step<BITS, IDENTITY, false>(x + step * kCodeDepth, stride, panel + step * size, column, bytes, total);
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) sum[r][v] = total[r][v];
  }
}

// A group of a panel, and where its terms are.
struct PanelGroup {
  const int8_t* x;      // of the first row
  const float* scales;  // of the rows, `groups` apart
  const float* totals;
  const uint32_t* starts;
  const uint8_t* panel;
  int64_t stride, groups, steps;
  const float* weight_scales;  // [64]
  const float* mins;           // [64], or null
};

template <int BITS, bool IDENTITY, bool WORDS, int ROWS, int VECTORS>
void add_rows(const PanelGroup& g, const Bytes& bytes, int64_t row, float* to) {
  for (int64_t column = 0; column < kPanel; column += VECTORS * kLanes) {
    u32x16 sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++) {
      for (int v = 0; v < VECTORS; v++) sum[r][v] = broadcast_u32(g.starts[(row + r) * g.groups]);
    }
    sum_group<BITS, IDENTITY, WORDS, ROWS, VECTORS>(g.x + row * g.stride, g.stride, g.panel, column, g.steps, bytes,
                                                    sum);
    for (int r = 0; r < ROWS; r++) {
      const int64_t at = (row + r) * g.groups;
      for (int v = 0; v < VECTORS; v++) {
        const int64_t c = column + v * kLanes;
        float* out = to + (row + r) * kPanel + c;
        const f32x16 product = from_i32(sum[r][v]) * broadcast(g.scales[at]);
        f32x16 total = fma(load(g.weight_scales + c), product, load(out));
        if (g.mins) total = fma(g.totals[at], load(g.mins + c), total);
        store(out, total);
      }
    }
  }
}

template <int BITS, bool IDENTITY, bool WORDS>
void add_group(const PanelGroup& g, const Bytes& bytes, int64_t rows, float* to) {
  int64_t row = 0;
#if defined(__AVX512F__)  // 32 registers
  for (; row + 8 <= rows; row += 8) add_rows<BITS, IDENTITY, WORDS, 8, 2>(g, bytes, row, to);
  for (; row + 4 <= rows; row += 4) add_rows<BITS, IDENTITY, WORDS, 4, 2>(g, bytes, row, to);
  for (; row + 2 <= rows; row += 2) add_rows<BITS, IDENTITY, WORDS, 2, 4>(g, bytes, row, to);
#else
  for (; row + 4 <= rows; row += 4) add_rows<BITS, IDENTITY, WORDS, 4, 1>(g, bytes, row, to);
  for (; row + 2 <= rows; row += 2) add_rows<BITS, IDENTITY, WORDS, 2, 2>(g, bytes, row, to);
#endif
  if (row < rows) add_rows<BITS, IDENTITY, WORDS, 1, 4>(g, bytes, row, to);
}

void add_any(const Wna16Args& a, const PanelGroup& g, const Bytes& bytes, int64_t rows, float* to) {
  if (a.bits == 8) return add_group<8, true, false>(g, bytes, rows, to);
#if defined(TOKSERVE_WORD_SUMS)
  if (bytes.identity) return add_group<4, true, true>(g, bytes, rows, to);
  if (bytes.word_steps > 0) return add_group<4, false, true>(g, bytes, rows, to);
#endif
  if (bytes.identity) return add_group<4, true, false>(g, bytes, rows, to);
  add_group<4, false, false>(g, bytes, rows, to);
}

}  // namespace

int64_t rounded_rows_size(const Wna16Args& a) {
  return a.m * (groups_of(a) * 3 * static_cast<int64_t>(sizeof(float)) + padded(a));
}

void rounded_rows(const Wna16Args& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { round_rows<decltype(x)>(a, begin, end); });
}

void linear_rounded(const Wna16Args& a, int64_t row0, int64_t begin, int64_t end) {
  alignas(64) float sums[kRowBlock * kPanel], scales[kPanel], mins[kPanel];
  const RoundedRows rows = rows_in(a);
  const Bytes bytes(a);
  const int64_t groups = groups_of(a), depth = padded(a), count = min(kRowBlock, a.m - row0);
  for (int64_t panel = begin; panel < end; panel++) {
    std::memset(sums, 0, count * kPanel * sizeof(float));
    for (int64_t g = 0; g < groups; g++) {
      const int64_t k = g * a.group, stop = g + 1 < groups ? k + a.group : depth, first = row0 * groups + g;
      expand(a.scales, panel, groups, g, 1, scales);
      if (a.mins.values) expand(a.mins, panel, groups, g, 1, mins);
      const PanelGroup part{rows.values + row0 * depth + k,
                            rows.scales + first,
                            rows.totals + first,
                            rows.starts + first,
                            a.packed + (panel * depth + k) * kPanel * a.bits / 8,
                            depth,
                            groups,
                            (stop - k) / kCodeDepth,
                            scales,
                            a.mins.values ? mins : nullptr};
      add_any(a, part, bytes, count, sums);
    }
    with_type(a.dtype, [&](auto x) { write_panel<decltype(x)>(a, FloatSums{sums}, row0, count, panel); });
  }
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
