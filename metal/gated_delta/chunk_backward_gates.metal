// gated_delta and ssd_scan by chunks: gradients of g, beta and skip, from the sums of
// chunk_backward_squares.metal and chunk_backward_keys.metal (chunk.h).
//
// Kernels: gated_delta_chunk_backward_gates_d<key dim>.
// Grid: x covers chunks, y value heads, z batch rows and may be smaller than the batch.
// Threadgroup: 128 x 1 x 1; the first 64 threads have a step each.
//
// Bindings: lengths, rows, sums, dots, d_g, d_beta, d_skip, params
// Function constants: 3, 8, 11 as in state.h. Results are dense. Per channel there is no gradient
// of g, and `dots` are gamma Z . k of each panel of 32 channels.
//
// W, Z and N as in chunk_backward_keys.metal; the gradient of gamma is W . q - beta Z . k, that of
// decays to the chunk's end N . k, and that of the decay through the chunk the sum over S d_S. They
// add to d_g[i] as the begin and the end of its sum over j < i <= m. d_beta -= gamma Z . k.
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk_tiles.h"
#include "metal/gated_delta/decays.h"

template <int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void gated_delta_chunk_backward_gates(
    const device int* lengths [[buffer(0)]],
    const device float* rows [[buffer(1)]],
    const device float* sums [[buffer(2)]],
    const device float* dots [[buffer(3)]],
    device float* d_g [[buffer(4)]],
    device float* d_beta [[buffer(5)]],
    device float* d_skip [[buffer(6)]],
    constant GatedDeltaParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  enum { kPanels = kKeyDim / kPanel, kPanelsOfChannels = kKeyDim / kChannels };
  alignas(16) threadgroup float decays[kChunk * kDecayStride];
  threadgroup ChunkSteps facts;
  threadgroup float d_begin[kChunk], d_end[kChunk], d_through[kChunk];
  const int head = int(group.y), step = int(thread_index);
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const ChunkPlace chunk =
        chunk_place(params, steps_of(params, lengths, batch), batch, head, int(group.x));
    float d_gate = 0.0f, d_rate = 0.0f, d_of_skip = 0.0f;
    if (!chunk.is_padding() && step < kChunk) {
      const device float* const own = sums + chunk.index * kChunkSums * kChunk + step;
      d_rate = own[kRateSum * kChunk];
      d_of_skip = has_skip ? own[kSkipSum * kChunk] : 0.0f;
      if (g_is_per_channel) {
        MLX_ANVIL_UNROLL
        for (int panel = 0; panel < kPanelsOfChannels; ++panel) {
          d_rate -= dots[(chunk.index * kPanelsOfChannels + panel) * kChunk + step];
        }
      } else {
        d_gate = own[kGateSum * kChunk];
      }
    }
    if (!chunk.is_padding() && !g_is_per_channel) {
      load_steps(facts, params, rows, chunk, thread_index);
      if (step < kChunk) {
        float total[kChunkDots] = {};
        MLX_ANVIL_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          MLX_ANVIL_UNROLL
          for (int i = 0; i < kChunkDots; ++i) {
            total[i] += dots[((chunk.index * kPanels + panel) * kChunkDots + i) * kChunk + step];
          }
        }
        const float z = total[kKeyDot] * facts.key_scale[step];
        d_begin[step] = total[kQueryDot] * facts.query_scale[step] - facts.rate[step] * z;
        d_end[step] = total[kEndDot] * facts.key_scale[step];
        d_through[step] = total[kThroughDot];
        d_rate -= facts.decay[step] * z;
      }
      store_decays(decays, facts.gate, thread_index);
      if (step < kChunk) {
        d_gate += d_gate_of_ends(facts, decays, d_begin, d_end, d_through, step);
      }
    }
    if (step < chunk.exists) {
      const bool counts = step < chunk.steps;
      const long token = long(batch) * params.length + chunk.first + step;
      const long to = token * params.value_heads + head;
      if (!g_is_per_channel) {
        d_g[to] = counts ? d_gate : 0.0f;
      }
      d_beta[to] = counts ? d_rate : 0.0f;
      if (has_skip) {
        d_skip[to] = counts ? d_of_skip : 0.0f;
      }
    }
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("gated_delta_chunk_backward_gates_d64", gated_delta_chunk_backward_gates<64>)
MLX_ANVIL_KERNEL("gated_delta_chunk_backward_gates_d128", gated_delta_chunk_backward_gates<128>)
