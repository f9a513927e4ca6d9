// Binding of the gradients of attention: divides the queries into tasks, and adds what tasks have for the same keys in
// the tasks' order.
#include <memory>
#include <vector>

#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

constexpr int64_t kTaskRows = 1024;           // queries times heads of a group
constexpr int64_t kPartialFloats = 16 << 20;  // in memory at a time
constexpr int64_t kMergedTokens = 128;        // of one piece of the addition
constexpr const char* kOp = "attention_gradients";

using Args = AttentionGradientsArgs;
using Task = AttentionGradientsTask;

// Node r has queries start[r] .. start[r + 1] - 1, the last of the positions path[path_start[r]] ...
struct Nodes {
  int64_t count, tokens;
  const int64_t* start;       // [count + 1]
  const int64_t* path;        // [path_start[count]]
  const int64_t* path_start;  // [count + 1]
};

void check(const Nodes& nodes, int64_t length) {
  require(nodes.start[0] == 0 && nodes.start[nodes.count] == nodes.tokens, kOp, "query_start must go from 0 to T");
  require(nodes.path_start[0] == 0 && nodes.path_start[nodes.count] == length, kOp,
          "path_start must go from 0 to the length of paths");
  for (int64_t r = 0; r < nodes.count; r++) {
    const int64_t begin = nodes.path_start[r], end = nodes.path_start[r + 1];
    const int64_t queries = nodes.start[r + 1] - nodes.start[r];
    require(begin <= end && queries >= 0 && queries <= end - begin, kOp, "a node has more queries than positions");
    for (int64_t i = begin; i < end; i++) {
      require(nodes.path[i] >= 0 && nodes.path[i] < nodes.tokens && (i == begin || nodes.path[i] > nodes.path[i - 1]),
              kOp, "a path must hold tokens in ascending order");
    }
  }
}

std::vector<Task> tasks_of(const Args& a, const Nodes& nodes) {
  std::vector<Task> tasks;
  const int64_t most = std::max<int64_t>(1, kTaskRows / (a.heads / a.kv_heads));
  for (int64_t r = 0; r < nodes.count; r++) {
    const int64_t* path = nodes.path + nodes.path_start[r];
    const int64_t first = nodes.start[r], queries = nodes.start[r + 1] - first;
    const int64_t position = nodes.path_start[r + 1] - nodes.path_start[r] - queries;
    for (int64_t q = 0; q < queries; q += most) {
      const int64_t at = position + q, seen = a.window > 0 ? std::max<int64_t>(0, at - a.window + 1) : 0;
      for (int64_t head = 0; head < a.kv_heads; head++)
        tasks.push_back({path, first + q, at, std::min(most, queries - q), seen, head});
    }
  }
  return tasks;
}

// Tasks [begin, end), then their sums for the same keys, in their order.
void run(const Args& a, const std::vector<Task>& tasks, size_t begin, size_t end, int64_t tokens) {
  const Kernels& kernel = kernels();
  std::vector<int64_t> at{0};
  for (size_t i = begin; i < end; i++) at.push_back(at.back() + kernel.attention_gradients_partial(a, tasks[i]));
  const std::unique_ptr<float[]> partials(new float[at.back()]);
  parallel(static_cast<int64_t>(end - begin), [&](int64_t i) {
    const Task& task = tasks[begin + i];
    char* scratch = thread_scratch(kernel.attention_gradients_scratch(a, task));
    kernel.attention_gradients(a, task, partials.get() + at[i], scratch);
  });
  const int64_t pieces = (tokens + kMergedTokens - 1) / kMergedTokens;
  parallel(pieces * a.kv_heads, [&](int64_t i) {
    const int64_t first = i / a.kv_heads * kMergedTokens;
    for (size_t n = begin; n < end; n++) {
      if (tasks[n].kv_head != i % a.kv_heads) continue;
      kernel.merge_attention_gradients(a, tasks[n], partials.get() + at[n - begin], first, first + kMergedTokens);
    }
  });
}

void attention_gradients(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& start,
                         const Tensor& paths, const Tensor& path_start, float scale, int64_t window, float softcap,
                         const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v) {
  require(!capturing.into, kOp, "cannot be captured");
  const DType dtype = float_type(q, kOp);
  require(q.ndim() == 3 && k.ndim() == 3, kOp, "q and k must be [T,heads,D]");
  const int64_t tokens = q.size(0), heads = q.size(1), kv_heads = k.size(1), dim = q.size(2);
  require(kv_heads > 0 && dim > 0 && heads > 0 && heads % kv_heads == 0, kOp, "q's heads must be those of k's groups");
  for (const Tensor* t : {&grad, &q, &k, &v}) {
    require(t->kind() == q.kind() && t->ndim() == 3 && t->dense(1), kOp, "takes [T,heads,D], dense in a token");
    require(t->size(0) == tokens && t->size(1) == (t == &grad || t == &q ? heads : kv_heads) && t->size(2) == dim, kOp,
            "q, k, v and the gradient must fit");
  }
  require(grad_q, Kind::f32, {tokens, heads, dim}, kOp, "grad_q must be float32 [T,Hq,D]");
  for (const Tensor* t : {&grad_k, &grad_v})
    require(*t, Kind::f32, {tokens, kv_heads, dim}, kOp, "grad_k and grad_v must be float32 [T,Hk,D]");
  require(start, Kind::i64, {-1}, kOp, "query_start must be int64 [R+1]");
  require(start.size(0) > 0, kOp, "query_start must be int64 [R+1]");
  require(path_start, Kind::i64, {start.size(0)}, kOp, "path_start must be int64 [R+1]");
  require(paths, Kind::i64, {-1}, kOp, "paths must be int64");
  const Nodes nodes{start.size(0) - 1, tokens, start.data<int64_t>(), paths.data<int64_t>(),
                    path_start.data<int64_t>()};
  check(nodes, paths.size(0));
  const Args a{.dtype = dtype,
               .grad = grad.data<void>(),
               .q = q.data<void>(),
               .k = k.data<void>(),
               .v = v.data<void>(),
               .grad_q = grad_q.data<float>(),
               .grad_k = grad_k.data<float>(),
               .grad_v = grad_v.data<float>(),
               .grad_stride = grad.stride(0),
               .q_stride = q.stride(0),
               .k_stride = k.stride(0),
               .v_stride = v.stride(0),
               .heads = heads,
               .kv_heads = kv_heads,
               .dim = dim,
               .scale = scale,
               .window = window,
               .softcap = softcap};
  const std::vector<Task> tasks = tasks_of(a, nodes);
  const Unlocked unlocked;
  for (size_t begin = 0, end = 0; begin < tasks.size(); begin = end) {
    int64_t floats = 0;
    while (end < tasks.size() && (floats < kPartialFloats || end - begin < static_cast<size_t>(pool().threads())))
      floats += kernels().attention_gradients_partial(a, tasks[end++]);
    run(a, tasks, begin, end, tokens);
  }
}

}  // namespace

void bind_attention_gradients(nb::module_& m) { m.def("attention_gradients", attention_gradients); }

}  // namespace tokserve
