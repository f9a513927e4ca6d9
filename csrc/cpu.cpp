#include "cpu.h"

#include "amx.h"

#if defined(TOKSERVE_HAS_avx2)
#include <cpuid.h>
#elif defined(TOKSERVE_HAS_neon) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tokserve {

namespace {

#if defined(TOKSERVE_HAS_avx2)  // the builtins check CPUID and that the system saves the wide registers
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx_vnni() {  // not known to GCC's builtins: CPUID leaf 7.1, EAX bit 4
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

std::vector<const Kernels*> detect() {
  std::vector<const Kernels*> tables;
#if defined(TOKSERVE_HAS_avx2)
#if defined(TOKSERVE_HAS_amx)
  if (amx_status().empty()) tables.push_back(&amx::table);
#endif
  if (runs_avx512_bf16()) tables.push_back(&avx512_bf16::table);
  if (has_avx512_vnni()) tables.push_back(&avx512_vnni::table);
  if (has_avx512()) tables.push_back(&avx512f::table);
  if (has_avx2() && has_avx_vnni()) tables.push_back(&avx2_vnni::table);
  if (has_avx2()) tables.push_back(&avx2::table);
#elif defined(TOKSERVE_HAS_neon)  // every 64-bit ARM has NEON
#if defined(__linux__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) tables.push_back(&neon_dot::table);
#endif
  tables.push_back(&neon::table);
#endif
  tables.push_back(&portable::table);
  return tables;
}

}  // namespace

const std::vector<const Kernels*>& runnable_kernels() {
  static const std::vector<const Kernels*> tables = detect();
  return tables;
}

bool has_cheap_widening() {
#if defined(TOKSERVE_HAS_avx2)
  static const bool amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return amd;
#else
  return false;
#endif
}

bool runs_avx512_bf16() {
#if defined(TOKSERVE_HAS_avx512_bf16)
  return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
}

const std::vector<const Kernels*>& software_kernels() {
#if defined(TOKSERVE_HAS_avx512_bf16)
  static const std::vector<const Kernels*> all =
      runs_avx512_bf16() ? std::vector<const Kernels*>{&amx_software::table} : std::vector<const Kernels*>{};
#else
  static const std::vector<const Kernels*> all;
#endif
  return all;
}

}  // namespace tokserve
