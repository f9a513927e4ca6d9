// The kernel table of one instruction set.
#include "table.h"

#define TOKSERVE_TEXT_OF(x) #x
#define TOKSERVE_TEXT(x) TOKSERVE_TEXT_OF(x)

namespace tokserve {
namespace TOKSERVE_ISA {

#define TOKSERVE_COUNT(kernel) +1
static_assert(sizeof(Kernels) == (2 TOKSERVE_KERNELS(TOKSERVE_COUNT)) * sizeof(void*), "a kernel is not in the list");

// constexpr: no code of this set may run before the processor's support for it is known.
constexpr Kernels table = [] {
  Kernels all{};
  all.name = TOKSERVE_TEXT(TOKSERVE_ISA);
#if defined(__AVX512BF16__)
  all.arithmetic = "pairs";
#else
  all.arithmetic = "fma";
#endif
#define TOKSERVE_ASSIGN(kernel) all.kernel = kernel;
  TOKSERVE_KERNELS(TOKSERVE_ASSIGN)
  return all;
}();

}  // namespace TOKSERVE_ISA
}  // namespace tokserve
