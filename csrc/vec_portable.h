// f32x16, u32x16 and mask16 as arrays, which the compiler may put into whatever vector registers there are.
// Included by vec.h only, inside the namespace of the instruction set.
#pragma once

struct f32x16 {
  float v[16];
};
struct u32x16 {
  uint32_t v[16];
};
struct mask16 {
  uint32_t v[16];  // all ones or zero
};

template <class R, class Lane>
TOKSERVE_INLINE R per_lane(Lane lane) {
  R r;
  for (int i = 0; i < 16; i++) r.v[i] = lane(i);
  return r;
}

#define PER_LANE(type, expression) per_lane<type>([&]([[maybe_unused]] int i) { return expression; })

TOKSERVE_INLINE f32x16 broadcast(float x) { return PER_LANE(f32x16, x); }
TOKSERVE_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return PER_LANE(f32x16, a.v[i] + b.v[i]); }
TOKSERVE_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return PER_LANE(f32x16, a.v[i] - b.v[i]); }
TOKSERVE_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return PER_LANE(f32x16, a.v[i] * b.v[i]); }
TOKSERVE_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return PER_LANE(f32x16, a.v[i] / b.v[i]); }
// a * b + c rounded once, as the instruction of other processors rounds it.  The product is exact in double; the sum is
// rounded to odd in double, after which rounding to float gives the float nearest to the exact sum (S. Boldo,
// G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
TOKSERVE_INLINE float fma_lane(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * b, nearest = product + c;
  const double part = nearest - product, error = (product - (nearest - part)) + (c - part);
  const double growth = error * nearest;  // positive: the exact sum is larger in magnitude
  uint64_t word;
  std::memcpy(&word, &nearest, sizeof word);
  const uint64_t even = ~word & 1;
  word += growth > 0.0 ? even : 0;
  word -= growth < 0.0 ? even : 0;
  double odd;
  std::memcpy(&odd, &word, sizeof odd);
  return static_cast<float>(odd);
#endif
}
TOKSERVE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return PER_LANE(f32x16, fma_lane(a.v[i], b.v[i], c.v[i])); }
TOKSERVE_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return PER_LANE(f32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
TOKSERVE_INLINE f32x16 vmin(f32x16 a, f32x16 b) { return PER_LANE(f32x16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
TOKSERVE_INLINE mask16 operator<(f32x16 a, f32x16 b) { return PER_LANE(mask16, a.v[i] < b.v[i] ? ~0u : 0u); }
TOKSERVE_INLINE mask16 operator==(f32x16 a, f32x16 b) { return PER_LANE(mask16, a.v[i] == b.v[i] ? ~0u : 0u); }
TOKSERVE_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return PER_LANE(f32x16, m.v[i] ? a.v[i] : b.v[i]); }
TOKSERVE_INLINE u32x16 select(mask16 m, u32x16 a, u32x16 b) { return PER_LANE(u32x16, m.v[i] ? a.v[i] : b.v[i]); }
TOKSERVE_INLINE uint32_t mask_bits(mask16 m) {
  uint32_t all = 0;
  for (int i = 0; i < 16; i++) all |= (m.v[i] & 1u) << i;
  return all;
}
TOKSERVE_INLINE mask16 mask_below(int64_t n) { return PER_LANE(mask16, i < n ? ~0u : 0u); }

TOKSERVE_INLINE u32x16 broadcast_u32(uint32_t x) { return PER_LANE(u32x16, x); }
TOKSERVE_INLINE u32x16 load(const uint32_t* p) { return PER_LANE(u32x16, p[i]); }
TOKSERVE_INLINE void store(uint32_t* p, u32x16 a) { std::memcpy(p, a.v, sizeof a.v); }
TOKSERVE_INLINE u32x16 operator+(u32x16 a, u32x16 b) { return PER_LANE(u32x16, a.v[i] + b.v[i]); }
TOKSERVE_INLINE u32x16 operator-(u32x16 a, u32x16 b) { return PER_LANE(u32x16, a.v[i] - b.v[i]); }
TOKSERVE_INLINE u32x16 operator&(u32x16 a, u32x16 b) { return PER_LANE(u32x16, a.v[i] & b.v[i]); }
TOKSERVE_INLINE u32x16 operator^(u32x16 a, u32x16 b) { return PER_LANE(u32x16, a.v[i] ^ b.v[i]); }
template <int N>
TOKSERVE_INLINE u32x16 shl(u32x16 a) {
  return PER_LANE(u32x16, a.v[i] << N);
}
template <int N>
TOKSERVE_INLINE u32x16 shr(u32x16 a) {
  return PER_LANE(u32x16, a.v[i] >> N);
}
template <int N>  // of signed integers
TOKSERVE_INLINE u32x16 sar(u32x16 a) {
  return PER_LANE(u32x16, static_cast<uint32_t>(static_cast<int32_t>(a.v[i]) >> N));
}
// Adding and taking away 1.5 * 2^23 rounds to the nearest even integer; only used where |x| < 2^22.
TOKSERVE_INLINE u32x16 round_to_i32(f32x16 a) {
  return PER_LANE(u32x16, static_cast<uint32_t>(static_cast<int32_t>((a.v[i] + 12582912.0f) - 12582912.0f)));
}
TOKSERVE_INLINE f32x16 from_i32(u32x16 a) { return PER_LANE(f32x16, static_cast<float>(static_cast<int32_t>(a.v[i]))); }
TOKSERVE_INLINE f32x16 from_u32(u32x16 a) { return PER_LANE(f32x16, static_cast<float>(a.v[i])); }
TOKSERVE_INLINE u32x16 as_u32(f32x16 a) {
  u32x16 r;
  std::memcpy(r.v, a.v, sizeof r.v);
  return r;
}
TOKSERVE_INLINE f32x16 as_f32(u32x16 a) {
  f32x16 r;
  std::memcpy(r.v, a.v, sizeof r.v);
  return r;
}
TOKSERVE_INLINE void multiply_high_low(u32x16 a, uint32_t b, u32x16& high, u32x16& low) {
  for (int i = 0; i < 16; i++) {
    const uint64_t product = static_cast<uint64_t>(a.v[i]) * b;
    low.v[i] = static_cast<uint32_t>(product);
    high.v[i] = static_cast<uint32_t>(product >> 32);
  }
}

TOKSERVE_INLINE f32x16 load(const float* p) { return PER_LANE(f32x16, p[i]); }
TOKSERVE_INLINE f32x16 load(const bf16* p) { return as_f32(PER_LANE(u32x16, static_cast<uint32_t>(p[i].bits) << 16)); }
// Moves exponent and mantissa into place and scales by 2^112, which also gives subnormals their value; 2^16 and above
// (infinity and not-a-number) get the exponent of those.
TOKSERVE_INLINE f32x16 load(const f16* p) {
  const u32x16 word = PER_LANE(u32x16, static_cast<uint32_t>(p[i].bits));
  const f32x16 value = as_f32(shl<13>(word & broadcast_u32(0x7fff))) * broadcast(5.192296858534828e33f);
  const f32x16 special =
      as_f32(as_u32(value) ^ (broadcast_u32(0x7f800000) & (as_u32(value) ^ broadcast_u32(0xffffffff))));
  const u32x16 sign = shl<16>(word & broadcast_u32(0x8000));
  return as_f32(as_u32(select(value < broadcast(65536.0f), value, special)) ^ sign);
}
TOKSERVE_INLINE void store(float* p, f32x16 a) { std::memcpy(p, a.v, sizeof a.v); }
TOKSERVE_INLINE void store_low_halves(uint16_t* p, u32x16 a) {
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
TOKSERVE_INLINE void store(f16* p, f32x16 a) {
  const u32x16 word = as_u32(a);
  for (int i = 0; i < 16; i++) p[i].bits = half_bits(word.v[i]);
}

#undef PER_LANE
