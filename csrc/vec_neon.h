// f32x16, u32x16 and mask16 in four NEON registers each (any 64-bit ARM).
// Included by vec.h only, inside the namespace of the instruction set.
#pragma once

struct f32x16 {
  float32x4_t v[4];
};
struct u32x16 {
  uint32x4_t v[4];
};
struct mask16 {
  uint32x4_t v[4];  // all ones or zero
};

template <class R, class Quarter>
TOKSERVE_INLINE R per_quarter(Quarter quarter) {
  return {{quarter(0), quarter(1), quarter(2), quarter(3)}};
}

#define PER_QUARTER(type, expression) per_quarter<type>([&]([[maybe_unused]] int i) { return expression; })

TOKSERVE_INLINE f32x16 broadcast(float x) { return PER_QUARTER(f32x16, vdupq_n_f32(x)); }
TOKSERVE_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return PER_QUARTER(f32x16, vaddq_f32(a.v[i], b.v[i])); }
TOKSERVE_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return PER_QUARTER(f32x16, vsubq_f32(a.v[i], b.v[i])); }
TOKSERVE_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return PER_QUARTER(f32x16, vmulq_f32(a.v[i], b.v[i])); }
TOKSERVE_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return PER_QUARTER(f32x16, vdivq_f32(a.v[i], b.v[i])); }
TOKSERVE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return PER_QUARTER(f32x16, vfmaq_f32(c.v[i], a.v[i], b.v[i]));
}
// FMLA by element: loading a occupies no vector port, as a load to all lanes does.
TOKSERVE_INLINE f32x16 fma(float a, f32x16 b, f32x16 c) { return PER_QUARTER(f32x16, vfmaq_n_f32(c.v[i], b.v[i], a)); }
TOKSERVE_INLINE mask16 operator<(f32x16 a, f32x16 b) { return PER_QUARTER(mask16, vcltq_f32(a.v[i], b.v[i])); }
TOKSERVE_INLINE mask16 operator==(f32x16 a, f32x16 b) { return PER_QUARTER(mask16, vceqq_f32(a.v[i], b.v[i])); }
TOKSERVE_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  return PER_QUARTER(f32x16, vbslq_f32(m.v[i], a.v[i], b.v[i]));
}
TOKSERVE_INLINE u32x16 select(mask16 m, u32x16 a, u32x16 b) {
  return PER_QUARTER(u32x16, vbslq_u32(m.v[i], a.v[i], b.v[i]));
}
// Not FMAX and FMIN, which order the two zeros and return what is not a number from either side.
TOKSERVE_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return select(b < a, a, b); }  // b if either is not a number
TOKSERVE_INLINE f32x16 vmin(f32x16 a, f32x16 b) { return select(a < b, a, b); }
TOKSERVE_INLINE uint32_t mask_bits(mask16 m) {
  const uint8x16_t weights = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(m.v[0]), vreinterpretq_u16_u32(m.v[1]));
  const uint16x8_t high = vuzp1q_u16(vreinterpretq_u16_u32(m.v[2]), vreinterpretq_u16_u32(m.v[3]));
  const uint8x16_t set = vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), weights);
  return vaddv_u8(vget_low_u8(set)) | static_cast<uint32_t>(vaddv_u8(vget_high_u8(set))) << 8;
}

TOKSERVE_INLINE u32x16 broadcast_u32(uint32_t x) { return PER_QUARTER(u32x16, vdupq_n_u32(x)); }
TOKSERVE_INLINE u32x16 load(const uint32_t* p) { return PER_QUARTER(u32x16, vld1q_u32(p + 4 * i)); }
TOKSERVE_INLINE void store(uint32_t* p, u32x16 a) {
  for (int i = 0; i < 4; i++) vst1q_u32(p + 4 * i, a.v[i]);
}
TOKSERVE_INLINE u32x16 operator+(u32x16 a, u32x16 b) { return PER_QUARTER(u32x16, vaddq_u32(a.v[i], b.v[i])); }
TOKSERVE_INLINE u32x16 operator-(u32x16 a, u32x16 b) { return PER_QUARTER(u32x16, vsubq_u32(a.v[i], b.v[i])); }
TOKSERVE_INLINE u32x16 operator&(u32x16 a, u32x16 b) { return PER_QUARTER(u32x16, vandq_u32(a.v[i], b.v[i])); }
TOKSERVE_INLINE u32x16 operator^(u32x16 a, u32x16 b) { return PER_QUARTER(u32x16, veorq_u32(a.v[i], b.v[i])); }
template <int N>
TOKSERVE_INLINE u32x16 shl(u32x16 a) {
  return PER_QUARTER(u32x16, vshlq_n_u32(a.v[i], N));
}
template <int N>
TOKSERVE_INLINE u32x16 shr(u32x16 a) {
  return PER_QUARTER(u32x16, vshrq_n_u32(a.v[i], N));
}
template <int N>  // of signed integers
TOKSERVE_INLINE u32x16 sar(u32x16 a) {
  return PER_QUARTER(u32x16, vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a.v[i]), N)));
}
TOKSERVE_INLINE u32x16 round_to_i32(f32x16 a) {  // to nearest even
  return PER_QUARTER(u32x16, vreinterpretq_u32_s32(vcvtnq_s32_f32(a.v[i])));
}
TOKSERVE_INLINE f32x16 from_i32(u32x16 a) { return PER_QUARTER(f32x16, vcvtq_f32_s32(vreinterpretq_s32_u32(a.v[i]))); }
TOKSERVE_INLINE f32x16 from_u32(u32x16 a) { return PER_QUARTER(f32x16, vcvtq_f32_u32(a.v[i])); }
TOKSERVE_INLINE u32x16 as_u32(f32x16 a) { return PER_QUARTER(u32x16, vreinterpretq_u32_f32(a.v[i])); }
TOKSERVE_INLINE f32x16 as_f32(u32x16 a) { return PER_QUARTER(f32x16, vreinterpretq_f32_u32(a.v[i])); }
TOKSERVE_INLINE mask16 mask_below(int64_t n) {
  static const uint32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return PER_QUARTER(mask16, vcltq_u32(vld1q_u32(lane + 4 * i), vdupq_n_u32(static_cast<uint32_t>(n))));
}

TOKSERVE_INLINE void multiply_high_low(u32x16 a, uint32_t b, u32x16& high, u32x16& low) {
  for (int i = 0; i < 4; i++) {
    const uint32x4_t lower = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a.v[i]), b));
    const uint32x4_t upper = vreinterpretq_u32_u64(vmull_high_n_u32(a.v[i], b));
    low.v[i] = vuzp1q_u32(lower, upper);
    high.v[i] = vuzp2q_u32(lower, upper);
  }
}

TOKSERVE_INLINE f32x16 load(const float* p) { return PER_QUARTER(f32x16, vld1q_f32(p + 4 * i)); }
TOKSERVE_INLINE f32x16 load(const bf16* p) {
  const uint16_t* words = &p->bits;
  return as_f32(PER_QUARTER(u32x16, vshll_n_u16(vld1_u16(words + 4 * i), 16)));
}
TOKSERVE_INLINE f32x16 load(const f16* p) {
  const uint16_t* words = &p->bits;
  return PER_QUARTER(f32x16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(words + 4 * i))));
}
TOKSERVE_INLINE void store(float* p, f32x16 a) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
TOKSERVE_INLINE void store_low_halves(uint16_t* p, u32x16 a) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vmovn_u32(a.v[i]));
}
TOKSERVE_INLINE void store(f16* p, f32x16 a) {
  for (int i = 0; i < 4; i++) vst1_u16(&p->bits + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}

// The trees of vec.h: lanes eight apart, then four, two and one.
TOKSERVE_INLINE float reduce_sum(f32x16 a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
TOKSERVE_INLINE float reduce_max(f32x16 a) {  // operands in the order of max(): the first if either is not a number
  const auto larger = [](float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), y, x); };
  const float32x4_t four = larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3]));
  const float32x4_t two = larger(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(larger(two, vextq_f32(two, two, 1)), 0);
}

// Of 64 elements in order: x[j] gets elements j, j + 4, j + 8, ...
TOKSERVE_INLINE void deinterleave(f32x16* x) {
  f32x16 in_order[4] = {x[0], x[1], x[2], x[3]};
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

#undef PER_QUARTER
