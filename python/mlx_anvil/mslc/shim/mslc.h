// The Metal standard library for upstream clang, included before every rewritten kernel file.
#pragma once
#pragma clang system_header

// Without debug information, findings and profiles attribute the shim's code to its call site.
#pragma clang attribute push(__attribute__((nodebug)), apply_to = hasType(functionType))

#include "address_space.h"
#include "atomic.h"
#include "common.h"
#include "conformance.h"
#include "entry.h"
#include "geometric.h"
#include "integer.h"
#include "math.h"
#include "matmul2d.h"
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

// Metal also makes its types and functions available in the global namespace.
using namespace metal;
