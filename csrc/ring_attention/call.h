// A call of ring attention on the CPU, as plain data and the transfers that it needs.
#pragma once

#include <memory>
#include <optional>

#include "distributed/neighbours.h"
#include "flash_attention/problem.h"
#include "ring_attention/plan.h"

namespace mlx_anvil {

struct RingCall {
  Group group;
  RingLayout layout;
  int64_t shortest_piece = 0;      // see RingPlan
  const int32_t* lengths = nullptr;  // of the whole sequences, [batch]; null: all rows are in use
  // Pieces of other ranks, or of this one on their way: two of keys and values, [k | v] one after
  // the other, and two of their float32 gradients. Without data if there is one rank.
  mx::array pieces[2];
  mx::array gradients[2];
};

// Bytes of a piece of `rows` keys and values, and of its gradients.
int64_t piece_bytes(const AttentionSizes& sizes, int64_t rows, int64_t item_bytes);

// `args` has the rank's part: kv_len is q_len. Both return when the work and all transfers are done.
void ring_forward_cpu(const AttentionForwardArgs& args, const RingCall& call);
void ring_backward_cpu(const AttentionBackwardArgs& args, const RingCall& call);

}  // namespace mlx_anvil
