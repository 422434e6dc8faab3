// The loop of every elementwise CPU kernel, for any strides. For kernel files only (see simd.h).
//
// An Op is a struct with `static constexpr int kInputs, kOutputs` and `template <class T> static
// void apply(const f32v* in, f32v* out, float scalar)`. Its operands are float32 for every dtype T;
// T determines the required accuracy. `scalar` is that of the call.
#pragma once

#include "common/elementwise_args.h"
#include "common/simd/simd.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

template <class T, class Op, bool kStream>
inline void apply_block(const T* const* in, T* const* out, int64_t i, float scalar) {
  f32v x[2][Op::kInputs];
  f32v y[2][Op::kOutputs];
  for (int k = 0; k < Op::kInputs; ++k) {
    const Block block = load_block(in[k] + i);
    x[0][k] = block.first;
    x[1][k] = block.second;
  }
  Op::template apply<T>(x[0], y[0], scalar);
  Op::template apply<T>(x[1], y[1], scalar);
  for (int k = 0; k < Op::kOutputs; ++k) {
    store_block<kStream>(out[k] + i, Block{y[0][k], y[1][k]});
  }
}

// Processes less than a block, through padded copies. Accesses nothing beyond `count` elements.
template <class T, class Op>
inline void apply_partial(
    const T* const* in, T* const* out, int64_t i, int64_t count, float scalar) {
  T x[Op::kInputs][kBlock] = {};
  T y[Op::kOutputs][kBlock];
  const T* from[Op::kInputs];
  T* to[Op::kOutputs];
  for (int k = 0; k < Op::kInputs; ++k) {
    std::memcpy(x[k], in[k] + i, count * sizeof(T));
    from[k] = x[k];
  }
  for (int k = 0; k < Op::kOutputs; ++k) {
    to[k] = y[k];
  }
  apply_block<T, Op, false>(from, to, 0, scalar);
  for (int k = 0; k < Op::kOutputs; ++k) {
    std::memcpy(out[k] + i, y[k], count * sizeof(T));
  }
}

// Returns the number of elements until `pointer` is vector-aligned, or -1 if it never is.
template <class T>
inline int64_t elements_to_alignment(const T* pointer) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(pointer) % sizeof(f32v);
  if (past % sizeof(T) != 0) {
    return -1;
  }
  return past == 0 ? 0 : static_cast<int64_t>((sizeof(f32v) - past) / sizeof(T));
}

template <class T, class Op>
inline void apply_dense(
    const T* const* in, T* const* out, int64_t count, bool stream_outputs, float scalar) {
  int64_t i = 0;
  if (stream_outputs) {
    const int64_t head = elements_to_alignment(out[0]);
    for (int k = 1; k < Op::kOutputs; ++k) {
      stream_outputs = stream_outputs && elements_to_alignment(out[k]) == head;
    }
    if (stream_outputs && head >= 0 && head < count) {
      if (head > 0) {
        apply_partial<T, Op>(in, out, 0, head, scalar);
      }
      for (i = head; i + kBlock <= count; i += kBlock) {
        apply_block<T, Op, true>(in, out, i, scalar);
      }
    }
  }
  for (; i + kBlock <= count; i += kBlock) {
    apply_block<T, Op, false>(in, out, i, scalar);
  }
  if (i < count) {
    apply_partial<T, Op>(in, out, i, count - i, scalar);
  }
}

// Iterates over the rows (runs along the last axis) of one input, in the outputs' order.
template <class T>
struct RowWalk {
  const T* row;                        // first element of the current row
  int64_t column;                      // next element within it
  int64_t index[kElementwiseMaxRank];  // position along every axis but the last
};

template <class T>
inline RowWalk<T> walk_from(const ElementwiseArgs& args, int input, int64_t position) {
  const int last = args.rank - 1;
  RowWalk<T> walk;
  walk.column = position % args.shape[last];
  int64_t row = position / args.shape[last];
  walk.row = static_cast<const T*>(args.inputs[input]);
  for (int axis = last - 1; axis >= 0; --axis) {
    walk.index[axis] = row % args.shape[axis];
    row /= args.shape[axis];
    walk.row += walk.index[axis] * args.strides[input][axis];
  }
  return walk;
}

template <class T>
inline void next_row(const ElementwiseArgs& args, int input, RowWalk<T>& walk) {
  walk.column = 0;
  for (int axis = args.rank - 2; axis >= 0; --axis) {
    walk.row += args.strides[input][axis];
    if (++walk.index[axis] < args.shape[axis]) {
      return;
    }
    walk.row -= args.shape[axis] * args.strides[input][axis];
    walk.index[axis] = 0;
  }
}

// Copies the next `count` elements of one input, with any strides, to contiguous memory.
template <class T>
inline void gather(const ElementwiseArgs& args, int input, RowWalk<T>& walk, T* to, int64_t count) {
  const int64_t width = args.shape[args.rank - 1];
  const int64_t stride = args.strides[input][args.rank - 1];
  while (count > 0) {
    const int64_t run = count < width - walk.column ? count : width - walk.column;
    const T* from = walk.row + walk.column * stride;
    if (stride == 1) {
      std::memcpy(to, from, run * sizeof(T));
    } else {
      for (int64_t i = 0; i < run; ++i) {
        to[i] = from[i * stride];
      }
    }
    to += run;
    count -= run;
    walk.column += run;
    if (walk.column == width) {
      next_row(args, input, walk);
    }
  }
}

// Below this width, starting the loop over a row costs more than running it. Gathering several rows
// into one run is faster.
inline constexpr int64_t kMinDirectWidth = 2 * kBlock;

template <class Op>
inline bool rows_are_dense(const ElementwiseArgs& args) {
  for (int k = 0; k < Op::kInputs; ++k) {
    if (args.strides[k][args.rank - 1] != 1) {
      return false;
    }
  }
  return true;
}

template <class T, class Op>
void elementwise(const ElementwiseArgs& args, int64_t begin, int64_t end) {
  RowWalk<T> walk[Op::kInputs];
  const T* in[Op::kInputs];
  T* out[Op::kOutputs];
  for (int k = 0; k < Op::kInputs; ++k) {
    walk[k] = walk_from<T>(args, k, begin);
  }
  for (int k = 0; k < Op::kOutputs; ++k) {
    out[k] = static_cast<T*>(args.outputs[k]) + begin;
  }
  const int64_t width = args.shape[args.rank - 1];
  const bool direct = rows_are_dense<Op>(args) && (args.rank == 1 || width >= kMinDirectWidth);
  constexpr int64_t kRun = 512;
  T run[Op::kInputs][kRun];

  while (begin < end) {
    int64_t count = end - begin;
    if (direct) {
      count = count < width - walk[0].column ? count : width - walk[0].column;
    } else {
      count = count < kRun ? count : kRun;
    }
    for (int k = 0; k < Op::kInputs; ++k) {
      if (direct) {
        in[k] = walk[k].row + walk[k].column;
        next_row(args, k, walk[k]);
      } else {
        gather(args, k, walk[k], run[k], count);
        in[k] = run[k];
      }
    }
    apply_dense<T, Op>(in, out, count, args.stream_outputs, args.scalar);
    for (int k = 0; k < Op::kOutputs; ++k) {
      out[k] += count;
    }
    begin += count;
  }
  if (args.stream_outputs) {
    finish_streaming();
  }
}

template <class Op>
constexpr ElementwiseKernels elementwise_kernels() {
  return {.float32 = elementwise<float, Op>,
          .float16 = elementwise<f16, Op>,
          .bfloat16 = elementwise<bf16, Op>};
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
