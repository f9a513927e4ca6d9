// F, I and M in four NEON registers each (any 64-bit ARM).
// Included by vec.h only, inside the namespace of the instruction set.
#pragma once

struct F {
  float32x4_t v[4];
};
struct I {
  uint32x4_t v[4];
};
struct M {
  uint32x4_t v[4];  // all ones or zero
};

template <class R, class Each>
TOKSERVE_INLINE R quarters(Each each) {
  return {{each(0), each(1), each(2), each(3)}};
}

// clang-format off: a line per operation
TOKSERVE_INLINE F fset(float x) { return quarters<F>([&](int) { return vdupq_n_f32(x); }); }
TOKSERVE_INLINE F operator+(F a, F b) { return quarters<F>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
TOKSERVE_INLINE F operator-(F a, F b) { return quarters<F>([&](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
TOKSERVE_INLINE F operator*(F a, F b) { return quarters<F>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
TOKSERVE_INLINE F operator/(F a, F b) { return quarters<F>([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
TOKSERVE_INLINE F fma(F a, F b, F c) { return quarters<F>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
// FMLA by element: loading a occupies no vector port, as a load to all lanes does.
TOKSERVE_INLINE F fma(float a, F b, F c) { return quarters<F>([&](int i) { return vfmaq_n_f32(c.v[i], b.v[i], a); }); }
TOKSERVE_INLINE M operator<(F a, F b) { return quarters<M>([&](int i) { return vcltq_f32(a.v[i], b.v[i]); }); }
TOKSERVE_INLINE M operator==(F a, F b) { return quarters<M>([&](int i) { return vceqq_f32(a.v[i], b.v[i]); }); }
TOKSERVE_INLINE F select(M m, F a, F b) {
  return quarters<F>([&](int i) { return vbslq_f32(m.v[i], a.v[i], b.v[i]); });
}
TOKSERVE_INLINE I select(M m, I a, I b) {
  return quarters<I>([&](int i) { return vbslq_u32(m.v[i], a.v[i], b.v[i]); });
}
// Not FMAX and FMIN, which order the two zeros and return what is not a number from either side.
TOKSERVE_INLINE F vmax(F a, F b) { return select(b < a, a, b); }  // b if either is not a number
TOKSERVE_INLINE F vmin(F a, F b) { return select(a < b, a, b); }
TOKSERVE_INLINE uint32_t bits(M m) {
  const uint8x16_t place = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(m.v[0]), vreinterpretq_u16_u32(m.v[1]));
  const uint16x8_t high = vuzp1q_u16(vreinterpretq_u16_u32(m.v[2]), vreinterpretq_u16_u32(m.v[3]));
  const uint8x16_t set = vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), place);
  return vaddv_u8(vget_low_u8(set)) | static_cast<uint32_t>(vaddv_u8(vget_high_u8(set))) << 8;
}

TOKSERVE_INLINE I iset(uint32_t x) { return quarters<I>([&](int) { return vdupq_n_u32(x); }); }
TOKSERVE_INLINE I iload(const uint32_t* p) { return quarters<I>([&](int i) { return vld1q_u32(p + 4 * i); }); }
TOKSERVE_INLINE void istore(uint32_t* p, I a) {
  for (int i = 0; i < 4; i++) vst1q_u32(p + 4 * i, a.v[i]);
}
TOKSERVE_INLINE I operator+(I a, I b) { return quarters<I>([&](int i) { return vaddq_u32(a.v[i], b.v[i]); }); }
TOKSERVE_INLINE I operator-(I a, I b) { return quarters<I>([&](int i) { return vsubq_u32(a.v[i], b.v[i]); }); }
TOKSERVE_INLINE I operator&(I a, I b) { return quarters<I>([&](int i) { return vandq_u32(a.v[i], b.v[i]); }); }
TOKSERVE_INLINE I operator^(I a, I b) { return quarters<I>([&](int i) { return veorq_u32(a.v[i], b.v[i]); }); }
template <int N>
TOKSERVE_INLINE I shl(I a) {
  return quarters<I>([&](int i) { return vshlq_n_u32(a.v[i], N); });
}
template <int N>
TOKSERVE_INLINE I shr(I a) {
  return quarters<I>([&](int i) { return vshrq_n_u32(a.v[i], N); });
}
TOKSERVE_INLINE I to_int(F a) {  // to nearest even
  return quarters<I>([&](int i) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a.v[i])); });
}
TOKSERVE_INLINE F from_int(I a) {
  return quarters<F>([&](int i) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a.v[i])); });
}
TOKSERVE_INLINE F from_unsigned(I a) { return quarters<F>([&](int i) { return vcvtq_f32_u32(a.v[i]); }); }
TOKSERVE_INLINE I as_int(F a) { return quarters<I>([&](int i) { return vreinterpretq_u32_f32(a.v[i]); }); }
TOKSERVE_INLINE F as_float(I a) { return quarters<F>([&](int i) { return vreinterpretq_f32_u32(a.v[i]); }); }
TOKSERVE_INLINE M first(int64_t n) {
  static const uint32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return quarters<M>([&](int i) { return vcltq_u32(vld1q_u32(lane + 4 * i), vdupq_n_u32(static_cast<uint32_t>(n))); });
}

TOKSERVE_INLINE void multiply(I a, uint32_t b, I& high, I& low) {
  for (int i = 0; i < 4; i++) {
    const uint32x4_t lower = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a.v[i]), b));
    const uint32x4_t upper = vreinterpretq_u32_u64(vmull_high_n_u32(a.v[i], b));
    low.v[i] = vuzp1q_u32(lower, upper);
    high.v[i] = vuzp2q_u32(lower, upper);
  }
}

TOKSERVE_INLINE F load(const float* p) { return quarters<F>([&](int i) { return vld1q_f32(p + 4 * i); }); }
TOKSERVE_INLINE F load(const bf16* p) {
  const uint16_t* words = &p->bits;
  return as_float(quarters<I>([&](int i) { return vshll_n_u16(vld1_u16(words + 4 * i), 16); }));
}
TOKSERVE_INLINE F load(const f16* p) {
  const uint16_t* words = &p->bits;
  return quarters<F>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(words + 4 * i))); });
}
TOKSERVE_INLINE void store(float* p, F a) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
TOKSERVE_INLINE void store_words(uint16_t* p, I a) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vmovn_u32(a.v[i]));
}
TOKSERVE_INLINE void store(f16* p, F a) {
  for (int i = 0; i < 4; i++) vst1_u16(&p->bits + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
// clang-format on

// The trees of vec.h: lanes eight apart, then four, two and one.
TOKSERVE_INLINE float sum(F a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
TOKSERVE_INLINE float largest(F a) {  // operands in the order of most(): the first if either is not a number
  const auto larger = [](float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), y, x); };
  const float32x4_t four = larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3]));
  const float32x4_t two = larger(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(larger(two, vextq_f32(two, two, 1)), 0);
}

// Of 64 elements in order: x[j] gets elements j, j + 4, j + 8, ...
TOKSERVE_INLINE void deinterleave(F* x) {
  F in_order[4] = {x[0], x[1], x[2], x[3]};
  for (int i = 0; i < 4; i++) {
    const float32x4_t* v = in_order[i].v;
    const float32x4_t evens[2] = {vuzp1q_f32(v[0], v[1]), vuzp1q_f32(v[2], v[3])};
    const float32x4_t odds[2] = {vuzp2q_f32(v[0], v[1]), vuzp2q_f32(v[2], v[3])};
    x[0].v[i] = vuzp1q_f32(evens[0], evens[1]);
    x[1].v[i] = vuzp1q_f32(odds[0], odds[1]);
    x[2].v[i] = vuzp2q_f32(evens[0], evens[1]);
    x[3].v[i] = vuzp2q_f32(odds[0], odds[1]);
  }
}
