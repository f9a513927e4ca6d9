// Layers with a recurrent state: the gated delta rule with its convolution, and the short convolution.  Tokens are
// taken one after the other, each in a fixed chain, so bits do not depend on where a chunk ends.
#include "recurrent_steps.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

constexpr float kNormEps = 1e-6f;  // as NORM_EPS in ops/recurrent.py

TOKSERVE_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// What one key head's tokens need, for kTokens of them; sizes are padded to whole vectors.
struct Piece {
  float *q, *k;        // [kTokens][key_pad]
  float *v, *read;     // [kTokens][group][value_pad]
  float *rate, *beta;  // [kTokens][group]
};

struct Shape {
  int64_t key_pad, value_pad, blocks;  // blocks of kColumns columns of a state

  explicit Shape(const DeltaArgs& a)
      : key_pad(round_up(a.key_dim, kLanes)),
        value_pad(round_up(a.value_dim, kColumns)),
        blocks(value_pad / kColumns) {}
};

// One token: the block's columns of state and of what is read from it.
void step_block(float* block, int64_t key_dim, const float* q, const float* k, const float* v, float rate, float beta,
                float* read) {
  f32x16 left[4] = {zeros(), zeros(), zeros(), zeros()}, right[4] = {zeros(), zeros(), zeros(), zeros()};
  over_key(key_dim, [&](int64_t i, int j) {
    const float* at = block + i * kColumns;
    left[j] = fma(k[i], load(at), left[j]);
    right[j] = fma(k[i], load(at + kLanes), right[j]);
  });
  const f32x16 decay = broadcast(rate), step = broadcast(beta);
  const f32x16 change[2] = {(load(v) - tree(left) * decay) * step, (load(v + kLanes) - tree(right) * decay) * step};
  update_block(block, key_dim, q, k, change, decay, read);
}

template <class T>
struct DeltaHead {
  const DeltaArgs& a;
  const StateRow& row;
  const int64_t head;
  const Shape shape;
  Piece piece;
  float* blocks;  // [group][shape.blocks][key_dim][kColumns]
  Inputs<T> parts[5];

  DeltaHead(const DeltaArgs& args, const StateRow& of, int64_t key_head, float* memory)
      : a(args), row(of), head(key_head), shape(args) {
    float** const arrays[] = {&piece.q, &piece.k, &piece.v, &piece.read, &piece.rate, &piece.beta};
    const int64_t values = a.group * shape.value_pad;
    const int64_t sizes[] = {shape.key_pad, shape.key_pad, values, values, a.group, a.group};
    for (int i = 0; i < 6; i++) {
      *arrays[i] = memory;
      memory += round_up(kTokens * sizes[i], kLanes);
    }
    blocks = memory;
    const T* x = static_cast<const T*>(a.x) + row.token * a.x_stride;
    const T* rates = static_cast<const T*>(a.rates) + row.token * a.rates_stride;
    const T* ring = static_cast<const T*>(a.ring) + row.index * a.window * a.entry;
    for (int i = 0; i < 5; i++) {
      const bool of_x = i < 3;
      parts[i] = {(of_x ? x : rates) + a.parts[i].offset + head * a.parts[i].stride,
                  ring + a.ring_parts[i].offset + head * a.ring_parts[i].stride,
                  row.first,
                  of_x ? a.x_stride : a.rates_stride,
                  a.window,
                  a.entry};
    }
  }

  int64_t size_of(int part) const {  // elements of a part
    return part < 2 ? a.key_dim : part == 2 ? a.group * a.value_dim : a.group;
  }
  float* block_at(int64_t of_group, int64_t block) const {
    return blocks + (of_group * shape.blocks + block) * a.key_dim * kColumns;
  }
  float* state_at(int64_t index, int64_t of_group) const {
    const int64_t heads = a.key_heads * a.group, size = a.key_dim * a.value_dim;
    return a.state + (index * heads + head * a.group + of_group) * size;
  }

  // A key or query: SiLU, then divided by its norm.
  void unit(int part, int64_t position, float* out, float scale) const {
    const float* weight = a.conv_weight + a.ring_parts[part].offset + head * a.ring_parts[part].stride;
    convolve(parts[part], position, weight, a.taps, a.channels, a.key_dim,
             [&](int64_t i, f32x16 total) { store(out + i, Silu()(total)); });
    const f32x16 factor = broadcast(scale / __builtin_sqrtf(square_sum(out, shape.key_pad) + kNormEps));
    for (int64_t i = 0; i < shape.key_pad; i += kLanes) store(out + i, load(out + i) * factor);
  }

  void prepare(int64_t position, int64_t slot) const {
    unit(0, position, piece.q + slot * shape.key_pad, 1.0f / __builtin_sqrtf(static_cast<float>(a.key_dim)));
    unit(1, position, piece.k + slot * shape.key_pad, 1.0f);
    for (int64_t g = 0; g < a.group; g++) {
      const int64_t channel = a.ring_parts[2].offset + head * a.ring_parts[2].stride + g * a.value_dim;
      Inputs<T> inputs = parts[2];
      inputs.tokens += g * a.value_dim;
      inputs.ring += g * a.value_dim;
      float* v = piece.v + (slot * a.group + g) * shape.value_pad;
      for (int64_t i = 0; i < shape.value_pad; i += kLanes) store(v + i, zeros());
      convolve(inputs, position, a.conv_weight + channel, a.taps, a.channels, a.value_dim,
               [&](int64_t i, f32x16 total) { store(v + i, Silu()(total)); });
      float rates[kLanes];  // b, then a
      store(rates, load_partial(parts[3].at(position) + g, 1));
      piece.beta[slot * a.group + g] = sigmoid(rates[0]);
      store(rates, load_partial(parts[4].at(position) + g, 1));
      const int64_t number = head * a.group + g;
      piece.rate[slot * a.group + g] = exp(-exp(a.a_log[number]) * softplus(rates[0] + a.dt_bias[number]));
    }
  }

  // Positions [begin, end), at most kTokens, all of them in the state or none.
  void run(int64_t begin, int64_t end) const {
    for (int64_t p = begin; p < end; p++) prepare(p, p - begin);
    for (int64_t g = 0; g < a.group; g++) {
      for (int64_t b = 0; b < shape.blocks; b++) {
        for (int64_t p = begin; p < end; p++) {
          const int64_t slot = p - begin, at = (slot * a.group + g) * shape.value_pad + b * kColumns;
          const float *q = piece.q + slot * shape.key_pad, *k = piece.k + slot * shape.key_pad;
          if (p < row.start) read_again(block_at(g, b), a.key_dim, q, piece.read + at);
          else
            step_block(block_at(g, b), a.key_dim, q, k, piece.v + at, piece.rate[slot * a.group + g],
                       piece.beta[slot * a.group + g], piece.read + at);
        }
      }
    }
    for (int64_t p = max(begin, row.first); p < end; p++) {
      for (int64_t g = 0; g < a.group; g++) finish(p, piece.read + ((p - begin) * a.group + g) * shape.value_pad, g);
    }
  }

  void finish(int64_t position, const float* read, int64_t of_group) const {
    const int64_t token = row.token + position - row.first, number = head * a.group + of_group;
    const T* gate = static_cast<const T*>(a.x) + token * a.x_stride + a.parts[5].offset + head * a.parts[5].stride +
                    of_group * a.value_dim;
    T* out = static_cast<T*>(a.out) + (token * a.key_heads * a.group + number) * a.value_dim;
    const float square = square_sum(read, shape.value_pad) / static_cast<float>(a.value_dim);
    const f32x16 scale = broadcast(1.0f / __builtin_sqrtf(square + a.eps));
    over_vectors(a.value_dim, [&](int64_t i, int64_t count) {
      const f32x16 normed = load(read + i) * scale * load_partial(a.norm_weight + i, count);
      store_partial(out + i, normed * Silu()(load_partial(gate + i, count)), count);
    });
  }

  void read_state() const {
    for (int64_t g = 0; g < a.group; g++) {
      for (int64_t b = 0; b < shape.blocks; b++) {
        if (row.start) read_block(state_at(row.index, g), block_at(g, b), a.key_dim, a.value_dim, b * kColumns);
        else std::memset(block_at(g, b), 0, a.key_dim * kColumns * sizeof(float));
      }
    }
  }
  void write_state(int64_t index) const {
    for (int64_t g = 0; g < a.group; g++) {
      for (int64_t b = 0; b < shape.blocks; b++)
        write_block(block_at(g, b), state_at(index, g), a.key_dim, a.value_dim, b * kColumns);
    }
  }

  // The inputs at positions [begin, end) into a state row's ring.
  void keep(int64_t index, int64_t begin, int64_t end) const {
    T* ring = static_cast<T*>(a.ring) + index * a.window * a.entry;
    for (int64_t p = begin; p < end; p++) {
      for (int part = 0; part < 5; part++) {
        T* to = ring + p % a.window * a.entry + a.ring_parts[part].offset + head * a.ring_parts[part].stride;
        std::memcpy(to, parts[part].at(p), size_of(part) * sizeof(T));
      }
    }
  }
};

template <class T>
void delta_head(const DeltaArgs& a, const StateRow& row, int64_t key_head, float* memory) {
  walk_row(row, DeltaHead<T>(a, row, key_head, memory), a.taps, a.window);
}

template <class T>
void conv_channels(const ConvArgs& a, const StateRow& row, int64_t begin, int64_t end) {
  const int64_t width = a.channels;
  T* const rings = static_cast<T*>(a.ring);
  T* const own = rings + row.index * a.window * width;
  const T* const x = static_cast<const T*>(a.x) + row.token * 3 * width;
  for (int64_t c = begin; c < end; c += kLanes) {
    const int64_t count = min(kLanes, end - c);
    const auto input = [&](int64_t position) {  // b * u, rounded
      if (position < row.first) return load_partial(own + position % a.window * width + c, count);
      const T* at = x + (position - row.first) * 3 * width + c;
      T rounded[kLanes];
      store(rounded, load_partial(at, count) * load_partial(at + 2 * width, count));
      return load(rounded);
    };
    const auto put = [&](int64_t index, int64_t from, int64_t until) {
      T* ring = rings + index * a.window * width + c;
      for (int64_t p = from; p < until; p++) store_partial(ring + p % a.window * width, input(p), count);
    };
    for (int64_t p = row.first; p < row.length; p++) {
      f32x16 total = zeros();
      for (int64_t tap = max(int64_t{0}, a.taps - 1 - p); tap < a.taps; tap++) {
        total = fma(load_partial(a.conv_weight + tap * width + c, count), input(p - a.taps + 1 + tap), total);
      }
      if (a.bias) total = total + load_partial(a.bias + c, count);
      const int64_t token = row.token + p - row.first;
      const f32x16 gate = load_partial(x + (p - row.first) * 3 * width + width + c, count);
      store_partial(static_cast<T*>(a.out) + token * width + c, gate * total, count);
    }
    for (int64_t i = 0; i < row.count; i++) {
      const int64_t position = row.saves[3 * i + 1];
      put(row.saves[3 * i + 2], max<int64_t>(0, position - a.taps), position);
    }
    put(row.index, max(row.first, row.length - a.window), row.length);
  }
}

}  // namespace

int64_t delta_scratch(const DeltaArgs& a) {
  const Shape shape(a);
  const int64_t values = a.group * shape.value_pad;
  const int64_t of_tokens = kTokens * (2 * shape.key_pad + 2 * values + 2 * a.group) + 6 * kLanes;
  return (of_tokens + values * a.key_dim) * static_cast<int64_t>(sizeof(float));
}

void gated_delta(const DeltaArgs& a, const StateRow& row, int64_t key_head, char* scratch) {
  with_type(a.dtype, [&](auto x) { delta_head<decltype(x)>(a, row, key_head, reinterpret_cast<float*>(scratch)); });
}

void short_conv(const ConvArgs& a, const StateRow& row, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) { conv_channels<decltype(x)>(a, row, begin, end); });
}

void gate_heads(const GateHeadsArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    for (int64_t i = begin * a.heads; i < end * a.heads; i++) {
      const T* mixed = static_cast<const T*>(a.mixed) + i * a.dim;
      const T* gate = static_cast<const T*>(a.x) + i / a.heads * a.x_stride + (i % a.heads * 2 + 1) * a.dim;
      T* out = static_cast<T*>(a.out) + i * a.dim;
      over_vectors(a.dim, [&](int64_t j, int64_t count) {
        const f32x16 denominator = broadcast(1.0f) + exp(zeros() - load_partial(gate + j, count));
        store_partial(out + j, load_partial(mixed + j, count) / denominator, count);
      });
    }
  });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
