// Which kernel tables this build has and this processor can run, and what it does well.
#pragma once

#include <vector>

#include "kernels.h"

namespace tokserve {

// Best first; the portable table is always last.
const std::vector<const Kernels*>& runnable_kernels();

// Whether shifts and masks have execution ports of their own: on AMD; Intel's vector ports do both.
bool has_cheap_widening();

}  // namespace tokserve
