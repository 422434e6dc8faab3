// Gradients of causal_conv1d. With sum[t] the convolution before the activation and
// d_sum[t] = d_y[t] act'(sum[t]), 0 past the length:
//   d_rows[u] = sum over w of weight[w] d_sum[u - w], plus d_new_state[u - length]
//   d_state = the first width - 1 rows of d_rows, d_x the others
//   d_weight[w] = sum over batch and t of d_sum[t] rows[t + w], d_bias = sum of d_sum
//
// Kernels: causal_conv1d_backward_<dtype>_w<width>, and causal_conv1d_sum_parts_<dtype>, which adds
// up the runs' sums of d_weight and d_bias in a fixed order.
// Grid and threadgroup: backward: as in forward, where runs are of d_rows. sum_parts: (blocks of 32
// numbers, groups, one or both sums), threadgroup 1024.
// Function constants: 0 to 4 see rows.h; 5: the sums are wanted. No other alignment is assumed.
//
//   for each row u of the run, and width - 1 rows before it:
//     load the row and d_y; compute sum[u] and d_sum[u]; slide both into their windows
//     in the run: store d_rows[u], and add the products of d_sum[u] and the rows to the run's sums
//   store the run's sums
#include "metal/causal_conv1d/rows.h"
#include "metal/common/kernel.h"
#include "metal/common/sum_parts.h"

constant bool wants_sums [[function_constant(5)]];

// Sums of a run, in the order of the weight.
template <int kWidth>
METAL_FUNC void store_sums(device float* weight_part,
                           device float* bias_part,
                           int count,
                           const thread Window<kWidth>& sums,
                           const thread float* bias_sums) {
  float in_order[kWidth * kChannels];
  MLX_ANVIL_UNROLL
  for (int w = 0; w < kWidth; ++w) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kChannels; ++i) {
      in_order[i * kWidth + w] = sums.x[w][i];
    }
  }
  MLX_ANVIL_UNROLL
  for (int w = 0; w < kWidth; ++w) {
    store_channels<float>(weight_part + w * kChannels, count * kWidth - w * kChannels,
                          in_order + w * kChannels);
  }
  if (has_bias) {
    store_channels<float>(bias_part, count, bias_sums);
  }
}

template <typename T, int kWidth>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void causal_conv1d_backward(
    const device T* x [[buffer(0)]],
    const device T* weight [[buffer(1)]],
    const device T* bias [[buffer(2)]],
    const device T* state [[buffer(3)]],
    const device int* lengths [[buffer(4)]],
    const device T* d_y [[buffer(5)]],
    const device T* d_new_state [[buffer(6)]],
    device T* d_x [[buffer(7)]],
    device T* d_state [[buffer(8)]],
    device float* d_weight_parts [[buffer(9)]],
    device float* d_bias_parts [[buffer(10)]],
    constant CausalConvParams& params [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const Place place = Place::of(params, lengths, group, thread_in_group, threads);
  if (!place.exists) {
    return;
  }
  const int begin = place.first, count = place.count, length = place.length;
  const int end = metal::min(begin + int(params.rows_per_run), int(params.length) + kWidth - 1);
  const int before = metal::max(begin - (kWidth - 1), 0);
  const long channels = params.channels;
  const BatchRows<T, kWidth> rows = BatchRows<T, kWidth>::of(x, state, params, place);
  const device T* const own_d_y = d_y + place.batch * params.d_y.batch + place.channel;
  const device T* const own_d_new_state =
      d_new_state + place.batch * params.d_new_state.batch + place.channel;
  device T* const own_d_x = d_x + long(place.batch) * params.length * channels + place.channel;
  device T* const own_d_state =
      has_state ? d_state + long(place.batch) * (kWidth - 1) * channels + place.channel : d_x;

  Taps<T, kWidth> taps;
  taps.load(weight, bias, place.vector_at(params), count);
  Window<kWidth> window, d_sums, sums;
  float bias_sums[kChannels];
  window.clear();
  d_sums.clear();
  sums.clear();
  clear_channels(bias_sums);
  if (before < length) {
    MLX_ANVIL_UNROLL
    for (int w = 0; w + 1 < kWidth; ++w) {
      rows.load(before + w, window.x[w]);
    }
  }
  for (int u = before; u < end; ++u) {
    d_sums.slide();
    thread float* const d_sum = d_sums.x[kWidth - 1];
    clear_channels(d_sum);
    if (u < length) {
      rows.load(u + kWidth - 1, window.x[kWidth - 1]);
      load_channels<T>(own_d_y + u * params.d_y.row, count, d_sum);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kChannels; ++i) {
        if (applies_silu) {
          const float sum = taps.sum(window, i);
          d_sum[i] *= silu_derivative(sum, fast_sigmoid(sum));
        }
        if (wants_sums && u >= begin) {
          MLX_ANVIL_UNROLL
          for (int w = 0; w < kWidth; ++w) {
            sums.x[w][i] = metal::fma(d_sum[i], window.x[w][i], sums.x[w][i]);
          }
          bias_sums[i] += d_sum[i];
        }
      }
      window.slide();
    }
    if (u < begin || (!has_state && u < kWidth - 1)) {
      continue;
    }
    float out[kChannels];
    clear_channels(out);
    if (u < length + kWidth - 1) {  // rows past the end are never read
      if (u >= length) {
        load_channels<T>(own_d_new_state + (u - length) * params.d_new_state.row, count, out);
      }
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kChannels; ++i) {
        MLX_ANVIL_UNROLL
        for (int w = 0; w < kWidth; ++w) {
          out[i] = metal::fma(d_sums.x[kWidth - 1 - w][i], taps.of.x[w][i], out[i]);
        }
      }
    }
    device T* const to =
        u < kWidth - 1 ? own_d_state + u * channels : own_d_x + (u - (kWidth - 1)) * channels;
    store_channels<T>(to, count, out);
  }
  if (wants_sums) {
    const long at = long(place.run) * channels + place.channel;
    store_sums(d_weight_parts + at * kWidth, d_bias_parts + at, count, sums, bias_sums);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSumThreads)]] void causal_conv1d_sum_parts(
    const device float* weight_parts [[buffer(0)]],
    const device float* bias_parts [[buffer(1)]],
    device T* d_weight [[buffer(2)]],
    device T* d_bias [[buffer(3)]],
    constant CausalConvSumParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shares[kSumThreads];
  const uint columns = group.z == 0 ? params.channels * params.width : params.channels;
  if (group.x * kSumColumns >= columns) {
    return;
  }
  const device float* const parts = group.z == 0 ? weight_parts : bias_parts;
  device T* const sum = group.z == 0 ? d_weight : d_bias;
  sum_parts<T>(parts + long(group.y) * params.parts * columns, params.parts, columns,
               sum + long(group.y) * columns, group.x, simdgroup, lane, shares);
}

// ---- kernels

#define INSTANTIATE(dtype, T, width) \
  MLX_ANVIL_KERNEL("causal_conv1d_backward_" #dtype "_w" #width, causal_conv1d_backward<T, width>)

#define INSTANTIATE_WIDTH(width)     \
  INSTANTIATE(float32, float, width) \
  INSTANTIATE(float16, half, width)  \
  INSTANTIATE(bfloat16, bfloat, width)

INSTANTIATE_WIDTH(2)
INSTANTIATE_WIDTH(3)
INSTANTIATE_WIDTH(4)
INSTANTIATE_WIDTH(5)
INSTANTIATE_WIDTH(6)
INSTANTIATE_WIDTH(7)
INSTANTIATE_WIDTH(8)

#define INSTANTIATE_SUM(dtype, T) \
  MLX_ANVIL_KERNEL("causal_conv1d_sum_parts_" #dtype, causal_conv1d_sum_parts<T>)

INSTANTIATE_SUM(float32, float)
INSTANTIATE_SUM(float16, half)
INSTANTIATE_SUM(bfloat16, bfloat)
