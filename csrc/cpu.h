// Which kernel tables this build has and this processor can run, and the processor's relevant properties.
#pragma once

#include <vector>

#include "kernels.h"

namespace tokserve {

// Best first; the portable table is always last.
const std::vector<const Kernels*>& runnable_kernels();

// Whether shifts and masks use other execution ports than multiply-adds: true on AMD, false on Intel.
bool has_cheap_widening();

// Whether the processor and the system run the kernels named avx512_bf16.
bool runs_avx512_bf16();

// Tables that emulate instructions which this processor may lack: for tests, never chosen by default.
const std::vector<const Kernels*>& software_kernels();

}  // namespace tokserve
