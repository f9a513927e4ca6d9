// State-space layers (Mamba-2): a task computes some heads of a group for one row, token by token.
#include "recurrent_steps.h"

namespace tokserve {
namespace TOKSERVE_ISA {

namespace {

template <class T>
struct HeadScan {
  const StateSpaceArgs& a;
  const StateRow& row;
  int64_t group, head, heads;  // heads from `head` on
  int64_t inner, size_pad, dim_pad, blocks;
  float *b, *c;         // [kTokens][size_pad]
  float *x, *read;      // [kTokens][heads][dim_pad]
  float *rate, *steps;  // [kTokens][heads]
  float* memory;        // [heads][blocks][size][kColumns]
  Inputs<T> inputs;

  HeadScan(const StateSpaceArgs& args, const StateRow& of, int64_t task, float* scratch)
      : a(args),
        row(of),
        group(task / a.group_tasks),
        inner(a.heads * a.dim),
        size_pad(round_up(a.size, kLanes)),
        dim_pad(round_up(a.dim, kColumns)),
        blocks(dim_pad / kColumns) {
    const int64_t of_group = a.heads / a.groups, first = task % a.group_tasks * a.task_heads;
    head = group * of_group + first;
    heads = min(a.task_heads, of_group - first);
    b = scratch;
    c = b + kTokens * size_pad;
    x = c + kTokens * size_pad;
    read = x + kTokens * heads * dim_pad;
    rate = read + kTokens * heads * dim_pad;
    steps = rate + kTokens * heads;
    memory = steps + kTokens * heads;
    inputs = {static_cast<const T*>(a.x) + row.token * a.x_stride + inner,
              static_cast<const T*>(a.ring) + row.index * a.window * a.entry,
              row.first,
              a.x_stride,
              a.window,
              a.entry};
  }

  float* block_at(int64_t h, int64_t block) const { return memory + (h * blocks + block) * a.size * kColumns; }
  float* state_at(int64_t index, int64_t h) const { return a.state + (index * a.heads + head + h) * a.size * a.dim; }

  // The convolution of n channels from `channel` on, with SiLU.
  void mix(int64_t position, int64_t channel, int64_t n, float* to) const {
    convolve(inputs.from(channel), position, a.conv_weight + channel, a.taps, a.channels, n,
             [&](int64_t i, f32x16 total) {
               if (a.conv_bias) total = total + load_partial(a.conv_bias + channel + i, min(kLanes, n - i));
               store(to + i, Silu()(total));
             });
  }

  void prepare(int64_t position, int64_t slot) const {
    mix(position, inner + group * a.size, a.size, b + slot * size_pad);
    mix(position, inner + (a.groups + group) * a.size, a.size, c + slot * size_pad);
    for (int64_t h = 0; h < heads; h++) {
      const int64_t at = slot * heads + h, number = head + h;
      for (int64_t i = 0; i < dim_pad; i += kLanes) store(x + at * dim_pad + i, zeros());
      mix(position, number * a.dim, a.dim, x + at * dim_pad);
      float dt[kLanes];
      store(dt, load_partial(inputs.at(position) + a.channels + number, 1));
      steps[at] = min(max(softplus(dt[0] + a.dt_bias[number]), a.low), a.high);
      rate[at] = exp(-exp(a.a_log[number]) * steps[at]);
    }
  }

  // Positions [begin, end), at most kTokens, all of them in the state or none.
  void run(int64_t begin, int64_t end) const {
    for (int64_t p = begin; p < end; p++) prepare(p, p - begin);
    for (int64_t h = 0; h < heads; h++) {
      for (int64_t block = 0; block < blocks; block++) {
        for (int64_t p = begin; p < end; p++) {
          const int64_t slot = p - begin, at = slot * heads + h, column = at * dim_pad + block * kColumns;
          const float* q = c + slot * size_pad;
          if (p < row.start) {
            read_again(block_at(h, block), a.size, q, read + column);
            continue;
          }
          const f32x16 step = broadcast(steps[at]);
          const f32x16 change[2] = {load(x + column) * step, load(x + column + kLanes) * step};
          update_block(block_at(h, block), a.size, q, b + slot * size_pad, change, broadcast(rate[at]), read + column);
        }
      }
    }
    for (int64_t p = max(begin, row.first); p < end; p++) {
      for (int64_t h = 0; h < heads; h++) {
        const int64_t at = ((p - begin) * heads + h) * dim_pad;
        T* out = static_cast<T*>(a.out) + (row.token + p - row.first) * inner + (head + h) * a.dim;
        over_vectors(a.dim, [&](int64_t i, int64_t count) {
          store_partial(out + i, fma(a.skip[head + h], load(x + at + i), load(read + at + i)), count);
        });
      }
    }
  }

  void read_state() const {
    for (int64_t h = 0; h < heads; h++) {
      for (int64_t block = 0; block < blocks; block++) {
        if (row.start) read_block(state_at(row.index, h), block_at(h, block), a.size, a.dim, block * kColumns);
        else std::memset(block_at(h, block), 0, a.size * kColumns * sizeof(float));
      }
    }
  }
  void write_state(int64_t index) const {
    for (int64_t h = 0; h < heads; h++) {
      for (int64_t block = 0; block < blocks; block++)
        write_block(block_at(h, block), state_at(index, h), a.size, a.dim, block * kColumns);
    }
  }
  void keep(int64_t, int64_t, int64_t) const {}  // tasks share inputs, so that state_keep does it after all of them
};

// The inputs of a row at positions [begin, end) into a state row's ring.
template <class T>
void keep_inputs(const StateSpaceArgs& a, const StateRow& row, int64_t index, int64_t begin, int64_t end) {
  T* rings = static_cast<T*>(a.ring);
  const Inputs<T> inputs = {static_cast<const T*>(a.x) + row.token * a.x_stride + a.heads * a.dim,
                            rings + row.index * a.window * a.entry,
                            row.first,
                            a.x_stride,
                            a.window,
                            a.entry};
  for (int64_t p = begin; p < end; p++) {
    std::memcpy(rings + (index * a.window + p % a.window) * a.entry, inputs.at(p), a.entry * sizeof(T));
  }
}

}  // namespace

int64_t state_scratch(const StateSpaceArgs& a) {
  const int64_t size_pad = round_up(a.size, kLanes), dim_pad = round_up(a.dim, kColumns);
  const int64_t of_tokens = kTokens * (2 * size_pad + a.task_heads * (2 * dim_pad + 2));
  const int64_t scan = of_tokens + a.task_heads * dim_pad * a.size;
  return max(scan, round_up(a.norm_size, kLanes)) * static_cast<int64_t>(sizeof(float));
}

void state_scan(const StateSpaceArgs& a, const StateRow& row, int64_t task, char* scratch) {
  with_type(a.dtype, [&](auto x) {
    walk_row(row, HeadScan<decltype(x)>(a, row, task, reinterpret_cast<float*>(scratch)), a.taps, a.window);
  });
}

void state_keep(const StateSpaceArgs& a, const StateRow& row) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    for (int64_t i = 0; i < row.count; i++) {
      const int64_t position = row.saves[3 * i + 1];
      keep_inputs<T>(a, row, row.saves[3 * i + 2], max<int64_t>(0, position - a.taps), position);
    }
    keep_inputs<T>(a, row, row.index, max(row.first, row.length - a.window), row.length);
  });
}

void state_gate(const StateSpaceArgs& a, int64_t begin, int64_t end, char* scratch) {
  with_type(a.dtype, [&](auto x) {
    using T = decltype(x);
    const int64_t inner = a.heads * a.dim, groups = inner / a.norm_size;
    float* gated = reinterpret_cast<float*>(scratch);
    for (int64_t i = begin * groups; i < end * groups; i++) {
      const int64_t token = i / groups, column = i % groups * a.norm_size;
      T* out = static_cast<T*>(a.out) + token * inner + column;
      const T* gate = static_cast<const T*>(a.x) + token * a.x_stride + column;
      over_vectors(a.norm_size, [&](int64_t j, int64_t count) {
        store(gated + j, load_partial(out + j, count) * Silu()(load_partial(gate + j, count)));
      });
      float scale = 1.0f;
      if (a.norm_weight) {
        const float square = square_sum(gated, round_up(a.norm_size, kLanes)) / static_cast<float>(a.norm_size);
        scale = 1.0f / __builtin_sqrtf(square + a.eps);
      }
      over_vectors(a.norm_size, [&](int64_t j, int64_t count) {
        f32x16 value = load(gated + j) * broadcast(scale);
        if (a.norm_weight) value = value * load_partial(a.norm_weight + column + j, count);
        store_partial(out + j, value, count);
      });
    }
  });
}

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
