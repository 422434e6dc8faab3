// Detects races and reads of uninitialised threadgroup memory.
#pragma once

#include "access.h"

namespace mslc {

// The sink of checked launches.
void check_access(Worker& worker, const Access& access);

// Must be called when a threadgroup ends, before its memory is reused.
void finish_threadgroup_checks(Worker& worker);

}  // namespace mslc
