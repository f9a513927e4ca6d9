#include "cpu.h"

namespace tokserve {

namespace {

std::vector<const Kernels*> find() {
  std::vector<const Kernels*> found;
#if defined(TOKSERVE_HAS_avx2)  // these builtins ask CPUID, and whether the system saves the wide registers
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(&avx512_bf16::table);
  if (avx512) found.push_back(&avx512f::table);
  if (avx2) found.push_back(&avx2::table);
#endif
  found.push_back(&portable::table);
  return found;
}

}  // namespace

const std::vector<const Kernels*>& runnable_kernels() {
  static const std::vector<const Kernels*> found = find();
  return found;
}

}  // namespace tokserve
