// f32x16, u32x16 and mask16 in one AVX-512 register each (F, VL, BW and DQ).
// Included by vec.h only, inside the namespace of the instruction set.
#pragma once

struct f32x16 {
  __m512 v;
};
struct u32x16 {
  __m512i v;
};
struct mask16 {
  __mmask16 v;
};

TOKSERVE_INLINE f32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
TOKSERVE_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
TOKSERVE_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
TOKSERVE_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TOKSERVE_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
TOKSERVE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TOKSERVE_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b if either is not a number
TOKSERVE_INLINE f32x16 vmin(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
TOKSERVE_INLINE mask16 operator<(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
TOKSERVE_INLINE mask16 operator==(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
TOKSERVE_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  return {_mm512_mask_blend_ps(m.v, b.v, a.v)};
}  // m ? a : b
TOKSERVE_INLINE u32x16 select(mask16 m, u32x16 a, u32x16 b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }
TOKSERVE_INLINE uint32_t mask_bits(mask16 m) { return m.v; }
TOKSERVE_INLINE mask16 mask_below(int64_t n) { return {static_cast<__mmask16>((1u << n) - 1)}; }  // lanes below n <= 16

TOKSERVE_INLINE u32x16 broadcast_u32(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
TOKSERVE_INLINE u32x16 load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
TOKSERVE_INLINE void store(uint32_t* p, u32x16 a) { _mm512_storeu_si512(p, a.v); }
TOKSERVE_INLINE u32x16 operator+(u32x16 a, u32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
TOKSERVE_INLINE u32x16 operator-(u32x16 a, u32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
TOKSERVE_INLINE u32x16 operator&(u32x16 a, u32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
TOKSERVE_INLINE u32x16 operator^(u32x16 a, u32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
TOKSERVE_INLINE u32x16 shl(u32x16 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
TOKSERVE_INLINE u32x16 shr(u32x16 a) {
  return {_mm512_srli_epi32(a.v, N)};
}
template <int N>  // of signed integers
TOKSERVE_INLINE u32x16 sar(u32x16 a) {
  return {_mm512_srai_epi32(a.v, N)};
}
TOKSERVE_INLINE u32x16 round_to_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest even
TOKSERVE_INLINE f32x16 from_i32(u32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
TOKSERVE_INLINE f32x16 from_u32(u32x16 a) { return {_mm512_cvtepu32_ps(a.v)}; }
TOKSERVE_INLINE u32x16 as_u32(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
TOKSERVE_INLINE f32x16 as_f32(u32x16 a) { return {_mm512_castsi512_ps(a.v)}; }

// high:low = a * b for each lane, unsigned.
TOKSERVE_INLINE void multiply_high_low(u32x16 a, uint32_t b, u32x16& high, u32x16& low) {
  const __m512i factor = _mm512_set1_epi64(b);
  const __m512i even = _mm512_mul_epu32(a.v, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), factor);
  low.v = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  high.v = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

TOKSERVE_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
TOKSERVE_INLINE f32x16 load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
TOKSERVE_INLINE f32x16 load(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TOKSERVE_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
TOKSERVE_INLINE void store_low_halves(uint16_t* p, u32x16 a) {  // the low halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
TOKSERVE_INLINE void store(f16* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
