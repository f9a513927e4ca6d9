#include "cpu.h"

#if defined(TOKSERVE_HAS_avx2)
#include <cpuid.h>
#endif

namespace tokserve {

namespace {

#if defined(TOKSERVE_HAS_avx2)
bool avx_vnni() {  // GCC's builtins know no name for it: CPUID leaf 7.1, EAX bit 4
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

std::vector<const Kernels*> find() {
  std::vector<const Kernels*> found;
#if defined(TOKSERVE_HAS_avx2)  // these builtins ask CPUID, and whether the system saves the wide registers
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && __builtin_cpu_supports("avx512bf16")) found.push_back(&avx512_bf16::table);
  if (vnni) found.push_back(&avx512_vnni::table);
  if (avx512) found.push_back(&avx512f::table);
  if (avx2 && avx_vnni()) found.push_back(&avx2_vnni::table);
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

bool has_cheap_widening() {
#if defined(TOKSERVE_HAS_avx2)
  static const bool amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return amd;
#else
  return false;
#endif
}

}  // namespace tokserve
