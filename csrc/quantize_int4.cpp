// quantize_int4: rows of floats rounded to the nearest of sixteen integers by group.  Each rounding is one fixed
// expression per element, without fma, so all instruction sets give the same bits.
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr float kLowest = -8.0f, kHighest = 7.0f;

// Rounded to nearest even; x is no NaN.
TOKSERVE_INLINE uint16_t to_bf16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

TOKSERVE_INLINE float from_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

// Codes of a group of n elements; returns its scale: the element of the largest magnitude becomes -8.  A group that is
// not finite has a scale that is not a number, and codes of zero.
template <class T>
uint16_t round_group(const T* x, int64_t n, uint8_t* codes) {
  f32x16 high = zeros(), low = zeros(), not_finite = zeros();  // x - x is zero only for finite x
  for (int64_t i = 0; i < n; i += kLanes) {
    const f32x16 value = load_partial(x + i, n - i);
    high = vmax(value, high);
    low = vmax(zeros() - value, low);
    not_finite = not_finite + (value - value);
  }
  if (reduce_sum(not_finite) != 0.0f) {
    std::memset(codes, 8, n);
    return 0x7fc0;
  }
  const float most = reduce_max(high), least = reduce_max(low);
  const uint16_t scale = to_bf16((most >= least ? most : -least) / kLowest);
  const float divisor = from_bf16(scale);
  const f32x16 inverse = broadcast(divisor == 0.0f ? 0.0f : 1.0f / divisor);
  for (int64_t i = 0; i < n; i += kLanes) {
    const f32x16 scaled = load_partial(x + i, n - i) * inverse;
    const f32x16 bounded = vmin(broadcast(kHighest), vmax(broadcast(kLowest), scaled));
    uint32_t words[kLanes];
    store(words, round_to_i32(bounded) + broadcast_u32(8));
    uint8_t bytes[kLanes];
    for (int64_t j = 0; j < kLanes; j++) bytes[j] = static_cast<uint8_t>(words[j]);
    if (n - i >= kLanes) std::memcpy(codes + i, bytes, kLanes);
    else std::memcpy(codes + i, bytes, n - i);
  }
  return scale;
}

}  // namespace

void quantize_int4(const Int4Args& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t groups = (a.k + a.group - 1) / a.group;
    for (int64_t row = begin; row < end; row++) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * a.group, n = min(a.group, a.k - first);
        a.scales[row * groups + g] = round_group(x + first, n, a.codes + row * a.k + first);
      }
    }
  });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
