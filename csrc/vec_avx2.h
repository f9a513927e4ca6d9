// F, I and M in two AVX2 registers each (with FMA and F16C).
// Included by vec.h only, inside the namespace of the instruction set.
#pragma once

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
TOKSERVE_INLINE F from_unsigned(I x) { return from_int(shr<16>(x)) * fset(65536.0f) + from_int(x & iset(0xffff)); }

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
