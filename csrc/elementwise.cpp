// Norms, gated activations, rotary embedding and the write into the KV pages: one row in, one row out.
// Every row is read in vectors of 16 from its start, so a row's bits depend on the row and its width only.
#include "activation.h"
#include "pages.h"
#include "rows.h"
#include "table.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

template <class T>
void add_row(const T* x, const T* residual, T* out, int64_t n, float multiplier) {
  const f32x16 factor = broadcast(multiplier);
  over_vectors(n, [&](int64_t i, int64_t count) {
    store_partial(out + i, load_partial(x + i, count) * factor + load_partial(residual + i, count), count);
  });
}

// The sum of f(vector) of a row: four partial sums, added in a fixed tree.  Lanes past the end are given as zero.
template <class T, class F>
TOKSERVE_INLINE float row_sum(const T* x, int64_t n, const F& f) {
  f32x16 part[4] = {zeros(), zeros(), zeros(), zeros()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; j++) part[j] = f(load(x + i + j * kLanes), kLanes, part[j]);
  }
  for (int j = 0; i < n; i += kLanes, j++) part[j] = f(load_partial(x + i, n - i), min(kLanes, n - i), part[j]);
  return reduce_sum((part[0] + part[1]) + (part[2] + part[3]));
}

template <class T, class W>
void layer_norm_row(const T* x, const W* weight, const W* bias, T* out, int64_t n, float eps) {
  const auto add = [](f32x16 value, int64_t, f32x16 sum) { return sum + value; };
  const f32x16 mean = broadcast(row_sum(x, n, add) / static_cast<float>(n));
  const auto add_square = [&](f32x16 value, int64_t count, f32x16 sum) {
    f32x16 apart = value - mean;
    if (count < kLanes) apart = select(mask_below(count), apart, zeros());
    return fma(apart, apart, sum);
  };
  const float square = row_sum(x, n, add_square) / static_cast<float>(n);
  const f32x16 scale = broadcast(1.0f / __builtin_sqrtf(square + eps));
  over_vectors(n, [&](int64_t i, int64_t count) {
    const f32x16 normed = (load_partial(x + i, count) - mean) * scale * load_partial(weight + i, count);
    store_partial(out + i, bias ? normed + load_partial(bias + i, count) : normed, count);
  });
}

template <class T, class W>
TOKSERVE_INLINE void norm_row(const T* x, const W* weight, T* out, int64_t n, float eps) {
  const f32x16 scale = broadcast(norm_scale(x, n, eps));
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < n) store_partial(out + i, load_partial(x + i, n - i) * scale * load_partial(weight + i, n - i), n - i);
}

template <class T, class W, bool kCentered>
void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  const int64_t n = a.width;
  const W *weight = static_cast<const W*>(a.weight), *bias = static_cast<const W*>(a.bias);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * n;
    T* out = static_cast<T*>(a.out) + row * n;
    if (a.residual) {
      T* total = static_cast<T*>(a.sum) + row * n;
      add_row(x, static_cast<const T*>(a.residual) + row * n, total, n, a.multiplier);
      x = total;
    }
    if constexpr (kCentered) layer_norm_row(x, weight, bias, out, n, a.eps);
    else norm_row(x, weight, out, n, a.eps);
  }
}

template <class T, class Function>
void activate_rows(const ActivateArgs& a, int64_t begin, int64_t end) {
  const Function function;
  const int64_t n = a.width;
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * n * (a.gated ? 2 : 1);
    T* out = static_cast<T*>(a.out) + row * n;
    over_vectors(n, [&](int64_t i, int64_t count) {
      const f32x16 active = function(load_partial(x + i, count));
      store_partial(out + i, a.gated ? active * load_partial(x + n + i, count) : active, count);
    });
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

// Pairs (2 i, 2 i + 1); `out` may be x.
template <class T>
void rotate_interleaved(const T* x, T* out, const float* cos, const float* sin, int64_t half, int64_t dim) {
  float pairs[2 * kLanes], apart[2 * kLanes];
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = min(kLanes, half - i);
    store(pairs, load_partial(x + 2 * i, min(kLanes, 2 * n)));
    store(pairs + kLanes, 2 * n > kLanes ? load_partial(x + 2 * i + kLanes, 2 * n - kLanes) : zeros());
    for (int64_t j = 0; j < 2 * kLanes; j++) apart[j % 2 * kLanes + j / 2] = pairs[j];
    const f32x16 c = load_partial(cos + i, n), s = load_partial(sin + i, n);
    const f32x16 first = load(apart), second = load(apart + kLanes);
    store(apart, first * c - second * s);
    store(apart + kLanes, second * c + first * s);
    for (int64_t j = 0; j < 2 * kLanes; j++) pairs[j] = apart[j % 2 * kLanes + j / 2];
    store_partial(out + 2 * i, load(pairs), min(kLanes, 2 * n));
    if (2 * n > kLanes) store_partial(out + 2 * i + kLanes, load(pairs + kLanes), 2 * n - kLanes);
  }
  if (out != x) std::memcpy(out + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(T));
}

// `out` may be x.
template <class T>
void rotate(const T* x, T* out, const float* cos, int64_t half, int64_t dim, bool interleaved) {
  const float* sin = cos + half;
  if (interleaved) return rotate_interleaved(x, out, cos, sin, half, dim);
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
    for (int64_t h = 0; h < a.q_heads; h++) rotate(q + h * a.dim, q_out + h * a.dim, cos, half, a.dim, a.interleaved);
    for (int64_t h = 0; h < a.k_heads; h++) rotate(k + h * a.dim, k_out + h * a.dim, cos, half, a.dim, a.interleaved);
  }
}

// A slot's position: the offset of its page (all heads), and its token in the page.
struct Slot {
  int64_t first, token;
};
Slot locate_slot(int64_t slot, int64_t heads, int64_t page, int64_t dim) {
  return {slot / page * heads * page * dim, slot % page};
}

// Calls f(first, count, slot) for runs of tokens first .. first + count - 1 whose slots follow each other in one page.
template <class F>
TOKSERVE_INLINE void over_slots(const int64_t* slots, int64_t begin, int64_t end, int64_t page, const F& f) {
  for (int64_t first = begin, i = begin; i < end; first = i) {
    do i++;
    while (i < end && slots[i] == slots[i - 1] + 1 && slots[i] % page != 0);
    f(first, i - first, slots[first]);
  }
}

template <class T, class W>
void qkv_rows(const QkvArgs& a, int64_t begin, int64_t end, T* keys) {
  const int64_t half = a.rot / 2, dim = a.dim, key_width = a.k_heads * dim;
  const int64_t q_stride = a.gated ? 2 * dim : dim;  // of query heads
  const int64_t width = a.q_heads * q_stride + 2 * key_width;
  const PageLayout<T> layout{a.page, dim};
  const auto norm = [&](const T* x, int64_t stride, const void* weight, T* out, int64_t heads) {
    const int64_t normed = a.norm_all ? heads * dim : dim;
    for (int64_t i = 0; i < heads * dim; i += normed)
      norm_row(x + i / dim * stride, static_cast<const W*>(weight), out + i, normed, a.eps);
  };
  const auto norm_and_rotate = [&](const T* x, int64_t stride, const void* weight, const float* cos, T* out,
                                   int64_t heads) {
    const bool first = weight && !a.norm_last;
    if (first) norm(x, stride, weight, out, heads);
    for (int64_t h = 0; h < heads; h++)
      rotate(first ? out + h * dim : x + h * stride, out + h * dim, cos, half, dim, a.interleaved);
    if (weight && a.norm_last) norm(out, dim, weight, out, heads);
  };
  for (int64_t t = begin; t < end; t += kStoreRows) {
    const int64_t stop = min(end, t + kStoreRows);
    for (int64_t i = t; i < stop; i++) {
      const float* cos = a.table + a.positions[i] * a.rot;
      const T* x = static_cast<const T*>(a.qkv) + i * width;
      T* out = static_cast<T*>(a.q_out) + i * a.q_heads * dim;
      norm_and_rotate(x, q_stride, a.q_weight, cos, out, a.q_heads);
      norm_and_rotate(x + a.q_heads * q_stride, dim, a.k_weight, cos, keys + (i - t) * key_width, a.k_heads);
    }
    over_slots(a.slots, t, stop, a.page, [&](int64_t first, int64_t count, int64_t position) {
      const Slot slot = locate_slot(position, a.k_heads, a.page, dim);
      const T* key = keys + (first - t) * key_width;
      const T* value = static_cast<const T*>(a.qkv) + (first + 1) * width - key_width;
      for (int64_t h = 0; h < a.k_heads; h++) {
        const int64_t size = a.page * dim;
        T* k_page = static_cast<T*>(a.k_cache) + slot.first + h * size;
        T* v_page = static_cast<T*>(a.v_cache) + slot.first + h * size;
        if (h + 1 < a.k_heads) layout.prefetch(k_page + size, v_page + size, slot.token, count);
        layout.put_keys(k_page, slot.token, count, key + h * dim, key_width);
        layout.put_values(v_page, slot.token, count, value + h * dim, width);
      }
    });
  }
}

template <class T, class W>
void latent_rows(const LatentArgs& a, int64_t begin, int64_t end) {
  const int64_t width = a.plain + a.rot;
  for (int64_t t = begin; t < end; t++) {
    const float* cos = a.table + a.positions[t] * a.rot;
    const T *q = static_cast<const T*>(a.q) + t * a.q_stride, *kv = static_cast<const T*>(a.kv) + t * a.kv_stride;
    T* q_out = static_cast<T*>(a.q_out) + t * a.heads * a.rot;
    T* row = static_cast<T*>(a.cache) + a.slots[t] * (a.latent + a.rot);
    for (int64_t h = 0; h < a.heads; h++)
      rotate(q + h * width + a.plain, q_out + h * a.rot, cos, a.rot / 2, a.rot, a.interleaved);
    norm_row(kv, static_cast<const W*>(a.weight), row, a.latent, a.eps);
    rotate(kv + a.latent, row + a.latent, cos, a.rot / 2, a.rot, a.interleaved);
  }
}

template <class T>
void store_rows(const StoreArgs& a, int64_t begin, int64_t end) {
  const PageLayout<T> layout{a.page, a.dim};
  over_slots(a.slots, begin, end, a.page, [&](int64_t first, int64_t count, int64_t position) {
    const Slot slot = locate_slot(position, a.heads, a.page, a.dim);
    const T *key = static_cast<const T*>(a.k) + first * a.k_stride,
            *value = static_cast<const T*>(a.v) + first * a.v_stride;
    for (int64_t h = 0; h < a.heads; h++) {
      const int64_t head = slot.first + h * a.page * a.dim;
      layout.put_keys(static_cast<T*>(a.k_cache) + head, slot.token, count, key + h * a.dim, a.k_stride);
      layout.put_values(static_cast<T*>(a.v_cache) + head, slot.token, count, value + h * a.dim, a.v_stride);
    }
  });
}

}  // namespace

void rms_norm(const NormArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    if (a.weight_dtype == DType::f32) norm_rows<T, float, false>(a, begin, end);
    else norm_rows<T, T, false>(a, begin, end);
  });
}

void layer_norm(const NormArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    if (a.weight_dtype == DType::f32) norm_rows<T, float, true>(a, begin, end);
    else norm_rows<T, T, true>(a, begin, end);
  });
}

void add_residual(const AddArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    for (int64_t i = begin * a.width; i < end * a.width; i += a.width) {
      add_row(static_cast<const T*>(a.x) + i, static_cast<const T*>(a.residual) + i, static_cast<T*>(a.out) + i,
              a.width, a.multiplier);
    }
  });
}

void cap(const CapArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    for (int64_t row = begin * a.width; row < end * a.width; row += a.width) {
      const T* from = static_cast<const T*>(a.x) + row;
      T* to = static_cast<T*>(a.out) + row;
      over_vectors(a.width, [&](int64_t i, int64_t count) {
        const f32x16 scaled = load_partial(from + i, count) * broadcast(a.multiplier);
        store_partial(to + i, a.limit > 0.0f ? capped(scaled, a.limit) : scaled, count);
      });
    }
  });
}

void activate(const ActivateArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    switch (a.activation) {
      case Activation::silu: return activate_rows<T, Silu>(a, begin, end);
      case Activation::gelu_tanh: return activate_rows<T, Gelu>(a, begin, end);
      case Activation::gelu: return activate_rows<T, GeluErf>(a, begin, end);
      case Activation::relu: return activate_rows<T, Relu>(a, begin, end);
      case Activation::relu2: return activate_rows<T, SquaredRelu>(a, begin, end);
    }
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

void latent_rope_store(const LatentArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    if (a.weight_dtype == DType::f32) latent_rows<T, float>(a, begin, end);
    else latent_rows<T, T>(a, begin, end);
  });
}

void store_kv(const StoreArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { store_rows<decltype(x)>(a, begin, end); });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
