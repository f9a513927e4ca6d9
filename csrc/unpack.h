// Weights of 4 or 8 bits, unpacked into the layout that the products read: exact integers as bfloat16 in pairs, where
// the processor multiplies those, else as float32.
//
// A panel of 64 outputs is read front to back.  Eight elements of K take 256 bytes of 4-bit codes, a 16-bit word for
// each output and parity of k, whose nibble j belongs to element 2 j + parity; 8-bit values lie in pairs:
//
//    4 bits   [K / 8][64][2] words: k 0, 2, 4, 6 of a column, then k 1, 3, 5, 7
//    8 bits   [K / 2][64][2] bytes, signed
#pragma once

#include <type_traits>

#include "kernels.h"
#include "tile.h"
#include "vec.h"

namespace tokserve {
namespace TOKSERVE_ISA {

constexpr int64_t kCodeDepth = 8;        // elements of K that a panel groups; K is padded to whole ones
constexpr int64_t kCodesAhead = 4096;    // bytes of the panel that are prefetched ahead of their use
constexpr int64_t kUnpackedDepth = 128;  // elements of K of a panel that are unpacked at a time

// What products of T read: Pairs where they are one instruction, else float32.
template <class T>
struct UnpackedFor {
  using Format = Plain<float>;
};
#if defined(__AVX512BF16__)
template <>
struct UnpackedFor<bf16> {
  using Format = Pairs;
};
#endif

TOKSERVE_INLINE f32x16 load_i8(const int8_t* p) {
#if defined(__AVX512F__)
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
#else
  float values[kLanes];
  for (int i = 0; i < kLanes; i++) values[i] = p[i];
  return load(values);
#endif
}

// Sixteen factors as float32, indexed by four bits of each lane, from bit SHIFT on.
struct Factors {
#if defined(__AVX512F__)
  __m512 table;
  TOKSERVE_INLINE explicit Factors(const int8_t* factors) : table(load_i8(factors).v) {}
  template <int SHIFT>
  TOKSERVE_INLINE f32x16 at(u32x16 words) const {
    return {_mm512_permutexvar_ps(shr<SHIFT>(words).v, table)};
  }
#elif defined(__AVX2__)
  f32x16 table;
  TOKSERVE_INLINE explicit Factors(const int8_t* factors) : table(load_i8(factors)) {}
  TOKSERVE_INLINE __m256 choose(__m256i codes) const {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));  // bit 3 selects
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.a, codes), _mm256_permutevar8x32_ps(table.b, codes), upper);
  }
  template <int SHIFT>
  TOKSERVE_INLINE f32x16 at(u32x16 words) const {
    const u32x16 codes = shr<SHIFT>(words);
    return {choose(codes.a), choose(codes.b)};
  }
#elif defined(TOKSERVE_NEON)
  int8x16_t table;
  TOKSERVE_INLINE explicit Factors(const int8_t* factors) : table(vld1q_s8(factors)) {}
  template <int SHIFT>
  TOKSERVE_INLINE f32x16 at(u32x16 words) const {  // bytes beyond the table become zero
    const u32x16 indices = shr<SHIFT>(words) & broadcast_u32(15);
    return per_quarter<f32x16>([&](int i) {
      const uint32x4_t index = vorrq_u32(indices.v[i], vdupq_n_u32(0xffffff00));
      const int32x4_t value = vreinterpretq_s32_s8(vqtbl1q_s8(table, vreinterpretq_u8_u32(index)));
      return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(value, 24), 24));
    });
  }
#else
  float table[16];
  explicit Factors(const int8_t* factors) {
    for (int i = 0; i < 16; i++) table[i] = factors[i];
  }
  template <int SHIFT>
  TOKSERVE_INLINE f32x16 at(u32x16 words) const {
    return per_lane<f32x16>([&](int i) { return table[words.v[i] >> SHIFT & 15]; });
  }
#endif
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// Factors -8 to 7 (SIGNED) or 0 to 15, in ascending order: shifts take fewer instructions than a table.
template <bool SIGNED>
struct LinearFactors {
  static constexpr int kFirst = SIGNED ? -8 : 0;
  explicit LinearFactors(const int8_t*) {}
  template <int SHIFT>
  TOKSERVE_INLINE f32x16 at(u32x16 words) const {
    if constexpr (!SIGNED) return from_i32(shr<SHIFT>(words) & broadcast_u32(15));
    const u32x16 flipped = words ^ broadcast_u32(0x88888888);  // a code less 8, as four bits with a sign
    if constexpr (SHIFT == 28) return from_i32(sar<28>(flipped));
    return from_i32(sar<28>(shl<28 - SHIFT>(flipped)));
  }
  static bool fit(const int8_t* factors) {
    for (int i = 0; i < 16; i++) {
      if (factors[i] != kFirst + i) return false;
    }
    return true;
  }
};
#endif

// A reader makes weights of a block of eight elements of K of a panel: read(block, column, f) calls f(k, weights), k
// ascending, for sixteen columns from `column` on.
template <class Table>
struct Codes {  // 4 bits, as float32
  static constexpr int kBits = 4;
  Table table;
  explicit Codes(const int8_t* factors) : table(factors) {}
  template <class F, int K = 0>
  TOKSERVE_INLINE void each(u32x16 words, const F& f) const {
    f(K, table.template at<16 * (K % 2) + 4 * (K / 2)>(words));
    if constexpr (K + 1 < kCodeDepth) each<F, K + 1>(words, f);
  }
  template <class F>
  TOKSERVE_INLINE void read(const uint8_t* block, int64_t column, const F& f) const {
    __builtin_prefetch(block + column * 4 + kCodesAhead, 0, 2);
    each(load(reinterpret_cast<const uint32_t*>(block) + column), f);
  }
};

struct Values {  // 8 bits, as float32
  static constexpr int kBits = 8;
  template <class F>
  TOKSERVE_INLINE void read(const uint8_t* block, int64_t column, const F& f) const {
    for (int k = 0; k < kCodeDepth; k += 2, block += kPanel * 2) {
      if (column % (2 * kLanes) == 0) __builtin_prefetch(block + column * 2 + kCodesAhead, 0, 2);
      const u32x16 pairs = as_u32(load(reinterpret_cast<const bf16*>(block) + column));  // in the upper half
      f(k, from_i32(sar<24>(shl<8>(pairs))));
      f(k + 1, from_i32(sar<24>(pairs)));
    }
  }
};

#if defined(__AVX512BF16__)
struct PairCodes {  // 4 bits, as pairs
  static constexpr int kBits = 4;
  __m512i table;  // sixteen factors as bfloat16
  explicit PairCodes(const int8_t* factors) {
    const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(load_i8(factors).v), 16);
    table = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(high));  // twice: bit 4 of an index does not matter
  }
  TOKSERVE_INLINE u32x16 at(__m512i words) const { return {_mm512_permutexvar_epi16(words, table)}; }
  template <class F>
  TOKSERVE_INLINE void read(const uint8_t* block, int64_t column, const F& f) const {
    __builtin_prefetch(block + column * 4 + kCodesAhead, 0, 2);
    const __m512i words = _mm512_loadu_si512(block + column * 4);
    f(0, at(words));
    f(2, at(_mm512_srli_epi16(words, 4)));
    f(4, at(_mm512_srli_epi16(words, 8)));
    f(6, at(_mm512_srli_epi16(words, 12)));
  }
};

struct PairValues {  // 8 bits, as pairs
  static constexpr int kBits = 8;
  template <class F>
  TOKSERVE_INLINE void read(const uint8_t* block, int64_t column, const F& f) const {
    for (int k = 0; k < kCodeDepth; k += 2, block += kPanel * 2) {
      if (column % (2 * kLanes) == 0) __builtin_prefetch(block + column * 2 + kCodesAhead, 0, 2);
      const auto* pairs = reinterpret_cast<const int8_t*>(block) + column * 2;
      const __m512 low = load_i8(pairs).v, high = load_i8(pairs + kLanes).v;
      f(k, u32x16{reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low))});
    }
  }
};
#endif

// f(reader) with the reader of weights of 4 or 8 bits for products of a format.
template <class Format, class F>
TOKSERVE_INLINE void with_reader(int bits, [[maybe_unused]] const int8_t* factors, const F& f) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Format, Pairs>) return bits == 4 ? f(PairCodes(factors)) : f(PairValues());
#endif
  if constexpr (std::is_same_v<Format, Plain<float>>) {
    if (bits == 8) return f(Values());
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (LinearFactors<true>::fit(factors)) return f(Codes<LinearFactors<true>>(factors));
    if (LinearFactors<false>::fit(factors)) return f(Codes<LinearFactors<false>>(factors));
#endif
    return f(Codes<Factors>(factors));
  }
}

TOKSERVE_INLINE void store_weights(float* to, f32x16 weights) { store(to, weights); }
[[maybe_unused]] TOKSERVE_INLINE void store_weights(bf16* to, u32x16 pairs) {
  store(reinterpret_cast<uint32_t*>(to), pairs);
}

// `depth` elements of K of a panel, a multiple of kCodeDepth, in the format's layout.
template <class Format, class Reader>
void unpack(const Reader& reader, const uint8_t* panel, int64_t depth, typename Format::Weight* out) {
  for (int64_t k = 0; k < depth; k += kCodeDepth) {
    for (int64_t column = 0; column < kPanel; column += kLanes) {
      reader.read(panel, column,
                  [&](int i, auto weights) { store_weights(out + i * kPanel + column * Format::kDepth, weights); });
    }
    panel += kPanel * kCodeDepth * Reader::kBits / 8;
    out += kPanel * kCodeDepth;
  }
}

#if defined(__AVX512BF16__)
// Weights [depth / 2][64][2] times a scale per column; the products must be numbers of bfloat16.
inline void scale_weights(bf16* weights, int64_t depth, const float* scales) {
  for (int64_t i = 0; i < depth * kPanel; i += 32) {
    const f32x16 scale = load(scales + i / 2 % kPanel);
    const u32x16 pair = load(reinterpret_cast<const uint32_t*>(weights + i));
    const f32x16 even = as_f32(shl<16>(pair)) * scale, odd = as_f32(pair & broadcast_u32(0xffff0000)) * scale;
    store(reinterpret_cast<uint32_t*>(weights + i), shr<16>(as_u32(even)) + (as_u32(odd) & broadcast_u32(0xffff0000)));
  }
}
#endif
// Weights [depth][64] times a scale per column.
[[maybe_unused]] inline void scale_weights(float* weights, int64_t depth, const float* scales) {
  for (int64_t i = 0; i < depth * kPanel; i += kLanes)
    store(weights + i, load(weights + i) * load(scales + i % kPanel));
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
