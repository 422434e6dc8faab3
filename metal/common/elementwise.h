// Bodies of all elementwise kernels: `elementwise_flat` for dense operands, `elementwise_strided`
// for arbitrary strides. An Op is a struct with an enum of kInputs and kOutputs and
// `static void apply(const thread float* in, thread float* out, float scalar)`. It sees float32 for
// every dtype; `scalar` is that of the call.
//
// Every function is inlined and every loop over a pack is unrolled, so that packs stay in registers
// instead of spilling to thread memory.
//
//   elementwise_flat:                            elementwise_strided:
//     run = this threadgroup's elements            pack = this thread's pack of one row
//     for j in 0, 1: load pack j of all inputs     (row, column) -> offset of each input
//     for j in 0, 1: y = Op(x); store pack j       load, y = Op(x), store
#pragma once

#include <metal_stdlib>

#include "metal/common/elementwise_params.h"
#include "metal/common/strided_pack.h"
#include "metal/common/unroll.h"

// Packs in flight per thread of a flat kernel. The host defines the same kPacksPerThread.
enum { kPacksPerThread = 2 };

template <typename T, typename Op>
struct Operands {
  const device T* in[Op::kInputs];
  device T* out[Op::kOutputs];
};

// One pack of every input; applies the op and stores its outputs.
template <typename T, typename Op>
struct PackOfAll {
  float x[Op::kInputs][Pack<T>::kSize];

  METAL_FUNC void apply_and_store(const thread Operands<T, Op>& operands,
                                  long at,
                                  int count,
                                  float scalar) thread {
    float y[Op::kOutputs][Pack<T>::kSize];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < Pack<T>::kSize; ++i) {
      float in[Op::kInputs];
      float out[Op::kOutputs];
      MLX_ANVIL_UNROLL
      for (int k = 0; k < Op::kInputs; ++k) {
        in[k] = x[k][i];
      }
      Op::apply(in, out, scalar);
      MLX_ANVIL_UNROLL
      for (int k = 0; k < Op::kOutputs; ++k) {
        y[k][i] = out[k];
      }
    }
    MLX_ANVIL_UNROLL
    for (int k = 0; k < Op::kOutputs; ++k) {
      store_pack<T>(operands.out[k] + at, count, y[k]);
    }
  }
};

// Processes a thread's packs, which lie `threads` packs apart. kWhole states at compile time that
// every pack is full: without branches between them, the loads overlap.
template <bool kWhole, typename T, typename Op>
METAL_FUNC void elementwise_packs(const thread Operands<T, Op>& operands,
                                  long size,
                                  float scalar,
                                  long first_pack,
                                  uint threads) {
  enum { kSize = Pack<T>::kSize };
  PackOfAll<T, Op> packs[kPacksPerThread];
  MLX_ANVIL_UNROLL
  for (int j = 0; j < kPacksPerThread; ++j) {
    const long at = (first_pack + j * threads) * kSize;
    if (kWhole || at < size) {
      const int count = kWhole ? int(kSize) : int(metal::min(long(kSize), size - at));
      MLX_ANVIL_UNROLL
      for (int k = 0; k < Op::kInputs; ++k) {
        load_pack<T>(operands.in[k] + at, 1, count, packs[j].x[k]);
      }
    }
  }
  MLX_ANVIL_UNROLL
  for (int j = 0; j < kPacksPerThread; ++j) {
    const long at = (first_pack + j * threads) * kSize;
    if (kWhole || at < size) {
      packs[j].apply_and_store(
          operands, at, kWhole ? int(kSize) : int(metal::min(long(kSize), size - at)), scalar);
    }
  }
}

// Grid: linear_grid(size, threads * kPacksPerThread * pack). A threadgroup covers one contiguous
// run of elements. Adjacent threads take adjacent packs, so that the loads of a simdgroup coalesce.
template <typename T, typename Op>
METAL_FUNC void elementwise_flat(const thread Operands<T, Op>& operands,
                                 constant ElementwiseParams& params,
                                 uint3 group,
                                 uint3 groups,
                                 uint thread_index,
                                 uint threads) {
  const long size = params.size;
  const long run = long(group.y) * groups.x + group.x;
  const long packs_per_run = long(kPacksPerThread) * threads;
  const long first_pack = run * packs_per_run + thread_index;
  if ((run + 1) * packs_per_run * Pack<T>::kSize <= size) {
    elementwise_packs<true>(operands, size, params.scalar, first_pack, threads);
  } else {
    elementwise_packs<false>(operands, size, params.scalar, first_pack, threads);
  }
}

// Grid: linear_grid(rows * packs per row, threads), where a row is a run along the last axis. Each
// thread processes one pack of one row. The outputs are dense.
template <typename T, typename Op>
METAL_FUNC void elementwise_strided(const thread Operands<T, Op>& operands,
                                    constant ElementwiseParams& params,
                                    uint3 group,
                                    uint3 groups,
                                    uint thread_index,
                                    uint threads) {
  const int last = params.rank - 1;
  const long width = params.shape[last];
  const long packs_per_row = (width + Pack<T>::kSize - 1) / Pack<T>::kSize;
  const long pack = (long(group.y) * groups.x + group.x) * threads + thread_index;
  long row = pack / packs_per_row;
  const long column = (pack - row * packs_per_row) * Pack<T>::kSize;
  const long at = row * width + column;
  if (at >= params.size) {
    return;
  }
  long offset[Op::kInputs];
  MLX_ANVIL_UNROLL
  for (int k = 0; k < Op::kInputs; ++k) {
    offset[k] = column * params.strides[k][last];
  }
  for (int axis = last - 1; axis >= 0; --axis) {
    const long rest = row / params.shape[axis];
    const long index = row - rest * params.shape[axis];
    MLX_ANVIL_UNROLL
    for (int k = 0; k < Op::kInputs; ++k) {
      offset[k] += index * params.strides[k][axis];
    }
    row = rest;
  }
  const int count = metal::min(long(Pack<T>::kSize), width - column);
  PackOfAll<T, Op> packs;
  MLX_ANVIL_UNROLL
  for (int k = 0; k < Op::kInputs; ++k) {
    load_pack<T>(operands.in[k] + offset[k], params.strides[k][last], count, packs.x[k]);
  }
  packs.apply_and_store(operands, at, count, params.scalar);
}

template <bool kFlat, typename T, typename Op>
METAL_FUNC void elementwise(const thread Operands<T, Op>& operands,
                            constant ElementwiseParams& params,
                            uint3 group,
                            uint3 groups,
                            uint thread_index,
                            uint threads) {
  if (kFlat) {
    elementwise_flat(operands, params, group, groups, thread_index, threads);
  } else {
    elementwise_strided(operands, params, group, groups, thread_index, threads);
  }
}
