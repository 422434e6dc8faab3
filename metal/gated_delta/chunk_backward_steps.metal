// gated_delta and ssd_scan by chunks: gradients of q, k, g, beta and skip, from what
// chunk_forward.metal and chunk_backward.metal kept. No chunk waits for another (chunk.h).
//
// Kernels: gated_delta_chunk_backward_steps_<dtype>_d<key dim>, and _pairs_ for matrix units of 16
// bits.
// Grid: x covers chunks, y value heads, z batch rows and may be smaller than the batch.
// Threadgroup: 128 x 1 x 1; a SIMD group has 16 steps.
//
// Bindings: q, k, v, d_y, lengths, rows, states, changes, d_states, d_changes, parts, params
// Function constants: 3, 10, 11 as in state.h; 13, 14: vectors of 16 bytes (chunk.h). `parts` are
// those of gated_delta_sum, in one chunk of all steps and one block.
//
// With k and q scaled, d_P = d_Y U^T, d_A = -d_X U^T, B = beta G d_A below the diagonal:
//   W = d_Y S, Z = d_X S, N = U d_S                 S before the chunk, d_S after it
//   d_q = gamma W + (G d_P) k
//   d_k = -beta gamma Z + G[63] N + (B + B^T) k + (G d_P)^T q
//   d_beta[i] = d_X[i] . v[i] - gamma[i] Z[i] . k[i] + sum_j G d_A (k[i] . k[j])
//   D = d_P (q . k) + beta d_A (k . k): the gradient of G. That of gamma: W . q - beta Z . k. That
//   of decays to the chunk's end: N . k and, from its begin, the sum over S d_S. d_g[i] = sum over
//   j < i <= m of G[m][i] D[m][j] G[i - 1][j], begin and end included
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk_numbers.h"
#include "metal/gated_delta/decays.h"

template <typename T, bool kPairs, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void gated_delta_chunk_backward_steps(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device T* d_y [[buffer(3)]],
    const device int* lengths [[buffer(4)]],
    const device float* rows [[buffer(5)]],
    const device float* states [[buffer(6)]],
    const device float* changes [[buffer(7)]],
    const device float* d_states [[buffer(8)]],
    const device float* d_changes [[buffer(9)]],
    device float* parts [[buffer(10)]],
    constant GatedDeltaParams& params [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Loads = ChunkLoads<T, kPairs>;
  using Square = RegTile<float, 16, kChunk>;
  enum { kPanels = kKeyDim / kPanel };
  alignas(16) threadgroup float memory[Loads::kMemory];
  threadgroup ChunkSteps facts;
  const FragmentPlace place = fragment_place(lane);
  const int head = int(group.y), own = 16 * int(simdgroup);
  const long columns = value_columns(params);
  const long part_size = 2 * kKeyDim + (has_skip ? 3 : 2);
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const ChunkPlace chunk =
        chunk_place(params, steps_of(params, lengths, batch), batch, head, int(group.x));
    const long token = long(batch) * params.length + chunk.first;
    const long part_stride = params.value_heads * part_size;
    device float* const part = parts + (token * params.value_heads + head) * part_size;
    if (chunk.is_padding()) {
      for (int i = int(thread_index); i < chunk.exists * part_size; i += kChunkThreads) {
        part[i / part_size * part_stride + i % part_size] = 0.0f;
      }
      continue;
    }
    const Loads loads = {memory, place, thread_index, chunk};
    const Rows<T> d_rows = {d_y + batch * params.d_y_strides[0] +
                                chunk.first * params.d_y_strides[1] + head * params.d_y_strides[2],
                            params.d_y_strides[1], 1, chunk.steps, params.value_dim};
    const Rows<T> v_rows = {v + at.v + chunk.first * params.v_strides[1], params.v_strides[1], 1,
                            chunk.steps, params.value_dim};
    const device float* const u_rows = changes + chunk.index * kChunk * columns;
    const device float* const x_rows = d_changes + chunk.index * kChunk * columns;
    const device float* const s_rows = states + chunk.index * columns * kKeyDim;
    const device float* const d_s_rows = d_states + chunk.index * columns * kKeyDim;
    const int panels = int(columns) / kPanel;
    load_steps(facts, rows, chunk, thread_index);

    // The gradient of G below the diagonal, and what it gives those of g and beta.
    Square weights, changed;  // G d_P, B
    {
      Square kk, qk, left;
      kk.zero();
      qk.zero();
      weights.zero();
      changed.zero();
      MLX_ANVIL_NO_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        read_tile(left, loads.keys(q + at.q, params.q_strides[1], panel), own, place);
        const threadgroup T* const keys = loads.keys(k + at.k, params.k_strides[1], panel);
        add_product<kPairs, true, true>(qk, left, keys, place);
        read_tile(left, keys, own, place);
        add_product<kPairs, true, true>(kk, left, keys, place);
      }
      float d_rate[2] = {}, d_skip[2] = {};
      for (int panel = 0; panel < panels; ++panel) {
        Square other;
        read_tile(left, loads.values(d_rows, panel), own, place);
        read_tile(other, loads.values(v_rows, panel), own, place);
        add_row_products(left, other, d_skip);
        loads.numbers(u_rows + panel * kPanel, columns);
        loads.template add_numbers<true, true>(weights, left);
        read_rows(left, x_rows + own * columns + panel * kPanel, columns, place);
        if (corrects) {
          loads.template add_numbers<true, false>(changed, left);
        }
        add_row_products(left, other, d_rate);
      }
      store_decays(memory, facts.gate, thread_index);
      Square decays;
      decays.load(memory + own * kDecayStride, kDecayStride, place);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = own + 8 * i + place.row;
        const float of_key = facts.key_scale[row], of_query = facts.query_scale[row];
        const float rate = facts.rate[row];
        MLX_ANVIL_UNROLL
        for (int n = 0; n < kChunk / 8; ++n) {
          const int column = 8 * n + place.column;
          const float2 scale = float2(facts.key_scale[column], facts.key_scale[column + 1]);
          const float2 below = float2(column < row, column + 1 < row);
          const float2 up_to = float2(column <= row, column + 1 <= row);
          const float2 decay = elements_of(decays.fragments[i][n]);
          const float2 d_weight = elements_of(weights.fragments[i][n]);
          const float2 d_change = -below * elements_of(changed.fragments[i][n]);
          const float2 keys = elements_of(kk.fragments[i][n]) * scale * of_key;
          const float2 queries = elements_of(qk.fragments[i][n]) * scale * of_query;
          const float2 of_rate = d_change * decay * keys;
          d_rate[i] += of_rate.x + of_rate.y;
          weights.fragments[i][n] = fragment_of<float>(up_to * d_weight * decay);
          changed.fragments[i][n] = fragment_of<float>(d_change * decay * rate);
          kk.fragments[i][n] =
              fragment_of<float>(below * d_weight * queries + d_change * rate * keys);
        }
        d_rate[i] = row_sum(d_rate[i]);
        d_skip[i] = row_sum(d_skip[i]);
        if (place.column == 0) {
          facts.d_rate[row] = d_rate[i];
          facts.d_skip[row] = d_skip[i];
        }
      }
      // G^T D, whose row i is summed up with row i - 1 of G.
      read_transposed(left, memory, own, place);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      store_square(memory + own * kDecayStride, kk, place);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      qk.zero();
      qk.mma(left, SharedTile<float, kDecayStride>{memory, place});
      store_decays(memory, facts.gate, thread_index);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = own + 8 * i + place.row;
        float sum = 0.0f;
        MLX_ANVIL_UNROLL
        for (int n = 0; n < kChunk / 8; ++n) {
          const int column = 8 * n + place.column;
          const float2 pair = elements_of(qk.fragments[i][n]);
          const threadgroup float* const before =
              memory + metal::max(row - 1, 0) * kDecayStride + column;
          sum += column < row ? pair.x * before[0] : 0.0f;
          sum += column + 1 < row ? pair.y * before[1] : 0.0f;
        }
        sum = row_sum(sum);
        if (place.column == 0) {
          facts.d_gate[row] = sum;
        }
      }
    }

    // The transposes of both, from products of their own.
    Square weights_transposed;
    {
      Square changed_transposed, left;
      weights_transposed.zero();
      changed_transposed.zero();
      Square decays;
      read_transposed(decays, memory, own, place);
      for (int panel = 0; panel < panels; ++panel) {
        read_rows(left, u_rows + own * columns + panel * kPanel, columns, place);
        add_product<kPairs, true, false>(weights_transposed, left, loads.values(d_rows, panel),
                                         place);
        if (corrects) {
          loads.numbers(x_rows + panel * kPanel, columns);
          loads.template add_numbers<true, false>(changed_transposed, left);
        }
      }
      MLX_ANVIL_UNROLL
      for (int f = 0; f < 2 * kChunk / 8; ++f) {
        const int i = f / (kChunk / 8), n = f % (kChunk / 8);
        const int row = own + 8 * i + place.row, column = 8 * n + place.column;
        const float2 decay = elements_of(decays.fragments[i][n]);
        const float2 above = float2(row < column, row < column + 1);
        const float2 from = float2(row <= column, row <= column + 1);
        const float2 rate = float2(facts.rate[column], facts.rate[column + 1]);
        weights_transposed.fragments[i][n] =
            fragment_of<float>(from * decay * elements_of(weights_transposed.fragments[i][n]));
        changed.fragments[i][n] = fragment_of<float>(
            elements_of(changed.fragments[i][n]) -
            above * decay * rate * elements_of(changed_transposed.fragments[i][n]));
      }
    }
    scale_columns(weights, facts.key_scale, place);
    scale_columns(changed, facts.key_scale, place);
    scale_columns(weights_transposed, facts.query_scale, place);

    float of_query[2] = {}, of_key[2] = {}, of_end[2] = {};  // W . q, Z . k, N . k
    MLX_ANVIL_NO_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      const int column = panel * kPanel;
      Square sum, left;
      sum.zero();
      for (int of_values = 0; of_values < panels; ++of_values) {
        read_tile(left, loads.values(d_rows, of_values), own, place);
        loads.numbers(s_rows + of_values * kPanel * kKeyDim + column, kKeyDim);
        loads.template add_numbers<false, true>(sum, left);
      }
      const threadgroup T* keys_or_queries = loads.keys(q + at.q, params.q_strides[1], panel);
      read_tile(left, keys_or_queries, own, place);
      add_row_products(sum, left, of_query);
      scale_rows(sum, facts.decay + own, place);
      keys_or_queries = loads.keys(k + at.k, params.k_strides[1], panel);
      add_product<kPairs, false, false>(sum, weights, keys_or_queries, place);
      sum.store(part + own * part_stride + column, part_stride, chunk.exists - own, kPanel, place,
                /*vectors=*/!has_skip, /*full=*/true);

      Square d_key;
      d_key.zero();
      sum.zero();
      read_tile(left, keys_or_queries, own, place);
      const Square keys = left;
      for (int of_values = 0; of_values < panels; ++of_values) {
        if (corrects) {
          loads.numbers(s_rows + of_values * kPanel * kKeyDim + column, kKeyDim);
          read_rows(left, x_rows + own * columns + of_values * kPanel, columns, place);
          loads.template add_numbers<false, false>(sum, left);
        }
        loads.numbers(d_s_rows + of_values * kPanel * kKeyDim + column, kKeyDim);
        read_rows(left, u_rows + own * columns + of_values * kPanel, columns, place);
        loads.template add_numbers<false, false>(d_key, left);
      }
      add_row_products(sum, keys, of_key);
      add_row_products(d_key, keys, of_end);
      scale_rows(d_key, facts.decay_after + own, place);
      scale_rows(sum, facts.minus_into + own, place);
      d_key.add(sum);
      if (corrects) {
        add_product<kPairs, false, false>(d_key, changed,
                                          loads.keys(k + at.k, params.k_strides[1], panel), place);
      }
      add_product<kPairs, false, false>(d_key, weights_transposed,
                                        loads.keys(q + at.q, params.q_strides[1], panel), place);
      d_key.store(part + own * part_stride + kKeyDim + column, part_stride, chunk.exists - own,
                  kPanel, place, /*vectors=*/!has_skip, /*full=*/true);
    }

    // The gradients of decays from the chunk's begin, and to its end.
    float states_product = 0.0f;
    for (long i = thread_index; i < columns * kKeyDim / 4; i += kChunkThreads) {
      states_product += metal::dot(reinterpret_cast<const device float4*>(s_rows)[i],
                                   reinterpret_cast<const device float4*>(d_s_rows)[i]);
    }
    states_product = metal::simd_sum(states_product);
    if (lane == 0) {
      facts.states_product[simdgroup] = states_product;
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = own + 8 * i + place.row;
      const float scale = facts.key_scale[row];
      const float w = row_sum(of_query[i]) * facts.query_scale[row];
      const float z = row_sum(of_key[i]) * scale, n = row_sum(of_end[i]) * scale;
      if (place.column == 0) {
        facts.d_begin[row] = w - facts.rate[row] * z;
        facts.d_end[row] = n;
        facts.d_rate[row] -= facts.decay[row] * z;
      }
    }
    store_decays(memory, facts.gate, thread_index);
    if (int(thread_index) < chunk.exists) {
      const int step = int(thread_index);
      const float d_gate = d_gate_of_ends(facts, memory, step);
      const bool counts = step < chunk.steps;
      device float* const to = part + step * part_stride + 2 * kKeyDim;
      to[0] = counts ? facts.d_gate[step] + d_gate : 0.0f;
      to[1] = counts ? facts.d_rate[step] : 0.0f;
      if (has_skip) {
        to[2] = counts ? facts.d_skip[step] : 0.0f;
      }
    }
  }
}

// ---- kernels

#define INSTANTIATE(variant, dtype, T, pairs, dim)                               \
  MLX_ANVIL_KERNEL("gated_delta_chunk_backward_steps_" variant #dtype "_d" #dim, \
                   gated_delta_chunk_backward_steps<T, pairs, dim>)

MLX_ANVIL_DELTA_CHUNK_KERNELS(INSTANTIATE)
