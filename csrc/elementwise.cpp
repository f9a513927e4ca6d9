// Norms, gated activations, rotary embedding and the write into the KV pages: one row in, one row out.
// Every row is read in vectors of 16 from its start, so a row's bits depend on the row and its width only.
#include "activation.h"
#include "pages.h"
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

// 1 / sqrt(mean square + eps) of a row of n floats: four partial sums, added in a fixed tree.
template <class T>
float norm_scale(const T* x, int64_t n, float eps) {
  f32x16 part[4] = {zeros(), zeros(), zeros(), zeros()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; j++) {
      const f32x16 value = load(x + i + j * kLanes);
      part[j] = fma(value, value, part[j]);
    }
  }
  for (int j = 0; i < n; i += kLanes, j++) {
    const f32x16 value = load_partial(x + i, n - i);
    part[j] = fma(value, value, part[j]);
  }
  const float square = reduce_sum((part[0] + part[1]) + (part[2] + part[3])) / static_cast<float>(n);
  return 1.0f / __builtin_sqrtf(square + eps);
}

template <class T>
void add_rows(const T* x, const T* residual, T* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) + load(residual + i));
  if (i < n) store_partial(out + i, load_partial(x + i, n - i) + load_partial(residual + i, n - i), n - i);
}

template <class T, class W>
TOKSERVE_INLINE void norm_row(const T* x, const W* weight, T* out, int64_t n, float eps) {
  const f32x16 scale = broadcast(norm_scale(x, n, eps));
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < n) store_partial(out + i, load_partial(x + i, n - i) * scale * load_partial(weight + i, n - i), n - i);
}

template <class T, class W>
void rms_norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  const int64_t n = a.width;
  const W* weight = static_cast<const W*>(a.weight);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * n;
    T* out = static_cast<T*>(a.out) + row * n;
    if (a.residual) {
      T* total = static_cast<T*>(a.sum) + row * n;
      add_rows(x, static_cast<const T*>(a.residual) + row * n, total, n);
      x = total;
    }
    norm_row(x, weight, out, n, a.eps);
  }
}

template <class T, class Activation>
void gated_rows(const GatedArgs& a, int64_t begin, int64_t end) {
  const Activation activation;
  const int64_t n = a.width;
  for (int64_t row = begin; row < end; row++) {
    const T* gate = static_cast<const T*>(a.x) + row * 2 * n;
    const T* up = gate + n;
    T* out = static_cast<T*>(a.out) + row * n;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, activation(load(gate + i)) * load(up + i));
    if (i < n) store_partial(out + i, activation(load_partial(gate + i, n - i)) * load_partial(up + i, n - i), n - i);
  }
}

// `out` may be x.
template <class T>
void rotate(const T* x, T* out, const float* cos, const float* sin, int64_t half, int64_t dim) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = min(kLanes, half - i);
    const f32x16 c = load_partial(cos + i, n), s = load_partial(sin + i, n);
    const f32x16 first_half = load_partial(x + i, n), second_half = load_partial(x + half + i, n);
    store_partial(out + i, first_half * c - second_half * s, n);
    store_partial(out + half + i, second_half * c + first_half * s, n);
  }
  if (out != x) std::memcpy(out + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(T));
}

template <class T>
void rope_rows(const RopeArgs& a, int64_t begin, int64_t end) {
  const int64_t half = a.rot / 2;
  for (int64_t t = begin; t < end; t++) {
    const float* cos = a.table + a.positions[t] * a.rot;
    const T* q = static_cast<const T*>(a.q) + t * a.q_stride;
    const T* k = static_cast<const T*>(a.k) + t * a.k_stride;
    T* q_out = static_cast<T*>(a.q_out) + t * a.q_heads * a.dim;
    T* k_out = static_cast<T*>(a.k_out) + t * a.k_heads * a.dim;
    for (int64_t h = 0; h < a.q_heads; h++) rotate(q + h * a.dim, q_out + h * a.dim, cos, cos + half, half, a.dim);
    for (int64_t h = 0; h < a.k_heads; h++) rotate(k + h * a.dim, k_out + h * a.dim, cos, cos + half, half, a.dim);
  }
}

// A slot's position: the offset of its page (all heads), and its token in the page.
struct Slot {
  int64_t first, token;
};
Slot locate_slot(int64_t slot, int64_t heads, int64_t page, int64_t dim) {
  return {slot / page * heads * page * dim, slot % page};
}

template <class T, class W>
void qkv_rows(const QkvArgs& a, int64_t begin, int64_t end, T* key) {
  const int64_t half = a.rot / 2, dim = a.dim;
  const PageLayout<T> layout{a.page, dim};
  for (int64_t t = begin; t < end; t++) {
    const float* cos = a.table + a.positions[t] * a.rot;
    const auto norm_and_rotate = [&](const T* x, const void* weight, T* out) {
      if (weight) norm_row(x, static_cast<const W*>(weight), out, dim, a.eps);
      rotate(weight ? out : x, out, cos, cos + half, half, dim);
    };
    const T* x = static_cast<const T*>(a.qkv) + t * (a.q_heads + 2 * a.k_heads) * dim;
    T* q_out = static_cast<T*>(a.q_out) + t * a.q_heads * dim;
    for (int64_t h = 0; h < a.q_heads; h++, x += dim) norm_and_rotate(x, a.q_weight, q_out + h * dim);
    const Slot slot = locate_slot(a.slots[t], a.k_heads, a.page, dim);
    for (int64_t h = 0; h < a.k_heads; h++, x += dim) {
      const int64_t head = slot.first + h * a.page * dim;
      norm_and_rotate(x, a.k_weight, key);
      layout.put_key(static_cast<T*>(a.k_cache) + head, slot.token, key);
      layout.put_value(static_cast<T*>(a.v_cache) + head, slot.token, x + a.k_heads * dim);
    }
  }
}

template <class T>
void store_rows(const StoreArgs& a, int64_t begin, int64_t end) {
  const PageLayout<T> layout{a.page, a.dim};
  for (int64_t t = begin; t < end; t++) {
    const Slot slot = locate_slot(a.slots[t], a.heads, a.page, a.dim);
    for (int64_t h = 0; h < a.heads; h++) {
      const int64_t head = slot.first + h * a.page * a.dim;
      layout.put_key(static_cast<T*>(a.k_cache) + head, slot.token,
                     static_cast<const T*>(a.k) + t * a.k_stride + h * a.dim);
      layout.put_value(static_cast<T*>(a.v_cache) + head, slot.token,
                       static_cast<const T*>(a.v) + t * a.v_stride + h * a.dim);
    }
  }
}

}  // namespace

void rms_norm(const NormArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    if (a.weight_dtype == DType::f32) rms_norm_rows<T, float>(a, begin, end);
    else rms_norm_rows<T, T>(a, begin, end);
  });
}

void silu_mul(const GatedArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { gated_rows<decltype(x), Silu>(a, begin, end); });
}

void gelu_mul(const GatedArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { gated_rows<decltype(x), Gelu>(a, begin, end); });
}

void rope(const RopeArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { rope_rows<decltype(x)>(a, begin, end); });
}

void norm_rope_store(const QkvArgs& a, int64_t begin, int64_t end, char* scratch) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    if (a.weight_dtype == DType::f32) qkv_rows<T, float>(a, begin, end, reinterpret_cast<T*>(scratch));
    else qkv_rows<T, T>(a, begin, end, reinterpret_cast<T*>(scratch));
  });
}

void store_kv(const StoreArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { store_rows<decltype(x)>(a, begin, end); });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
