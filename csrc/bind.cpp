// The module tokserve._C: choice of kernels and threads, and capture.
#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& find_kernels(const std::string& name) {
  for (const auto* tables : {&runnable_kernels(), &software_kernels()}) {
    for (const Kernels* table : *tables) {
      if (name == table->name) return *table;
    }
  }
  throw nb::value_error(("this machine does not run kernels named " + name).c_str());
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const Kernels* table : runnable_kernels()) all.emplace_back(table->name);
  return all;
}

void use_tensors(nb::handle type, nb::handle capsule) {
  const void* table = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (!table) throw nb::python_error();
  const auto* api = static_cast<const DLExchange*>(table);
  if (api->major != 1 || !api->view) throw nb::type_error("the tensors' DLPack table is not version 1");
  exchange = {api, reinterpret_cast<PyTypeObject*>(type.ptr())};
}

bool set_threads(int n, const std::vector<int>& cpus) {
  require(n >= 1 && n <= 1024, "set_threads", "takes 1 to 1024 threads");
  require(cpus.empty() || static_cast<int>(cpus.size()) == n, "set_threads", "takes a CPU for each thread, or none");
  for (const int cpu : cpus) require(cpu >= 0 && cpu < 65536, "set_threads", "a CPU number is out of range");
  nb::gil_scoped_release unlocked;
  return pool().resize(n, cpus);
}

}  // namespace

const Kernels& kernels() { return *chosen.load(std::memory_order_relaxed); }

void Graph::replay() const {
  nb::gil_scoped_release unlocked;
  capturing.replaying = true;
  try {
    for (const auto& call : calls_) call();
  } catch (...) {
    capturing.replaying = false;
    throw;
  }
  capturing.replaying = false;
}

}  // namespace tokserve

NB_MODULE(_C, m) {
  using namespace tokserve;
  chosen.store(runnable_kernels().front());
  nanobind::set_leak_warnings(false);  // a graph may live as long as the process
  m.def("use_tensors", use_tensors, nb::arg("type"), nb::arg("exchange"),
        "Read tensors of this type through its DLPack exchange table; to be called before any op.");
  m.def("instruction_sets", names, "Names of the kernels this machine runs, best first.");
  m.def("instruction_set", [] { return std::string(kernels().name); }, "Name of the kernels in use.");
  m.def(
      "arithmetic", [](const std::string& name) { return std::string(find_kernels(name).arithmetic); }, nb::arg("name"),
      "The arithmetic of the kernels of this name; those of one arithmetic give the same bits.");
  m.def(
      "select", [](const std::string& name) { chosen.store(&find_kernels(name)); }, nb::arg("name"),
      "Use the kernels of this name; packed weights stay valid. amx_software, for tests, runs where avx512_bf16 does.");
  m.def("set_threads", set_threads, nb::arg("n"), nb::arg("cpus") = std::vector<int>(),
        "Compute with n threads, the calling one included, all others bound to `cpus`; returns whether the "
        "system bound them.");
  m.def("threads", [] { return pool().threads(); });
  nb::class_<Graph>(m, "Graph", "Captured calls of ops of one thread, replayed on the same memory.")
      .def(nb::init<>())
      .def(
          "begin_capture",
          [](Graph& graph) {
            require(!capturing.into, "capture", "this thread is already capturing");
            capturing.into = &graph;
          },
          "Capture what this thread calls from now on.")
      .def(
          "end_capture", [](Graph&) { capturing.into = nullptr; }, "Stop capturing.")
      .def("replay", &Graph::replay, "Run the calls again; invalid contents of tensors raise ValueError.");
  bind_amx(m);
  bind_deltas(m);
  bind_elementwise(m);
  bind_experts(m);
  bind_latent(m);
  bind_linear(m);
  bind_lora(m);
  bind_quant(m);
  bind_attention(m);
  bind_recurrent(m);
  bind_attention_gradients(m);
  bind_gradients(m);
  bind_sampling(m);
  bind_wna16(m);
  bind_experts_wna16(m);
}
