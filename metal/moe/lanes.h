// Lanes of a simdgroup. The host defines the same value.
#pragma once

enum { kLanes = 32 };
