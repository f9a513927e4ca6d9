// Bindings of the layers with a recurrent state, and of the gates of attention's heads.
#include <nanobind/stl/optional.h>

#include <cstring>
#include <vector>

#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

// The columns of a batch whose rows have states.
struct StateColumns {
  const char* op;
  int64_t rows, tokens, states, taps, window;
  const int32_t *query_start, *seq_lens, *start, *end, *saves;
  const int64_t* index;
  int64_t num_saves;
};

StateColumns columns_of(const char* op, const Tensor& query_start, const Tensor& seq_lens, const Tensor& state_rows,
                        const Tensor& start, const Tensor& end, const Tensor& saves) {
  require(seq_lens, Kind::i32, {-1}, op, "seq_lens must be int32 [R]");
  const int64_t rows = seq_lens.size(0);
  require(query_start, Kind::i32, {rows + 1}, op, "query_start must be int32 [R+1]");
  require(state_rows, Kind::i64, {rows}, op, "state_rows must be int64 [R]");
  require(start, Kind::i32, {rows}, op, "start must be int32 [R]");
  require(end, Kind::i32, {rows}, op, "end must be int32 [R]");
  require(saves, Kind::i32, {-1, 3}, op, "saves must be int32 [n,3]");
  StateColumns c{};
  c.op = op;
  c.rows = rows;
  c.query_start = query_start.data<int32_t>();
  c.seq_lens = seq_lens.data<int32_t>();
  c.start = start.data<int32_t>();
  c.end = end.data<int32_t>();
  c.saves = saves.data<int32_t>();
  c.index = state_rows.data<int64_t>();
  c.num_saves = saves.size(0);
  return c;
}

// The rows that have tokens and a state, checked.  Outputs of tokens without a state, `bytes` each, become zero.
std::vector<StateRow> rows_of(const StateColumns& c, void* out, int64_t bytes) {
  require(c.query_start[0] == 0 && c.query_start[c.rows] <= c.tokens, c.op, "query_start must go from 0 to T");
  std::vector<StateRow> rows;
  int64_t save = 0;
  for (int64_t r = 0; r < c.rows; r++) {
    while (save < c.num_saves && c.saves[3 * save] < r) save++;  // those of no row come first, or after all others
    const int64_t begin = save;
    while (save < c.num_saves && c.saves[3 * save] == r) save++;
    const int64_t token = c.query_start[r], count = c.query_start[r + 1] - token;
    require(count >= 0, c.op, "query_start must not descend");
    if (count == 0) continue;
    require(token + count <= c.tokens, c.op, "query_start must go from 0 to T");
    if (c.index[r] < 0) {
      std::memset(static_cast<char*>(out) + token * bytes, 0, count * bytes);
      continue;
    }
    const StateRow row{c.index[r], token,    c.seq_lens[r] - count, c.seq_lens[r],
                       c.start[r], c.end[r], c.saves + 3 * begin,   save - begin};
    require(row.index < c.states, c.op, "a row has no state");
    require(row.first >= 0 && row.start >= 0 && row.start <= row.first + 1 &&
                row.first - row.start <= c.window - c.taps && row.start <= row.end && row.end <= row.length,
            c.op, "a row's state cannot go on from where it is");
    for (int64_t i = 0, last = row.start; i < row.count; i++) {
      const int32_t* one = row.saves + 3 * i;
      require(one[1] > last && one[1] <= row.end && one[2] >= 0 && one[2] < c.states && one[2] != row.index, c.op,
              "a state is saved where it does not pass, or where none is");
      last = one[1];
    }
    rows.push_back(row);
  }
  return rows;
}

int64_t tokens_of(const std::vector<StateRow>& rows) {
  int64_t total = 0;
  for (const StateRow& row : rows) total += row.length - std::min(row.start, row.first);
  return total;
}

DeltaArgs delta_sizes(const char* op, const Tensor& state, const Tensor& conv_weight) {
  require(state, Kind::f32, {-1, -1, -1, -1}, op, "state must be float32 [S,Hv,Dk,Dv]");
  require(conv_weight, Kind::f32, {-1, -1}, op, "conv_weight must be float32 [K,C]");
  DeltaArgs a{};
  const int64_t heads = state.size(1);
  a.key_dim = state.size(2);
  a.value_dim = state.size(3);
  a.taps = conv_weight.size(0);
  a.channels = conv_weight.size(1);
  require(heads > 0 && a.key_dim > 0 && a.value_dim > 0 && a.taps > 0, op, "the state is empty");
  const int64_t keys = a.channels - heads * a.value_dim;
  require(keys > 0 && keys % (2 * a.key_dim) == 0, op, "conv_weight must have the channels of q, k and v");
  a.key_heads = keys / (2 * a.key_dim);
  require(heads % a.key_heads == 0, op, "v heads must be a multiple of key heads");
  a.group = heads / a.key_heads;
  a.entry = a.channels + 2 * heads;
  return a;
}

void place_parts(DeltaArgs& a, bool grouped) {
  const int64_t keys = a.key_heads * a.key_dim, values = a.group * a.value_dim;
  const HeadPart ring[5] = {{0, a.key_dim},
                            {keys, a.key_dim},
                            {2 * keys, values},
                            {a.channels, a.group},
                            {a.channels + a.key_heads * a.group, a.group}};
  std::copy(ring, ring + 5, a.ring_parts);
  const int64_t stride = 2 * a.key_dim + 2 * values;
  if (grouped) {
    const HeadPart parts[6] = {{0, stride},      {a.key_dim, stride},    {2 * a.key_dim, stride},
                               {0, 2 * a.group}, {a.group, 2 * a.group}, {2 * a.key_dim + values, stride}};
    std::copy(parts, parts + 6, a.parts);
  } else {
    std::copy(ring, ring + 3, a.parts);
    a.parts[3] = {0, a.group};
    a.parts[4] = {a.key_heads * a.group, a.group};
    a.parts[5] = {a.channels, values};
  }
}

void gated_delta(const Tensor& x, const Tensor& rates, const Tensor& conv_weight, const Tensor& a_log,
                 const Tensor& dt_bias, const Tensor& norm_weight, float eps, bool grouped, const Tensor& state,
                 const Tensor& ring, const Tensor& query_start, const Tensor& seq_lens, const Tensor& state_rows,
                 const Tensor& start, const Tensor& end, const Tensor& saves, const Tensor& out) {
  const char* op = "gated_delta";
  DeltaArgs a = delta_sizes(op, state, conv_weight);
  const int64_t heads = a.key_heads * a.group;
  a.dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(1) && x.size(1) == a.channels + heads * a.value_dim, op,
          "x must be [T,N] of q, k, v and z");
  require(rates.ndim() == 2 && rates.dense(1) && rates.kind() == x.kind() && rates.size(0) == x.size(0) &&
              rates.size(1) == 2 * heads,
          op, "rates must be [T,2*Hv], like x");
  require(a_log, Kind::f32, {heads}, op, "a_log must be float32 [Hv]");
  require(dt_bias, Kind::f32, {heads}, op, "dt_bias must be float32 [Hv]");
  require(norm_weight, Kind::f32, {a.value_dim}, op, "norm_weight must be float32 [Dv]");
  require(ring, x.kind(), {state.size(0), -1, a.entry}, op, "ring must be [S,W,C+2*Hv], like x");
  require(out, x.kind(), {x.size(0), heads * a.value_dim}, op, "out must be [T,Hv*Dv]");
  a.x = x.data<void>();
  a.x_stride = x.stride(0);
  a.rates = rates.data<void>();
  a.rates_stride = rates.stride(0);
  a.conv_weight = conv_weight.data<float>();
  a.a_log = a_log.data<float>();
  a.dt_bias = dt_bias.data<float>();
  a.norm_weight = norm_weight.data<float>();
  a.state = state.data<float>();
  a.ring = ring.data<void>();
  a.out = out.data<void>();
  a.window = ring.size(1);
  a.eps = eps;
  require(a.window >= a.taps, op, "the ring must hold the taps");
  place_parts(a, grouped);
  StateColumns columns = columns_of(op, query_start, seq_lens, state_rows, start, end, saves);
  columns.tokens = x.size(0);
  columns.states = state.size(0);
  columns.taps = a.taps;
  columns.window = a.window;
  const int64_t item = x.item();
  launch([=] {
    const std::vector<StateRow> rows = rows_of(columns, a.out, heads * a.value_dim * item);
    const int64_t scratch = kernels().delta_scratch(a), count = static_cast<int64_t>(rows.size());
    if (count == 0) return;
    const double of_token = 0.15 * a.group * a.key_dim * a.value_dim + a.entry;
    over_rows(count * a.key_heads, of_token * tokens_of(rows) / count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        kernels().gated_delta(a, rows[i / a.key_heads], i % a.key_heads, thread_scratch(scratch));
    });
  });
}

void short_conv(const Tensor& x, const Tensor& conv_weight, const std::optional<Tensor>& bias, const Tensor& ring,
                const Tensor& query_start, const Tensor& seq_lens, const Tensor& state_rows, const Tensor& start,
                const Tensor& end, const Tensor& saves, const Tensor& out) {
  const char* op = "short_conv";
  const DType dtype = float_type(x, op);
  require(conv_weight, Kind::f32, {-1, -1}, op, "conv_weight must be float32 [K,C]");
  const int64_t taps = conv_weight.size(0), channels = conv_weight.size(1);
  require(taps > 0 && channels > 0, op, "conv_weight is empty");
  require(x, x.kind(), {-1, 3 * channels}, op, "x must be contiguous [T,3C]");
  if (bias) require(*bias, Kind::f32, {channels}, op, "bias must be float32 [C]");
  require(ring, x.kind(), {-1, -1, channels}, op, "ring must be [S,W,C], like x");
  require(ring.size(1) >= taps, op, "the ring must hold the taps");
  require(out, x.kind(), {x.size(0), channels}, op, "out must be [T,C]");
  const ConvArgs a{.dtype = dtype,
                   .x = x.data<void>(),
                   .conv_weight = conv_weight.data<float>(),
                   .bias = bias ? bias->data<float>() : nullptr,
                   .ring = ring.data<void>(),
                   .out = out.data<void>(),
                   .channels = channels,
                   .taps = taps,
                   .window = ring.size(1)};
  StateColumns columns = columns_of(op, query_start, seq_lens, state_rows, start, end, saves);
  columns.tokens = x.size(0);
  columns.states = ring.size(0);
  columns.taps = taps;
  columns.window = a.window;
  const int64_t item = x.item();
  launch([=] {
    constexpr int64_t width = 256;  // channels of a task
    const std::vector<StateRow> rows = rows_of(columns, a.out, channels * item);
    const int64_t parts = (channels + width - 1) / width, count = static_cast<int64_t>(rows.size());
    if (count == 0) return;
    over_rows(count * parts, 0.3 * width * taps * tokens_of(rows) / count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t first = i % parts * width;
        kernels().short_conv(a, rows[i / parts], first, std::min(channels, first + width));
      }
    });
  });
}

StateSpaceArgs state_space_sizes(const char* op, const Tensor& state, const Tensor& conv_weight, int64_t norm_size) {
  require(state, Kind::f32, {-1, -1, -1, -1}, op, "state must be float32 [S,H,N,P]");
  require(conv_weight, Kind::f32, {-1, -1}, op, "conv_weight must be float32 [K,C]");
  StateSpaceArgs a{};
  a.heads = state.size(1);
  a.size = state.size(2);
  a.dim = state.size(3);
  a.taps = conv_weight.size(0);
  a.channels = conv_weight.size(1);
  require(a.heads > 0 && a.size > 0 && a.dim > 0 && a.taps > 0, op, "the state is empty");
  const int64_t inner = a.heads * a.dim, shared = a.channels - inner;
  require(shared > 0 && shared % (2 * a.size) == 0, op, "conv_weight must have the channels of x, B and C");
  a.groups = shared / (2 * a.size);
  require(a.heads % a.groups == 0, op, "heads must be a multiple of groups");
  require(norm_size > 0 && inner % norm_size == 0, op, "norm_size must divide H*P");
  a.norm_size = norm_size;
  a.entry = a.channels + a.heads;
  const int64_t group = a.heads / a.groups;
  a.task_heads = std::min<int64_t>(group, 4);
  a.group_tasks = (group + a.task_heads - 1) / a.task_heads;
  return a;
}

void scan_states(const Tensor& x, const Tensor& conv_weight, const std::optional<Tensor>& conv_bias,
                 const Tensor& a_log, const Tensor& dt_bias, const Tensor& skip,
                 const std::optional<Tensor>& norm_weight, int64_t norm_size, float eps, float low, float high,
                 const Tensor& state, const Tensor& ring, const Tensor& query_start, const Tensor& seq_lens,
                 const Tensor& state_rows, const Tensor& start, const Tensor& end, const Tensor& saves,
                 const Tensor& out) {
  const char* op = "scan_states";
  StateSpaceArgs a = state_space_sizes(op, state, conv_weight, norm_size);
  const int64_t inner = a.heads * a.dim;
  a.dtype = float_type(x, op);
  require(x.ndim() == 2 && x.dense(1) && x.size(1) == inner + a.entry, op, "x must be [T,N] of z, x, B, C and dt");
  if (conv_bias) require(*conv_bias, Kind::f32, {a.channels}, op, "conv_bias must be float32 [C]");
  require(a_log, Kind::f32, {a.heads}, op, "a_log must be float32 [H]");
  require(dt_bias, Kind::f32, {a.heads}, op, "dt_bias must be float32 [H]");
  require(skip, Kind::f32, {a.heads}, op, "skip must be float32 [H]");
  if (norm_weight) require(*norm_weight, Kind::f32, {inner}, op, "norm_weight must be float32 [H*P]");
  require(ring, x.kind(), {state.size(0), -1, a.entry}, op, "ring must be [S,W,C+H], like x");
  require(ring.size(1) >= a.taps, op, "the ring must hold the taps");
  require(out, x.kind(), {x.size(0), inner}, op, "out must be [T,H*P]");
  a.x = x.data<void>();
  a.x_stride = x.stride(0);
  a.conv_weight = conv_weight.data<float>();
  a.conv_bias = conv_bias ? conv_bias->data<float>() : nullptr;
  a.a_log = a_log.data<float>();
  a.dt_bias = dt_bias.data<float>();
  a.skip = skip.data<float>();
  a.norm_weight = norm_weight ? norm_weight->data<float>() : nullptr;
  a.state = state.data<float>();
  a.ring = ring.data<void>();
  a.out = out.data<void>();
  a.window = ring.size(1);
  a.eps = eps;
  a.low = low;
  a.high = high;
  StateColumns columns = columns_of(op, query_start, seq_lens, state_rows, start, end, saves);
  columns.tokens = x.size(0);
  columns.states = state.size(0);
  columns.taps = a.taps;
  columns.window = a.window;
  const int64_t item = x.item();
  launch([=] {
    const std::vector<StateRow> rows = rows_of(columns, a.out, inner * item);
    const int64_t scratch = kernels().state_scratch(a), count = static_cast<int64_t>(rows.size());
    if (count == 0) return;
    const int64_t tasks = a.groups * a.group_tasks;
    const double of_token = a.task_heads * (0.1 * a.size * a.dim + a.dim) + 2.0 * a.size;
    over_rows(count * tasks, of_token * tokens_of(rows) / count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        kernels().state_scan(a, rows[i / tasks], i % tasks, thread_scratch(scratch));
    });
    over_rows(count, 0.1 * a.entry * tokens_of(rows) / count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) kernels().state_keep(a, rows[i]);
    });
    over_rows(columns.query_start[columns.rows], inner,
              [&](int64_t begin, int64_t end) { kernels().state_gate(a, begin, end, thread_scratch(scratch)); });
  });
}

void gate_heads(const Tensor& mixed, const Tensor& x, const Tensor& out) {
  const char* op = "gate_heads";
  const DType dtype = float_type(x, op);
  require(mixed, x.kind(), {-1, -1, -1}, op, "mixed must be contiguous [T,H,D], like x");
  const int64_t tokens = mixed.size(0), heads = mixed.size(1), dim = mixed.size(2);
  require(x.ndim() == 2 && x.dense(1) && x.size(0) == tokens && x.size(1) >= 2 * heads * dim, op,
          "x must be [T,N] of queries with gates");
  require(out, x.kind(), {tokens, heads * dim}, op, "out must be [T,H*D]");
  const GateHeadsArgs a{.dtype = dtype,
                        .mixed = mixed.data<void>(),
                        .x = x.data<void>(),
                        .out = out.data<void>(),
                        .x_stride = x.stride(0),
                        .heads = heads,
                        .dim = dim};
  launch([=] {
    over_rows(tokens, heads * (5 + 1.0 * dim),
              [&](int64_t begin, int64_t end) { kernels().gate_heads(a, begin, end); });
  });
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  m.def("gated_delta", gated_delta);
  m.def("short_conv", short_conv, nb::arg("x"), nb::arg("conv_weight"), nb::arg("bias").none(), nb::arg("ring"),
        nb::arg("query_start"), nb::arg("seq_lens"), nb::arg("state_rows"), nb::arg("start"), nb::arg("end"),
        nb::arg("saves"), nb::arg("out"));
  m.def("scan_states", scan_states, nb::arg("x"), nb::arg("conv_weight"), nb::arg("conv_bias").none(), nb::arg("a_log"),
        nb::arg("dt_bias"), nb::arg("skip"), nb::arg("norm_weight").none(), nb::arg("norm_size"), nb::arg("eps"),
        nb::arg("low"), nb::arg("high"), nb::arg("state"), nb::arg("ring"), nb::arg("query_start"), nb::arg("seq_lens"),
        nb::arg("state_rows"), nb::arg("start"), nb::arg("end"), nb::arg("saves"), nb::arg("out"));
  m.def("gate_heads", gate_heads);
}

}  // namespace tokserve
