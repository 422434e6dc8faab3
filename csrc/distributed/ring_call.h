// A call of ring attention on the CPU, as plain data and the transfers that it needs.
#pragma once

#include <array>
#include <cstdint>

#include "distributed/neighbours.h"
#include "distributed/ring_plan.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

struct RingCall {
  Group group;
  RingLayout layout;
  const int32_t* lengths = nullptr;  // of the whole sequences, [batch]; null: all rows are in use
  // Memory for two pieces of other ranks, or of this one on their way: of keys and values, [k | v]
  // one after the other, and of their float32 gradients.
  std::array<mx::array, 2> pieces, gradients;
  std::array<mx::array, 2> told;  // see agreement.h: to the right neighbour, by the left one
  bool with_gradients = false;
};

// Bytes of a piece of `rows` keys and values, and of its gradients.
int64_t piece_bytes(const AttentionSizes& sizes, int64_t rows, int64_t item_bytes);

// `args` has the rank's part: kv_len is q_len. Both return when the work and all transfers are
// done.
void ring_forward_cpu(const AttentionForwardArgs& args, const RingCall& call);
void ring_backward_cpu(const AttentionBackwardArgs& args, const RingCall& call);

}  // namespace mlx_anvil
