// Layers with a recurrent state: rows that begin, go on, make up for earlier drafts and read a token again; snapshots
// on the way; and gates of heads.
#include "cases.h"

namespace tokserve::cases {

namespace {

struct Shape {
  int64_t key_heads, group, key_dim, value_dim, taps;
};
struct Step {
  int64_t first, length, start, end;
};

constexpr Step kSteps[] = {{0, 9, 0, 9}, {0, 1, 0, 1}, {20, 23, 17, 21}, {15, 16, 16, 16}, {40, 80, 40, 78}};
constexpr int64_t kStates = 3, kDrafts = 5;

void run_delta(const Kernels& kernels, Results& results, DType dtype, const Shape& s, const Step& step) {
  Random from(7);
  const int64_t heads = s.key_heads * s.group, keys = s.key_heads * s.key_dim, values = heads * s.value_dim;
  const int64_t tokens = step.length - step.first;
  DeltaArgs a{};
  a.dtype = dtype, a.key_heads = s.key_heads, a.group = s.group, a.key_dim = s.key_dim, a.value_dim = s.value_dim;
  a.channels = 2 * keys + values, a.taps = s.taps, a.window = s.taps + kDrafts, a.entry = a.channels + 2 * heads;
  a.x_stride = a.channels + values, a.rates_stride = 2 * heads, a.eps = 1e-6f;
  const int64_t of_group = s.group * s.value_dim;
  const HeadPart parts[] = {{0, s.key_dim}, {keys, s.key_dim}, {2 * keys, of_group},
                            {0, s.group},   {heads, s.group},  {a.channels, of_group}};
  for (int i = 0; i < 6; i++) a.parts[i] = parts[i];
  for (int i = 0; i < 3; i++) a.ring_parts[i] = parts[i];
  a.ring_parts[3] = {a.channels, s.group}, a.ring_parts[4] = {a.channels + heads, s.group};
  const Array x = random(dtype, tokens * a.x_stride, from), rates = random(dtype, tokens * a.rates_stride, from);
  const Array weight = random(DType::f32, s.taps * a.channels, from), a_log = random(DType::f32, heads, from);
  const Array bias = random(DType::f32, heads, from), norm = random(DType::f32, s.value_dim, from);
  const Array state = random(DType::f32, kStates * heads * s.key_dim * s.value_dim, from);
  const Array ring = random(dtype, kStates * a.window * a.entry, from);
  Array out(x.kind(), tokens * values);
  a.x = x.as<void>(), a.rates = rates.as<void>(), a.conv_weight = weight.as<float>(), a.a_log = a_log.as<float>();
  a.dt_bias = bias.as<float>(), a.norm_weight = norm.as<float>(), a.state = state.as<float>();
  a.ring = ring.as<void>(), a.out = out.as<void>();
  const int32_t save[] = {0, static_cast<int32_t>(step.end), 2};
  const StateRow row{1, 0, step.first, step.length, step.start, step.end, save, step.end > step.start ? 1 : 0};
  const Array memory = scratch(kernels.delta_scratch(a));
  for (int64_t head = 0; head < s.key_heads; head++) kernels.gated_delta(a, row, head, memory.as<char>());
  const std::string name =
      text("gated_delta %s heads=%lld/%lld dims=%lld/%lld first=%lld", name_of(dtype), (long long)heads,
           (long long)s.key_heads, (long long)s.key_dim, (long long)s.value_dim, (long long)step.first);
  results.add(name, out);
  results.add(name + " state", state);
  results.add(name + " ring", ring);
}

void run_scan(const Kernels& kernels, Results& results, DType dtype, int64_t dim, const Step& step) {
  Random from(10);
  constexpr int64_t heads = 6, groups = 2, size = 20, taps = 3;
  const int64_t inner = heads * dim, tokens = step.length - step.first;
  StateSpaceArgs a{};
  a.dtype = dtype, a.heads = heads, a.groups = groups, a.size = size, a.dim = dim, a.taps = taps;
  a.channels = inner + 2 * groups * size, a.entry = a.channels + heads, a.x_stride = inner + a.entry;
  a.window = taps + kDrafts, a.norm_size = inner / groups, a.task_heads = 2, a.group_tasks = 2;
  a.eps = 1e-6f, a.low = 0.01f, a.high = 3.0f;
  const Array x = random(dtype, tokens * a.x_stride, from), weight = random(DType::f32, taps * a.channels, from);
  const Array bias = random(DType::f32, a.channels, from), vectors = random(DType::f32, 3 * heads, from);
  const Array norm = random(DType::f32, inner, from), state = random(DType::f32, kStates * heads * size * dim, from);
  const Array ring = random(dtype, kStates * a.window * a.entry, from);
  Array out(x.kind(), tokens * inner);
  a.x = x.as<void>(), a.conv_weight = weight.as<float>(), a.conv_bias = bias.as<float>();
  a.a_log = vectors.as<float>(), a.dt_bias = a.a_log + heads, a.skip = a.dt_bias + heads;
  a.norm_weight = norm.as<float>(), a.state = state.as<float>(), a.ring = ring.as<void>(), a.out = out.as<void>();
  const int32_t save[] = {0, static_cast<int32_t>(step.end), 2};
  const StateRow row{1, 0, step.first, step.length, step.start, step.end, save, step.end > step.start ? 1 : 0};
  const Array memory = scratch(kernels.state_scratch(a));
  for (int64_t task = 0; task < groups * a.group_tasks; task++) kernels.state_scan(a, row, task, memory.as<char>());
  kernels.state_keep(a, row);
  kernels.state_gate(a, 0, tokens, memory.as<char>());
  const std::string name =
      text("scan_states %s dim=%lld first=%lld", name_of(dtype), (long long)dim, (long long)step.first);
  results.add(name, out);
  results.add(name + " state", state);
  results.add(name + " ring", ring);
}

void run_conv(const Kernels& kernels, Results& results, DType dtype, int64_t channels, const Step& step) {
  Random from(8);
  constexpr int64_t taps = 3, window = taps + kDrafts;
  const int64_t tokens = step.length - step.first;
  const Array x = random(dtype, tokens * 3 * channels, from), weight = random(DType::f32, taps * channels, from);
  const Array bias = random(DType::f32, channels, from), ring = random(dtype, kStates * window * channels, from);
  Array out(x.kind(), tokens * channels);
  const ConvArgs a{dtype, x.as<void>(), weight.as<float>(), bias.as<float>(), ring.as<void>(), out.as<void>(), channels,
                   taps,  window};
  const int32_t save[] = {0, static_cast<int32_t>(step.end), 2};
  const StateRow row{1, 0, step.first, step.length, step.start, step.end, save, step.end > step.start ? 1 : 0};
  kernels.short_conv(a, row, 0, channels);
  const std::string name =
      text("short_conv %s channels=%lld first=%lld", name_of(dtype), (long long)channels, (long long)step.first);
  results.add(name, out);
  results.add(name + " ring", ring);
}

void run_gates(const Kernels& kernels, Results& results, DType dtype) {
  Random from(9);
  constexpr int64_t tokens = 3, heads = 2;
  for (const int64_t dim : {5, 16, 72}) {
    const int64_t stride = 2 * heads * dim + 7;
    const Array mixed = random(dtype, tokens * heads * dim, from), x = random(dtype, tokens * stride, from);
    Array out(x.kind(), tokens * heads * dim);
    kernels.gate_heads({dtype, mixed.as<void>(), x.as<void>(), out.as<void>(), stride, heads, dim}, 0, tokens);
    results.add(text("gate_heads %s dim=%lld", name_of(dtype), (long long)dim), out);
  }
}

}  // namespace

void run_recurrent(const Kernels& kernels, Results& results) {
  for (const DType dtype : kTypes) {
    for (const Step& step : kSteps) {
      for (const Shape& shape : {Shape{2, 1, 16, 16, 4}, {1, 2, 8, 5, 3}, {1, 1, 64, 64, 4}})
        run_delta(kernels, results, dtype, shape, step);
      for (const int64_t dim : {5, 48}) run_scan(kernels, results, dtype, dim, step);
      for (const int64_t channels : {5, 64}) run_conv(kernels, results, dtype, channels, step);
    }
    run_gates(kernels, results, dtype);
  }
}

}  // namespace tokserve::cases
