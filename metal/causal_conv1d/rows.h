// What the kernels of causal_conv1d share. A thread has four channels and a run of rows of one
// batch entry. The rows that an output is of slide through its registers, so that each is read
// once.
//
// Rows are numbered with the state in front: row u is a row of the state if u < width - 1, else row
// u - (width - 1) of x. Output t is of rows t to t + width - 1.
#pragma once

#include <metal_stdlib>

#include "metal/causal_conv1d/params.h"
#include "metal/common/activation.h"
#include "metal/common/pack.h"
#include "metal/common/unroll.h"

// True if every thread has four channels, and they are aligned to four elements in every array.
constant bool channels_are_vectors [[function_constant(0)]];
constant bool has_bias [[function_constant(1)]];
constant bool has_state [[function_constant(2)]];  // otherwise it is zeros
constant bool has_lengths [[function_constant(3)]];
constant bool applies_silu [[function_constant(4)]];

enum { kChannels = 4, kThreads = 256 };

template <typename T>
METAL_FUNC void load_channels(const device T* from, int count, thread float* x) {
  if (channels_are_vectors) {
    Quad<T>::load(from, x);
    return;
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kChannels; ++i) {
    x[i] = i < count ? static_cast<float>(from[i]) : 0.0f;
  }
}

template <typename T>
METAL_FUNC void store_channels(device T* to, int count, const thread float* x) {
  if (channels_are_vectors) {
    Quad<T>::store(to, x);
    return;
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kChannels; ++i) {
    if (i < count) {
      to[i] = static_cast<T>(x[i]);
    }
  }
}

METAL_FUNC void clear_channels(thread float* x) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kChannels; ++i) {
    x[i] = 0.0f;
  }
}

// What a thread computes. `exists` is false past the ends of the grid.
struct Place {
  bool exists;
  int channel;
  int count;  // of channels
  uint run;   // among those of all batch entries
  uint batch;
  int first;   // row of the run
  int length;  // valid rows of x

  static Place of(constant CausalConvParams& params,
                  const device int* lengths,
                  uint3 group,
                  uint3 thread_in_group,
                  uint3 threads) {
    Place place;
    place.channel = int(group.y * threads.x + thread_in_group.x) * kChannels;
    place.count = int(params.channels) - place.channel;
    place.run = group.x * threads.y + thread_in_group.y;
    place.exists = place.count > 0 && place.run < params.batch * params.runs;
    if (!place.exists) {
      return place;
    }
    place.batch = place.run / params.runs;
    place.first = int((place.run - place.batch * params.runs) * params.rows_per_run);
    place.length = int(params.length);
    if (has_lengths) {
      place.length = metal::max(metal::min(lengths[place.batch], place.length), 0);
    }
    return place;
  }

  // Where the weights of this thread's channels begin, in rows of [groups, channels].
  METAL_FUNC long vector_at(constant CausalConvParams& params) const thread {
    return long(batch / params.batch_per_group) * params.channels + channel;
  }
};

// The rows of a thread's channels.
template <typename T, int kWidth>
struct BatchRows {
  const device T* x;
  const device T* state;
  long x_stride;
  long state_stride;
  int count;

  static BatchRows of(const device T* x,
                      const device T* state,
                      constant CausalConvParams& params,
                      const thread Place& place) {
    BatchRows rows;
    rows.x = x + place.batch * params.x.batch + place.channel;
    rows.state = has_state ? state + place.batch * params.state.batch + place.channel : x;
    rows.x_stride = params.x.row;
    rows.state_stride = params.state.row;
    rows.count = place.count;
    return rows;
  }

  METAL_FUNC void load(int u, thread float* to) const thread {
    if (u >= kWidth - 1) {
      load_channels<T>(x + (u - (kWidth - 1)) * x_stride, count, to);
    } else if (has_state) {
      load_channels<T>(state + u * state_stride, count, to);
    } else {
      clear_channels(to);
    }
  }
};

// A row of four channels for each tap.
template <int kWidth>
struct Window {
  float x[kWidth][kChannels];

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int w = 0; w < kWidth; ++w) {
      clear_channels(x[w]);
    }
  }

  // Makes room for a newest row, the last one.
  METAL_FUNC void slide() thread {
    MLX_ANVIL_UNROLL
    for (int w = 0; w + 1 < kWidth; ++w) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kChannels; ++i) {
        x[w][i] = x[w + 1][i];
      }
    }
  }
};

template <typename T, int kWidth>
struct Taps {
  Window<kWidth> of;
  float bias[kChannels];

  METAL_FUNC void load(const device T* weight, const device T* biases, long at, int count) thread {
    float in_order[kWidth * kChannels];
    MLX_ANVIL_UNROLL
    for (int w = 0; w < kWidth; ++w) {
      load_channels<T>(weight + at * kWidth + w * kChannels, count * kWidth - w * kChannels,
                       in_order + w * kChannels);
    }
    MLX_ANVIL_UNROLL
    for (int w = 0; w < kWidth; ++w) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kChannels; ++i) {
        of.x[w][i] = in_order[i * kWidth + w];
      }
    }
    if (has_bias) {
      load_channels<T>(biases + at, count, bias);
    } else {
      clear_channels(bias);
    }
  }

  // The convolution before the activation, of one channel.
  METAL_FUNC float sum(const thread Window<kWidth>& window, int i) const thread {
    float total = bias[i];
    MLX_ANVIL_UNROLL
    for (int w = 0; w < kWidth; ++w) {
      total = metal::fma(window.x[w][i], of.x[w][i], total);
    }
    return total;
  }
};
