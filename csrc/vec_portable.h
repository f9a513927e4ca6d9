// F, I and M as arrays, which the compiler may put into whatever vector registers there are.
// Included by vec.h only, inside the namespace of the instruction set.
#pragma once

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

// clang-format off: a line per operation
TOKSERVE_INLINE F fset(float x) { return lanes<F>([&](int) { return x; }); }
TOKSERVE_INLINE F operator+(F a, F b) { return lanes<F>([&](int i) { return a.v[i] + b.v[i]; }); }
TOKSERVE_INLINE F operator-(F a, F b) { return lanes<F>([&](int i) { return a.v[i] - b.v[i]; }); }
TOKSERVE_INLINE F operator*(F a, F b) { return lanes<F>([&](int i) { return a.v[i] * b.v[i]; }); }
TOKSERVE_INLINE F operator/(F a, F b) { return lanes<F>([&](int i) { return a.v[i] / b.v[i]; }); }
// a * b + c rounded once, as the instruction of other processors rounds it.  The product is exact in double; the sum is
// rounded to odd in double, after which rounding to float gives the float nearest to the exact sum (S. Boldo,
// G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
TOKSERVE_INLINE float fused(float a, float b, float c) {
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
TOKSERVE_INLINE F fma(F a, F b, F c) { return lanes<F>([&](int i) { return fused(a.v[i], b.v[i], c.v[i]); }); }
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
  return lanes<I>([&](int i) {
    return static_cast<uint32_t>(static_cast<int32_t>((a.v[i] + 12582912.0f) - 12582912.0f));
  });
}
TOKSERVE_INLINE F from_int(I a) {
  return lanes<F>([&](int i) { return static_cast<float>(static_cast<int32_t>(a.v[i])); });
}
TOKSERVE_INLINE F from_unsigned(I a) { return lanes<F>([&](int i) { return static_cast<float>(a.v[i]); }); }
// clang-format on

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

TOKSERVE_INLINE F load(const float* p) {
  return lanes<F>([&](int i) { return p[i]; });
}
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
