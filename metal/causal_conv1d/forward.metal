// causal_conv1d: with rows = the state, then x, and act = silu or nothing,
//   y[b, t, c] = act(bias[c] + sum over w of weight[c, w] rows[b, t + w, c]), 0 past the length
//   new_state[b, i, c] = rows[b, length + i, c]
//
// Kernels: causal_conv1d_forward_<dtype>_w<width>.
// Grid: (runs of all batch entries, blocks of channels, 1). Threadgroup: (threads along the
// channels, runs), 256 in all. Function constants: see rows.h; no other alignment is assumed.
//
//   load weights, bias and the first width - 1 rows
//   for each row of the run: load it, add up the products of the window, store y, slide the window
//   the first run of a batch entry: copy the rows of the new state
#include "metal/causal_conv1d/rows.h"
#include "metal/common/kernel.h"

template <typename T, int kWidth>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void causal_conv1d_forward(
    const device T* x [[buffer(0)]],
    const device T* weight [[buffer(1)]],
    const device T* bias [[buffer(2)]],
    const device T* state [[buffer(3)]],
    const device int* lengths [[buffer(4)]],
    device T* y [[buffer(5)]],
    device T* new_state [[buffer(6)]],
    constant CausalConvParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const Place place = Place::of(params, lengths, group, thread_in_group, threads);
  if (!place.exists) {
    return;
  }
  const BatchRows<T, kWidth> rows = BatchRows<T, kWidth>::of(x, state, params, place);
  Taps<T, kWidth> taps;
  taps.load(weight, bias, place.vector_at(params), place.count);
  Window<kWidth> window;
  MLX_ANVIL_UNROLL
  for (int w = 0; w + 1 < kWidth; ++w) {
    clear_channels(window.x[w]);
    if (place.first < place.length) {
      rows.load(place.first + w, window.x[w]);
    }
  }
  const long channels = params.channels;
  const int end = metal::min(place.first + int(params.rows_per_run), int(params.length));
  device T* to = y + (long(place.batch) * params.length + place.first) * channels + place.channel;
  for (int t = place.first; t < end; ++t) {
    float out[kChannels];
    clear_channels(out);
    if (t < place.length) {
      rows.load(t + kWidth - 1, window.x[kWidth - 1]);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kChannels; ++i) {
        const float sum = taps.sum(window, i);
        out[i] = applies_silu ? sum * fast_sigmoid(sum).value : sum;
      }
      window.slide();
    }
    store_channels<T>(to, place.count, out);
    to += channels;
  }
  if (place.first == 0) {
    to = new_state + long(place.batch) * (kWidth - 1) * channels + place.channel;
    for (int i = 0; i + 1 < kWidth; ++i) {
      float kept[kChannels];
      rows.load(place.length + i, kept);
      store_channels<T>(to + i * channels, place.count, kept);
    }
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T, width) \
  MLX_ANVIL_KERNEL("causal_conv1d_forward_" #dtype "_w" #width, causal_conv1d_forward<T, width>)

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
