// Whether two neighbours make the same call, which they tell each other before it begins. With
// different sizes they would read each other's bytes as something else.
#pragma once

#include <cstdint>

#include "distributed/neighbours.h"
#include "distributed/ring_call.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// Exchanges what the calls are. Throws if that of the left neighbour differs, and says in what.
void require_agreement(Neighbours& neighbours,
                       const char* op,
                       const RingCall& call,
                       const AttentionOperands& args,
                       int64_t pieces);

// Bytes of RingCall::told.
int64_t agreement_bytes();

}  // namespace mlx_anvil
