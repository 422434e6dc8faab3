// Ring attention on the CPU as graph nodes, and what these share with the graph that GPUs run.
#pragma once

#include <vector>

#include "common/primitive.h"
#include "distributed/ring_attention.h"

namespace mlx_anvil {

// out and lse. Not for calls that a GPU runs.
Arrays apply_ring_attention(const RingConfig& config, const RingInputs& in, mx::Stream s);

// The same as a graph of attention nodes and exchanges, for any device. Its gradient runs the
// backward kernels with what the forward saved.
Arrays compose_ring_attention(const RingConfig& config, const RingInputs& in, mx::Stream s);

// q, k, v, sinks and lengths, without those that the call lacks; and back.
Arrays inputs_of(const RingInputs& in);
RingInputs ring_inputs(const RingConfig& config, const Arrays& inputs);

// The gradients of the inputs `argnums`, of those that a backward returns.
Arrays selected_gradients(const RingConfig& config,
                          const Arrays& gradients,
                          const Arrays& primals,
                          const std::vector<int>& argnums,
                          mx::Stream s);

}  // namespace mlx_anvil
