// Which kernel tables this build has and this processor can run.
#pragma once

#include <vector>

#include "kernels.h"

namespace tokserve {

// Best first; the portable table is always last.
const std::vector<const Kernels*>& runnable_kernels();

}  // namespace tokserve
