// F, I and M in one AVX-512 register each (F, VL, BW and DQ).
// Included by vec.h only, inside the namespace of the instruction set.
#pragma once

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
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
