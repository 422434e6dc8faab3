// Ring attention as a graph of attention nodes and exchanges: what GPUs run, and the definition
// from which derivatives without a kernel are taken. Whole parts go round, as nodes of the graph.
#pragma once

#include "common/primitive.h"
#include "distributed/ring_attention.h"

namespace mlx_anvil {

// kSame: all ranks build the same nodes, also for keys that no query of theirs sees. MLX's order of
// evaluation then is the same, however the graph is differentiated.
enum class RingGraph { kShortest, kSame };

// out, in the dtype of q, and lse.
Arrays ring_forward_graph(const RingConfig& config,
                          const RingInputs& in,
                          RingGraph kind,
                          mx::Stream s);

// d_q, d_k, d_v and, with sinks, d_sinks (float32 [batch, q_heads]).
Arrays ring_backward_graph(const RingConfig& config,
                           const RingInputs& in,
                           const mx::array& out,
                           const mx::array& lse,
                           const mx::array& d_out,
                           const mx::array& d_lse,
                           RingGraph kind,
                           mx::Stream s);

}  // namespace mlx_anvil
