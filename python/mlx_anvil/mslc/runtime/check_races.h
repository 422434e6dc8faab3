// Races, and reads of threadgroup memory that nobody wrote.
#pragma once

#include "access.h"

namespace mslc {

// The sink of checked launches.
void check_access(Worker& worker, const Access& access);

// To be called when a threadgroup has ended, while its memory is still there.
void finish_threadgroup_checks(Worker& worker);

}  // namespace mslc
