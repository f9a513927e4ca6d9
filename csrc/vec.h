// Sixteen floats (F), sixteen 32-bit words (I) and sixteen truth values (M), in the registers of one instruction set.
// The set comes from the compiler's flags (CMakeLists.txt) and its name is the namespace: code here must stay inside
// that namespace and call no inline function of the standard library, or the linker could hand the copy compiled for
// a newer processor to an older one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define TOKSERVE_INLINE inline __attribute__((always_inline))

namespace tokserve {
namespace TOKSERVE_ISA {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

constexpr int64_t kLanes = 16;

template <class T>
TOKSERVE_INLINE T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
TOKSERVE_INLINE T most(T a, T b) {
  return a < b ? b : a;
}

#if defined(__AVX512F__)

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct M {
  __mmask16 v;
};

TOKSERVE_INLINE F fset(float x) { return {_mm512_set1_ps(x)}; }
TOKSERVE_INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
TOKSERVE_INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
TOKSERVE_INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
TOKSERVE_INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
TOKSERVE_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TOKSERVE_INLINE F vmax(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }  // b if either is not a number
TOKSERVE_INLINE F vmin(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
TOKSERVE_INLINE M operator<(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
TOKSERVE_INLINE M operator==(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
TOKSERVE_INLINE F select(M m, F a, F b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }  // m ? a : b
TOKSERVE_INLINE I select(M m, I a, I b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }
TOKSERVE_INLINE uint32_t bits(M m) { return m.v; }
TOKSERVE_INLINE M first(int64_t n) { return {static_cast<__mmask16>((1u << n) - 1)}; }  // lanes below n <= 16

TOKSERVE_INLINE I iset(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
TOKSERVE_INLINE I iload(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
TOKSERVE_INLINE void istore(uint32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
TOKSERVE_INLINE I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
TOKSERVE_INLINE I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
TOKSERVE_INLINE I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
TOKSERVE_INLINE I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
TOKSERVE_INLINE I shl(I a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
TOKSERVE_INLINE I shr(I a) {
  return {_mm512_srli_epi32(a.v, N)};
}
TOKSERVE_INLINE I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest even
TOKSERVE_INLINE F from_int(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
TOKSERVE_INLINE F from_unsigned(I a) { return {_mm512_cvtepu32_ps(a.v)}; }
TOKSERVE_INLINE I as_int(F a) { return {_mm512_castps_si512(a.v)}; }
TOKSERVE_INLINE F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }

// high:low = a * b for each lane, unsigned.
TOKSERVE_INLINE void multiply(I a, uint32_t b, I& high, I& low) {
  const __m512i factor = _mm512_set1_epi64(b);
  const __m512i even = _mm512_mul_epu32(a.v, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), factor);
  low.v = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  high.v = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

TOKSERVE_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
TOKSERVE_INLINE F load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
TOKSERVE_INLINE F load(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TOKSERVE_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
TOKSERVE_INLINE void store_words(uint16_t* p, I a) {  // the low halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
TOKSERVE_INLINE void store(f16* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct M {
  __m256 a, b;
};

TOKSERVE_INLINE F fset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TOKSERVE_INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TOKSERVE_INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TOKSERVE_INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TOKSERVE_INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
TOKSERVE_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
TOKSERVE_INLINE F vmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
TOKSERVE_INLINE F vmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
TOKSERVE_INLINE M operator<(F x, F y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
TOKSERVE_INLINE M operator==(F x, F y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
TOKSERVE_INLINE F select(M m, F x, F y) { return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)}; }
TOKSERVE_INLINE uint32_t bits(M m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a) | _mm256_movemask_ps(m.b) << 8);
}
TOKSERVE_INLINE M first(int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i limit = _mm256_set1_epi32(static_cast<int>(n));
  const __m256i upper = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, lane)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, upper))};
}

TOKSERVE_INLINE I iset(uint32_t x) {
  return {_mm256_set1_epi32(static_cast<int>(x)), _mm256_set1_epi32(static_cast<int>(x))};
}
TOKSERVE_INLINE I iload(const uint32_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
TOKSERVE_INLINE void istore(uint32_t* p, I x) {
  __m256i* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
TOKSERVE_INLINE I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
TOKSERVE_INLINE I operator-(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
TOKSERVE_INLINE I operator&(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
TOKSERVE_INLINE I operator^(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N>
TOKSERVE_INLINE I shl(I x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
TOKSERVE_INLINE I shr(I x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
TOKSERVE_INLINE I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
TOKSERVE_INLINE F from_int(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
TOKSERVE_INLINE I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
TOKSERVE_INLINE F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
TOKSERVE_INLINE I select(M m, I x, I y) { return as_int(select(m, as_float(x), as_float(y))); }
// Both halves are exact as floats and so is high * 65536, so that the sum is rounded once.
TOKSERVE_INLINE F from_unsigned(I x) {
  return from_int(shr<16>(x)) * fset(65536.0f) + from_int(x & iset(0xffff));
}

TOKSERVE_INLINE void multiply(__m256i x, __m256i factor, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(x, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
TOKSERVE_INLINE void multiply(I x, uint32_t y, I& high, I& low) {
  const __m256i factor = _mm256_set1_epi64x(y);
  multiply(x.a, factor, high.a, low.a);
  multiply(x.b, factor, high.b, low.b);
}

TOKSERVE_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TOKSERVE_INLINE __m128i load_words(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
TOKSERVE_INLINE F load(const bf16* p) {
  const I wide = {_mm256_cvtepu16_epi32(load_words(p)), _mm256_cvtepu16_epi32(load_words(p + 8))};
  return as_float(shl<16>(wide));
}
TOKSERVE_INLINE F load(const f16* p) { return {_mm256_cvtph_ps(load_words(p)), _mm256_cvtph_ps(load_words(p + 8))}; }
TOKSERVE_INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
TOKSERVE_INLINE void store_words(uint16_t* p, I x) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i both = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
TOKSERVE_INLINE void store(f16* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

#else  // plain C++: arrays that the compiler may put in whatever vector registers there are

struct F {
  float v[16];
};
struct I {
  uint32_t v[16];
};
struct M {
  uint32_t v[16];  // all ones or zero
};

template <class R, class Each>
TOKSERVE_INLINE R lanes(Each each) {
  R r;
  for (int i = 0; i < 16; i++) r.v[i] = each(i);
  return r;
}

TOKSERVE_INLINE F fset(float x) { return lanes<F>([&](int) { return x; }); }
TOKSERVE_INLINE F operator+(F a, F b) { return lanes<F>([&](int i) { return a.v[i] + b.v[i]; }); }
TOKSERVE_INLINE F operator-(F a, F b) { return lanes<F>([&](int i) { return a.v[i] - b.v[i]; }); }
TOKSERVE_INLINE F operator*(F a, F b) { return lanes<F>([&](int i) { return a.v[i] * b.v[i]; }); }
TOKSERVE_INLINE F operator/(F a, F b) { return lanes<F>([&](int i) { return a.v[i] / b.v[i]; }); }
TOKSERVE_INLINE F fma(F a, F b, F c) {
#if defined(__FP_FAST_FMAF)
  return lanes<F>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
#else  // no such instruction: two roundings instead of one
  return lanes<F>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
#endif
}
TOKSERVE_INLINE F vmax(F a, F b) { return lanes<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
TOKSERVE_INLINE F vmin(F a, F b) { return lanes<F>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
TOKSERVE_INLINE M operator<(F a, F b) { return lanes<M>([&](int i) { return a.v[i] < b.v[i] ? ~0u : 0u; }); }
TOKSERVE_INLINE M operator==(F a, F b) { return lanes<M>([&](int i) { return a.v[i] == b.v[i] ? ~0u : 0u; }); }
TOKSERVE_INLINE F select(M m, F a, F b) { return lanes<F>([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; }); }
TOKSERVE_INLINE I select(M m, I a, I b) { return lanes<I>([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; }); }
TOKSERVE_INLINE uint32_t bits(M m) {
  uint32_t all = 0;
  for (int i = 0; i < 16; i++) all |= (m.v[i] & 1u) << i;
  return all;
}
TOKSERVE_INLINE M first(int64_t n) { return lanes<M>([&](int i) { return i < n ? ~0u : 0u; }); }

TOKSERVE_INLINE I iset(uint32_t x) { return lanes<I>([&](int) { return x; }); }
TOKSERVE_INLINE I iload(const uint32_t* p) { return lanes<I>([&](int i) { return p[i]; }); }
TOKSERVE_INLINE void istore(uint32_t* p, I a) { std::memcpy(p, a.v, sizeof a.v); }
TOKSERVE_INLINE I operator+(I a, I b) { return lanes<I>([&](int i) { return a.v[i] + b.v[i]; }); }
TOKSERVE_INLINE I operator-(I a, I b) { return lanes<I>([&](int i) { return a.v[i] - b.v[i]; }); }
TOKSERVE_INLINE I operator&(I a, I b) { return lanes<I>([&](int i) { return a.v[i] & b.v[i]; }); }
TOKSERVE_INLINE I operator^(I a, I b) { return lanes<I>([&](int i) { return a.v[i] ^ b.v[i]; }); }
template <int N>
TOKSERVE_INLINE I shl(I a) {
  return lanes<I>([&](int i) { return a.v[i] << N; });
}
template <int N>
TOKSERVE_INLINE I shr(I a) {
  return lanes<I>([&](int i) { return a.v[i] >> N; });
}
// Adding and taking away 1.5 * 2^23 rounds to the nearest even integer; only used where |x| < 2^22.
TOKSERVE_INLINE I to_int(F a) {
  return lanes<I>([&](int i) { return static_cast<uint32_t>(static_cast<int32_t>((a.v[i] + 12582912.0f) - 12582912.0f)); });
}
TOKSERVE_INLINE F from_int(I a) { return lanes<F>([&](int i) { return static_cast<float>(static_cast<int32_t>(a.v[i])); }); }
TOKSERVE_INLINE F from_unsigned(I a) { return lanes<F>([&](int i) { return static_cast<float>(a.v[i]); }); }
TOKSERVE_INLINE I as_int(F a) {
  I r;
  std::memcpy(r.v, a.v, sizeof r.v);
  return r;
}
TOKSERVE_INLINE F as_float(I a) {
  F r;
  std::memcpy(r.v, a.v, sizeof r.v);
  return r;
}
TOKSERVE_INLINE void multiply(I a, uint32_t b, I& high, I& low) {
  for (int i = 0; i < 16; i++) {
    const uint64_t product = static_cast<uint64_t>(a.v[i]) * b;
    low.v[i] = static_cast<uint32_t>(product);
    high.v[i] = static_cast<uint32_t>(product >> 32);
  }
}

TOKSERVE_INLINE F load(const float* p) { return lanes<F>([&](int i) { return p[i]; }); }
TOKSERVE_INLINE F load(const bf16* p) {
  return as_float(lanes<I>([&](int i) { return static_cast<uint32_t>(p[i].bits) << 16; }));
}
// Moves exponent and mantissa into place and scales by 2^112, which also gives subnormals their value; 2^16 and above
// (infinity and not-a-number) get the exponent of those.
TOKSERVE_INLINE F load(const f16* p) {
  const I word = lanes<I>([&](int i) { return static_cast<uint32_t>(p[i].bits); });
  const F value = as_float(shl<13>(word & iset(0x7fff))) * fset(5.192296858534828e33f);
  const F special = as_float(as_int(value) ^ (iset(0x7f800000) & (as_int(value) ^ iset(0xffffffff))));
  const I sign = shl<16>(word & iset(0x8000));
  return as_float(as_int(select(value < fset(65536.0f), value, special)) ^ sign);
}
TOKSERVE_INLINE void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
TOKSERVE_INLINE void store_words(uint16_t* p, I a) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<uint16_t>(a.v[i]);
}
TOKSERVE_INLINE uint16_t half_bits(uint32_t word) {  // float32 bits to float16 bits, to nearest even
  const uint32_t sign = word >> 16 & 0x8000, size = word & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (size >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 65536 or more
  if (size >= 0x38800000) return static_cast<uint16_t>(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
  float value;  // subnormal: adding 0.5 aligns the mantissa to multiples of 2^-24 and rounds it there
  std::memcpy(&value, &size, sizeof value);
  value += 0.5f;
  uint32_t rounded;
  std::memcpy(&rounded, &value, sizeof rounded);
  return static_cast<uint16_t>(sign | (rounded - 0x3f000000));
}
TOKSERVE_INLINE void store(f16* p, F a) {
  const I word = as_int(a);
  for (int i = 0; i < 16; i++) p[i].bits = half_bits(word.v[i]);
}

#endif

TOKSERVE_INLINE F fzero() { return fset(0.0f); }
TOKSERVE_INLINE I iota() {
  static const uint32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return iload(lane);
}

// Round to nearest even in integers: exact for subnormals too; what is not a number stays so.
TOKSERVE_INLINE void store(bf16* p, F a) {
  const I word = as_int(a);
  const I rounded = shr<16>(word + iset(0x7fff) + (shr<16>(word) & iset(1)));
  const I quiet = shr<16>(word) ^ (iset(0x40) & (shr<16>(word) ^ iset(0x40)));  // sets bit 6
  store_words(&p->bits, select(a == a, rounded, quiet));
}

// The first n <= 16 elements; the other lanes are zero.
template <class T>
TOKSERVE_INLINE F load_part(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T whole[kLanes];
  std::memset(whole, 0, sizeof whole);
  for (int64_t i = 0; i < n; i++) whole[i] = p[i];
  return load(whole);
}
template <class T>
TOKSERVE_INLINE void store_part(T* p, F a, int64_t n) {
  if (n >= kLanes) return store(p, a);
  T whole[kLanes];
  store(whole, a);
  for (int64_t i = 0; i < n; i++) p[i] = whole[i];
}

// Fixed trees over the lanes, the same in every instruction set.
#if defined(__AVX2__)
#if defined(__AVX512F__)
TOKSERVE_INLINE __m256 low_half(F a) { return _mm512_castps512_ps256(a.v); }
TOKSERVE_INLINE __m256 high_half(F a) { return _mm512_extractf32x8_ps(a.v, 1); }
#else
TOKSERVE_INLINE __m256 low_half(F a) { return a.a; }
TOKSERVE_INLINE __m256 high_half(F a) { return a.b; }
#endif
TOKSERVE_INLINE float sum(F a) {
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TOKSERVE_INLINE float largest(F a) {  // operands in the order of most(): the first if either is not a number
  const __m256 eight = _mm256_max_ps(high_half(a), low_half(a));
  const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  const __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
  return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
}
#else
TOKSERVE_INLINE float sum(F a) {
  float v[16];
  store(v, a);
  for (int i = 0; i < 8; i++) v[i] += v[i + 8];
  for (int i = 0; i < 4; i++) v[i] += v[i + 4];
  return (v[0] + v[2]) + (v[1] + v[3]);
}
TOKSERVE_INLINE float largest(F a) {
  float v[16];
  store(v, a);
  for (int i = 0; i < 8; i++) v[i] = most(v[i], v[i + 8]);
  for (int i = 0; i < 4; i++) v[i] = most(v[i], v[i + 4]);
  return most(most(v[0], v[2]), most(v[1], v[3]));
}
#endif

// e^x for x <= 88.3 (above: e^88.3).  Below -87.3, where the result would be subnormal: exactly zero.
TOKSERVE_INLINE F exp(F x) {
  const F clamped = vmax(fset(-87.33f), vmin(fset(88.37f), x));
  const I n = to_int(clamped * fset(1.44269504088896341f));
  const F whole = from_int(n);
  F r = fma(whole, fset(-0.693359375f), clamped);
  r = fma(whole, fset(2.12194440e-4f), r);  // |r| <= ln(2) / 2
  F p = fset(1.0f / 5040);                  // Taylor: the error at ln(2) / 2 is below half a unit in the last place
  p = fma(p, r, fset(1.0f / 720));
  p = fma(p, r, fset(1.0f / 120));
  p = fma(p, r, fset(1.0f / 24));
  p = fma(p, r, fset(1.0f / 6));
  p = fma(p, r, fset(0.5f));
  p = fma(p * r, r, r) + fset(1.0f);
  const F scaled = p * as_float(shl<23>(n + iset(127)));
  return select(x < fset(-87.33f), fzero(), scaled);
}

// The natural logarithm of a normal positive x, by x = 2^n m with m in [1/sqrt(2), sqrt(2)) and
// log m = 2 artanh(s), s = (m - 1) / (m + 1).
TOKSERVE_INLINE F log(F x) {
  const I shifted = as_int(x) - iset(0x3f3504f3);  // so that the exponent steps at sqrt(1/2)
  const I n = shr<23>(shifted + iset(0x40000000)) - iset(128);
  const F m = as_float((shifted & iset(0x007fffff)) + iset(0x3f3504f3));
  const F f = m - fset(1.0f);
  const F s = f / (fset(2.0f) + f);
  const F z = s * s;
  F p = fset(2.0f / 9);
  p = fma(p, z, fset(2.0f / 7));
  p = fma(p, z, fset(2.0f / 5));
  p = fma(p, z, fset(2.0f / 3));
  const F whole = from_int(n);
  // log m = f - s * (f - z p): accurate where m is close to one, since f is exact
  const F part = f - s * (f - z * p);
  return fma(whole, fset(0.693359375f), fma(whole, fset(-2.12194440e-4f), part));
}

// The same of one number.
TOKSERVE_INLINE float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(fset(x)));
  return lanes[0];
}
TOKSERVE_INLINE float log(float x) {
  float lanes[kLanes];
  store(lanes, log(fset(x)));
  return lanes[0];
}

// Of 64 elements in order: x[j] gets elements j, j + 4, j + 8, ...
TOKSERVE_INLINE void deinterleave(F* x) {
#if defined(__AVX512F__)
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const __m512 evens[2] = {_mm512_permutex2var_ps(x[0].v, even, x[1].v), _mm512_permutex2var_ps(x[2].v, even, x[3].v)};
  const __m512 odds[2] = {_mm512_permutex2var_ps(x[0].v, odd, x[1].v), _mm512_permutex2var_ps(x[2].v, odd, x[3].v)};
  x[0].v = _mm512_permutex2var_ps(evens[0], even, evens[1]);
  x[1].v = _mm512_permutex2var_ps(odds[0], even, odds[1]);
  x[2].v = _mm512_permutex2var_ps(evens[0], odd, evens[1]);
  x[3].v = _mm512_permutex2var_ps(odds[0], odd, odds[1]);
#else
  float in_order[4 * kLanes], apart[4 * kLanes];
  for (int j = 0; j < 4; j++) store(in_order + j * kLanes, x[j]);
  for (int i = 0; i < 4 * kLanes; i++) apart[i % 4 * kLanes + i / 4] = in_order[i];
  for (int j = 0; j < 4; j++) x[j] = load(apart + j * kLanes);
#endif
}

// Rounds down to a multiple of a vector.
TOKSERVE_INLINE int64_t whole_lanes(int64_t n) { return n & ~(kLanes - 1); }

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
