// <metal_quadgroup>: groups of four neighbouring lanes.
#pragma once

#include "simdgroup.h"

namespace metal {
MSLC_GROUP_FUNCTIONS(quad, 4)
}  // namespace metal

#undef MSLC_GROUP_FUNCTIONS
#undef MSLC_GROUP_OF_VALUE
#undef MSLC_GROUP_OF_LANE
#undef MSLC_GROUP_OF_FILL
