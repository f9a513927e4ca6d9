// Which kernel tables this build has and this processor can run, and what it does well.
#pragma once

#include <vector>

#include "kernels.h"

namespace tokserve {

// Best first; the portable table is always last.
const std::vector<const Kernels*>& runnable_kernels();

// Whether shifts and masks have execution ports of their own: on AMD; Intel's vector ports do both.
bool has_cheap_widening();

// Whether the processor and the system run the kernels named avx512_bf16.
bool runs_avx512_bf16();

// Tables that do in software what this processor may lack. They run here, for tests; nothing chooses them.
const std::vector<const Kernels*>& software_kernels();

}  // namespace tokserve
