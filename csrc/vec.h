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

template <class T>
TOKSERVE_INLINE T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
TOKSERVE_INLINE T most(T a, T b) {
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

TOKSERVE_INLINE F fzero() { return fset(0.0f); }
#if !defined(TOKSERVE_NEON)  // which has an instruction for it
TOKSERVE_INLINE F fma(float a, F b, F c) { return fma(fset(a), b, c); }
#endif
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
#elif !defined(TOKSERVE_NEON)
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

#if !defined(TOKSERVE_NEON)
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
#endif

// Rounds down to a multiple of a vector.
TOKSERVE_INLINE int64_t whole_lanes(int64_t n) { return n & ~(kLanes - 1); }

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
