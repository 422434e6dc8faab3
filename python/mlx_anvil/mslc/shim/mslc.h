// The Metal standard library for upstream clang, included in front of every rewritten kernel file.
#pragma once
#pragma clang system_header

// What a function of the shim does has the place where it is called, for findings and profiles.
#pragma clang attribute push(__attribute__((nodebug)), apply_to = hasType(functionType))

#include "address_space.h"
#include "atomic.h"
#include "common.h"
#include "conformance.h"
#include "entry.h"
#include "geometric.h"
#include "integer.h"
#include "math.h"
#include "matrix.h"
#include "pack.h"
#include "quadgroup.h"
#include "relational.h"
#include "simdgroup.h"
#include "simdgroup_matrix.h"
#include "target.h"
#include "traits.h"
#include "types.h"
#include "utility.h"
#include "vec.h"

#pragma clang attribute pop

// Metal declares its types and functions in the global namespace too.
using namespace metal;
