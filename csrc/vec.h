// Vectors of sixteen lanes in the registers of one instruction set: f32x16, u32x16 (32-bit integers, the signed ones
// too) and mask16.  The set comes from the compiler's flags (CMakeLists.txt) and its name is the namespace.  Code here
// stays inside that namespace and calls no inline function of the standard library: the linker could pick the copy that
// was compiled for a newer processor, for an older one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(TOKSERVE_NEON)  // not __ARM_NEON, which the portable kernels are compiled with, too
#include <arm_neon.h>
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
constexpr float kNegInf = -__builtin_inff();

TOKSERVE_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <class T>
TOKSERVE_INLINE T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
TOKSERVE_INLINE T max(T a, T b) {
  return a < b ? b : a;
}

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#elif defined(TOKSERVE_NEON)
#include "vec_neon.h"
#else
#include "vec_portable.h"
#endif

TOKSERVE_INLINE f32x16 zeros() { return broadcast(0.0f); }
#if !defined(TOKSERVE_NEON)  // which has an instruction for it
TOKSERVE_INLINE f32x16 fma(float a, f32x16 b, f32x16 c) { return fma(broadcast(a), b, c); }
#endif
TOKSERVE_INLINE u32x16 iota() {
  static const uint32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(lane);
}

// Rounds to nearest even in integer arithmetic: exact for subnormals, too; NaN stays NaN.
TOKSERVE_INLINE void store(bf16* p, f32x16 a) {
#if defined(__AVX512BF16__)  // whose instruction does the same, but takes subnormals as zero
  if (__builtin_expect(_mm512_fpclass_ps_mask(a.v, 0x20) == 0, 1)) {
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
  }
#endif
  const u32x16 word = as_u32(a);
  const u32x16 rounded = shr<16>(word + broadcast_u32(0x7fff) + (shr<16>(word) & broadcast_u32(1)));
  const u32x16 quiet = shr<16>(word) ^ (broadcast_u32(0x40) & (shr<16>(word) ^ broadcast_u32(0x40)));  // sets bit 6
  store_low_halves(&p->bits, select(a == a, rounded, quiet));
}

// The first n elements, 16 if n is larger; the other lanes are zero.
template <class T>
TOKSERVE_INLINE f32x16 load_partial(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T whole[kLanes];
  std::memset(whole, 0, sizeof whole);
  for (int64_t i = 0; i < n; i++) whole[i] = p[i];
  return load(whole);
}
template <class T>
TOKSERVE_INLINE void store_partial(T* p, f32x16 a, int64_t n) {
  if (n >= kLanes) return store(p, a);
  T whole[kLanes];
  store(whole, a);
  for (int64_t i = 0; i < n; i++) p[i] = whole[i];
}

// Fixed trees over the lanes, the same in every instruction set.
#if defined(__AVX2__)
#if defined(__AVX512F__)
TOKSERVE_INLINE __m256 low_half(f32x16 a) { return _mm512_castps512_ps256(a.v); }
TOKSERVE_INLINE __m256 high_half(f32x16 a) { return _mm512_extractf32x8_ps(a.v, 1); }
#else
TOKSERVE_INLINE __m256 low_half(f32x16 a) { return a.a; }
TOKSERVE_INLINE __m256 high_half(f32x16 a) { return a.b; }
#endif
TOKSERVE_INLINE float reduce_sum(f32x16 a) {
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TOKSERVE_INLINE float reduce_max(f32x16 a) {  // operands in the order of max(): the first if either is not a number
  const __m256 eight = _mm256_max_ps(high_half(a), low_half(a));
  const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  const __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
  return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
}
#elif !defined(TOKSERVE_NEON)
TOKSERVE_INLINE float reduce_sum(f32x16 a) {
  float v[16];
  store(v, a);
  for (int i = 0; i < 8; i++) v[i] += v[i + 8];
  for (int i = 0; i < 4; i++) v[i] += v[i + 4];
  return (v[0] + v[2]) + (v[1] + v[3]);
}
TOKSERVE_INLINE float reduce_max(f32x16 a) {
  float v[16];
  store(v, a);
  for (int i = 0; i < 8; i++) v[i] = max(v[i], v[i + 8]);
  for (int i = 0; i < 4; i++) v[i] = max(v[i], v[i + 4]);
  return max(max(v[0], v[2]), max(v[1], v[3]));
}
#endif

// e^x for x <= 88.3 (above: e^88.3).  Below -87.3, where the result would be subnormal: exactly zero.
TOKSERVE_INLINE f32x16 exp(f32x16 x) {
  const f32x16 clamped = vmax(broadcast(-87.33f), vmin(broadcast(88.37f), x));
  const u32x16 n = round_to_i32(clamped * broadcast(1.44269504088896341f));
  const f32x16 whole = from_i32(n);
  f32x16 r = fma(whole, broadcast(-0.693359375f), clamped);
  r = fma(whole, broadcast(2.12194440e-4f), r);  // |r| <= ln(2) / 2
  f32x16 p = broadcast(1.0f / 5040);  // Taylor: the error at ln(2) / 2 is below half a unit in the last place
  p = fma(p, r, broadcast(1.0f / 720));
  p = fma(p, r, broadcast(1.0f / 120));
  p = fma(p, r, broadcast(1.0f / 24));
  p = fma(p, r, broadcast(1.0f / 6));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p * r, r, r) + broadcast(1.0f);
  const f32x16 scaled = p * as_f32(shl<23>(n + broadcast_u32(127)));
  return select(x < broadcast(-87.33f), zeros(), scaled);
}

// The natural logarithm of a normal positive x, by x = 2^n m with m in [1/sqrt(2), sqrt(2)) and
// log m = 2 artanh(s), s = (m - 1) / (m + 1).
TOKSERVE_INLINE f32x16 log(f32x16 x) {
  const u32x16 shifted = as_u32(x) - broadcast_u32(0x3f3504f3);  // so that the exponent steps at sqrt(1/2)
  const u32x16 n = shr<23>(shifted + broadcast_u32(0x40000000)) - broadcast_u32(128);
  const f32x16 m = as_f32((shifted & broadcast_u32(0x007fffff)) + broadcast_u32(0x3f3504f3));
  const f32x16 f = m - broadcast(1.0f);
  const f32x16 s = f / (broadcast(2.0f) + f);
  const f32x16 z = s * s;
  f32x16 p = broadcast(2.0f / 9);
  p = fma(p, z, broadcast(2.0f / 7));
  p = fma(p, z, broadcast(2.0f / 5));
  p = fma(p, z, broadcast(2.0f / 3));
  const f32x16 whole = from_i32(n);
  // log m = f - s * (f - z p): accurate where m is close to one, since f is exact
  const f32x16 part = f - s * (f - z * p);
  return fma(whole, broadcast(0.693359375f), fma(whole, broadcast(-2.12194440e-4f), part));
}

// The same of one number.
TOKSERVE_INLINE float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(broadcast(x)));
  return lanes[0];
}
TOKSERVE_INLINE float log(float x) {
  float lanes[kLanes];
  store(lanes, log(broadcast(x)));
  return lanes[0];
}

#if !defined(TOKSERVE_NEON)
// Of 64 elements in order: x[j] gets elements j, j + 4, j + 8, ...
TOKSERVE_INLINE void deinterleave(f32x16* x) {
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
#endif

// Rounds n down to a multiple of kLanes.
TOKSERVE_INLINE int64_t round_down_to_lanes(int64_t n) { return n & ~(kLanes - 1); }

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
