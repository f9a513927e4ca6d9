// Bindings of AMX's status, and, for tests, of the software tiles and the check of the processor's tiles.
#include <nanobind/stl/string.h>

#include <cstring>
#include <vector>

#include "amx.h"
#include "bind.h"
#include "cpu.h"

namespace nb = nanobind;

namespace tokserve {

#if defined(TOKSERVE_HAS_avx512_bf16)

namespace {

constexpr size_t kRowBytes = 64, kTileBytes = 1024;

nb::bytes multiply_tile(const nb::bytes& a, const nb::bytes& b, const nb::bytes& c) {
  const size_t rows = a.size() / kRowBytes;
  require(runs_avx512_bf16(), "amx_tile", "this processor does not run the kernels named avx512_bf16");
  require(rows >= 1 && rows <= 16 && a.size() == rows * kRowBytes, "amx_tile", "a must be 1 to 16 rows of 64 bytes");
  require(b.size() == kTileBytes && c.size() == a.size(), "amx_tile", "b must be 1024 bytes, c as many as a");
  std::vector<uint16_t> left(a.size() / 2), right(b.size() / 2);
  std::vector<float> sums(c.size() / 4);
  std::memcpy(left.data(), a.data(), a.size());
  std::memcpy(right.data(), b.data(), b.size());
  std::memcpy(sums.data(), c.data(), c.size());
  amx_software::multiply_tile(left.data(), right.data(), sums.data(), static_cast<int>(rows));
  return nb::bytes(sums.data(), c.size());
}

bool agree(const nb::callable& product) {
  require(runs_avx512_bf16(), "amx_tiles_agree", "this processor does not run the kernels named avx512_bf16");
  return tiles_agree([&](const uint16_t* a, const uint16_t* b, float* c, int rows) {
    const size_t size = rows * kRowBytes;
    const auto result = nb::cast<nb::bytes>(product(nb::bytes(a, size), nb::bytes(b, kTileBytes), nb::bytes(c, size)));
    require(result.size() == size, "amx_tiles_agree", "the product must return as many bytes as c has");
    std::memcpy(c, result.data(), size);
  });
}

}  // namespace

#endif

void bind_amx(nb::module_& m) {
  m.def(
      "amx_status", [] { return amx_status(); },
      "Why the kernels named amx may not be used on this machine; empty: they may.");
#if defined(TOKSERVE_HAS_avx512_bf16)
  m.def("amx_tile", multiply_tile, nb::arg("a"), nb::arg("b"), nb::arg("c"),
        "The software tiles' c + a b: c is float32 [M,16], a bfloat16 [M,32], b bfloat16 [16,16,2], M at most 16.");
  m.def("amx_tiles_agree", agree, nb::arg("product"),
        "Whether product(a, b, c) passes the check that AMX's tiles pass at start.");
#endif
}

}  // namespace tokserve
