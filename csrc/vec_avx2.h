// f32x16, u32x16 and mask16 in two AVX2 registers each (with FMA and F16C).
// Included by vec.h only, inside the namespace of the instruction set.
#pragma once

struct f32x16 {
  __m256 a, b;
};
struct u32x16 {
  __m256i a, b;
};
struct mask16 {
  __m256 a, b;
};

TOKSERVE_INLINE f32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TOKSERVE_INLINE f32x16 operator+(f32x16 x, f32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TOKSERVE_INLINE f32x16 operator-(f32x16 x, f32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TOKSERVE_INLINE f32x16 operator*(f32x16 x, f32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TOKSERVE_INLINE f32x16 operator/(f32x16 x, f32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
TOKSERVE_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
TOKSERVE_INLINE f32x16 vmax(f32x16 x, f32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
TOKSERVE_INLINE f32x16 vmin(f32x16 x, f32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
TOKSERVE_INLINE mask16 operator<(f32x16 x, f32x16 y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
TOKSERVE_INLINE mask16 operator==(f32x16 x, f32x16 y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
TOKSERVE_INLINE f32x16 select(mask16 m, f32x16 x, f32x16 y) {
  return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)};
}
TOKSERVE_INLINE uint32_t mask_bits(mask16 m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a) | _mm256_movemask_ps(m.b) << 8);
}
TOKSERVE_INLINE mask16 mask_below(int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i limit = _mm256_set1_epi32(static_cast<int>(n));
  const __m256i upper = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, lane)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, upper))};
}

TOKSERVE_INLINE u32x16 broadcast_u32(uint32_t x) {
  return {_mm256_set1_epi32(static_cast<int>(x)), _mm256_set1_epi32(static_cast<int>(x))};
}
TOKSERVE_INLINE u32x16 load(const uint32_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
TOKSERVE_INLINE void store(uint32_t* p, u32x16 x) {
  __m256i* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
TOKSERVE_INLINE u32x16 operator+(u32x16 x, u32x16 y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
TOKSERVE_INLINE u32x16 operator-(u32x16 x, u32x16 y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
TOKSERVE_INLINE u32x16 operator&(u32x16 x, u32x16 y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
TOKSERVE_INLINE u32x16 operator^(u32x16 x, u32x16 y) {
  return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
template <int N>
TOKSERVE_INLINE u32x16 shl(u32x16 x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
TOKSERVE_INLINE u32x16 shr(u32x16 x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>  // of signed integers
TOKSERVE_INLINE u32x16 sar(u32x16 x) {
  return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
TOKSERVE_INLINE u32x16 round_to_i32(f32x16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
TOKSERVE_INLINE f32x16 from_i32(u32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
TOKSERVE_INLINE u32x16 as_u32(f32x16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
TOKSERVE_INLINE f32x16 as_f32(u32x16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
TOKSERVE_INLINE u32x16 select(mask16 m, u32x16 x, u32x16 y) { return as_u32(select(m, as_f32(x), as_f32(y))); }
// Both halves are exact as floats and so is high * 65536, so that the sum is rounded once.
TOKSERVE_INLINE f32x16 from_u32(u32x16 x) {
  return from_i32(shr<16>(x)) * broadcast(65536.0f) + from_i32(x & broadcast_u32(0xffff));
}

TOKSERVE_INLINE void multiply_high_low(__m256i x, __m256i factor, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(x, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
TOKSERVE_INLINE void multiply_high_low(u32x16 x, uint32_t y, u32x16& high, u32x16& low) {
  const __m256i factor = _mm256_set1_epi64x(y);
  multiply_high_low(x.a, factor, high.a, low.a);
  multiply_high_low(x.b, factor, high.b, low.b);
}

TOKSERVE_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TOKSERVE_INLINE __m128i load_u16x8(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
TOKSERVE_INLINE f32x16 load(const bf16* p) {
  const u32x16 wide = {_mm256_cvtepu16_epi32(load_u16x8(p)), _mm256_cvtepu16_epi32(load_u16x8(p + 8))};
  return as_f32(shl<16>(wide));
}
TOKSERVE_INLINE f32x16 load(const f16* p) {
  return {_mm256_cvtph_ps(load_u16x8(p)), _mm256_cvtph_ps(load_u16x8(p + 8))};
}
TOKSERVE_INLINE void store(float* p, f32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
TOKSERVE_INLINE void store_low_halves(uint16_t* p, u32x16 x) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i both = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
TOKSERVE_INLINE void store(f16* p, f32x16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
