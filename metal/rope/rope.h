// Rotates pairs of elements by angles that grow with the position. csrc/rope/problem.h has the
// formulas; csrc/rope/simd/rope.cpp computes the same sine and cosine.
#pragma once

#include <metal_stdlib>

#include "metal/common/strided_pack.h"
#include "metal/rope/params.h"

constant bool pairs_are_neighbours [[function_constant(1)]];   // 2j, 2j + 1; else j, j + pairs
constant bool frequencies_are_given [[function_constant(2)]];  // float32 freqs; else 64-bit turns
constant bool offsets_are_wide [[function_constant(3)]];       // int64; else int32
constant bool reads_ahead [[function_constant(4)]];  // the next head's packs, which are aligned

// ---- angles -------------------------------------------------------------------------------------

// Turns per position times 2^64, modulo 2^64. Multiplied by a position, whole turns overflow away.
struct Frequency {
  ulong turns;
  float defect;  // 0, or NaN for an invalid frequency
};

METAL_FUNC ulong fixed_point(float turns) {
  return static_cast<ulong>(static_cast<long>((turns - metal::rint(turns)) * 0x1p62f)) << 2;
}

// Computes (turns_high + turns_low) / freq as an unevaluated sum of two float32: a single one
// leaves too few digits at large positions. The fma terms recover what the division and the product
// round away.
METAL_FUNC Frequency frequency_of(float freq, constant RopeParams& params) {
  const float over = 1.0f / freq;
  const float high = params.turns_high * over;
  if (!(metal::abs(high) < INFINITY)) {
    return {0, NAN};
  }
  const float over_rest = over == 0.0f ? 0.0f : over * metal::fma(-over, freq, 1.0f);
  const float product_rest = metal::fma(params.turns_high, over, -high);
  const float low =
      product_rest + metal::fma(params.turns_high, over_rest, params.turns_low * over);
  return {fixed_point(high) + fixed_point(low), 0.0f};
}

struct SinCos {
  float sin, cos;
};

// Sine and cosine of turn / 2^32 turns. After reduction to the nearest quarter turn, the rest is at
// most an eighth of a turn, where these short polynomials are accurate to float32.
METAL_FUNC SinCos sin_cos_of_turn(uint turn) {
  const uint quarter = (turn + 0x20000000u) >> 30;
  const int rest = static_cast<int>(turn - (quarter << 30));
  const float x = static_cast<float>(rest) * 0x1.921fb6p-30f;  // 2 pi / 2^32
  const float z = x * x;
  const float sin = x + x * (z * (-0.166666552f + z * (0.008332178f + z * -0.000195172339f)));
  const float cos =
      1.0f - 0.5f * z + z * z * (0.0416666456f + z * (-0.00138873665f + z * 2.44383791e-05f));
  // Each quarter turn maps (sin, cos) to (cos, -sin).
  const bool odd = (quarter & 1u) != 0;
  const float first = odd ? cos : sin, second = odd ? sin : cos;
  return {(quarter & 2u) != 0 ? -first : first, ((quarter + 1u) & 2u) != 0 ? -second : second};
}

// ---- rotation -----------------------------------------------------------------------------------

// One tensor and the layout of its input. The output is dense.
template <typename T>
struct RopeTensor {
  const device T* in;
  device T* out;
  constant int64_t* strides;
  int heads;
};

template <typename T>
struct RopeOperands {
  RopeTensor<T> tensors[2];
  const device int* offset;   // int32 or int64
  const device float* freqs;  // exactly one of freqs and turns is bound
  const device ulong* turns;

  METAL_FUNC ulong first_position(constant RopeParams& params, long batch) const thread {
    const long at = batch * params.offset_step;
    return ulong(offsets_are_wide ? reinterpret_cast<const device long*>(offset)[at]
                                  : long(offset[at]));
  }
};

template <typename T>
METAL_FUNC RopeOperands<T> operands_of_one(const device T* x,
                                           device T* out,
                                           const device int* offset,
                                           const device ulong* turns,
                                           constant RopeParams& params) {
  const RopeTensor<T> only = {x, out, params.strides[0], params.heads[0]};
  return {{only, only}, offset, reinterpret_cast<const device float*>(turns), turns};
}

template <typename T>
METAL_FUNC RopeOperands<T> operands_of_both(const device T* q,
                                            const device T* k,
                                            device T* q_out,
                                            device T* k_out,
                                            const device int* offset,
                                            const device ulong* turns,
                                            constant RopeParams& params) {
  return {{{q, q_out, params.strides[0], params.heads[0]},
           {k, k_out, params.strides[1], params.heads[1]}},
          offset,
          reinterpret_cast<const device float*>(turns),
          turns};
}

// Sine and cosine of pair `pair`, for the direction of the call.
template <typename T>
METAL_FUNC SinCos angle_of(const thread RopeOperands<T>& operands,
                           int pair,
                           ulong position,
                           constant RopeParams& params) {
  Frequency frequency = {0, 0.0f};
  if (frequencies_are_given) {
    frequency = frequency_of(operands.freqs[pair], params);
  } else {
    frequency.turns = operands.turns[pair];
  }
  const ulong turns = frequency.turns * position;
  const SinCos angle = sin_cos_of_turn(static_cast<uint>(turns >> 32));
  return {params.direction * angle.sin + frequency.defect, angle.cos + frequency.defect};
}

// The pairs of one thread, as many as a pack has elements: two packs per head.
template <typename T>
struct PairsOfThread {
  enum { kSize = Pack<T>::kSize };
  float sin[kSize], cos[kSize];
  int count;             // at most kSize
  int first[2], own[2];  // first column and element count of each pack

  METAL_FUNC void place(int pair, constant RopeParams& params) thread {
    // Aligned packs are full. The compiler knows it from the constant, and drops the other path.
    count = packs_are_aligned ? int(kSize) : metal::min(int(kSize), params.pairs - pair);
    first[0] = pairs_are_neighbours ? 2 * pair : pair;
    first[1] = pairs_are_neighbours ? 2 * pair + kSize : params.pairs + pair;
    own[0] = pairs_are_neighbours ? metal::min(int(kSize), 2 * count) : count;
    own[1] = pairs_are_neighbours ? 2 * count - own[0] : count;
  }

  METAL_FUNC void turn(const thread RopeOperands<T>& operands,
                       int pair,
                       ulong position,
                       constant RopeParams& params) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kSize; ++i) {
      const int j = packs_are_aligned ? pair + i : metal::min(pair + i, params.pairs - 1);
      const SinCos angle = angle_of(operands, j, position, params);
      sin[i] = angle.sin;
      cos[i] = angle.cos;
    }
  }

  METAL_FUNC void load(const device T* in, long stride, thread float* x) const thread {
    load_pack<T>(in + first[0] * stride, stride, own[0], x);
    load_pack<T>(in + first[1] * stride, stride, own[1], x + kSize);
  }
  METAL_FUNC void read(const device T* in, thread typename Pack<T>::Raw* packs) const thread {
    packs[0] = Pack<T>::read(in + first[0]);
    packs[1] = Pack<T>::read(in + first[1]);
  }

  METAL_FUNC void rotate(const thread float* x, device T* out) const thread {
    float turned[2 * kSize], y[2 * kSize];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kSize; ++i) {
      // The arrays have constant indices, whatever the function constant is: see unroll.h.
      const float a = pairs_are_neighbours ? x[2 * i] : x[i];
      const float b = pairs_are_neighbours ? x[2 * i + 1] : x[i + kSize];
      // The explicit fma fixes which product is rounded. Contraction by the compiler could differ
      // between kernel variants.
      turned[i] = metal::fma(a, cos[i], -(b * sin[i]));
      turned[i + kSize] = metal::fma(a, sin[i], b * cos[i]);
    }
    MLX_ANVIL_UNROLL
    for (int k = 0; k < 2 * kSize; ++k) {
      y[k] = pairs_are_neighbours ? turned[k / 2 + k % 2 * kSize] : turned[k];
    }
    store(y, out);
  }
  METAL_FUNC void store(const thread float* y, device T* out) const thread {
    store_pack<T>(out + first[0], own[0], y);
    store_pack<T>(out + first[1], own[1], y + kSize);
  }
};

// In a loop each load waits for the one before. In PTX, all addresses at once would spill.
#ifdef __MSLC_PTX__
#define MLX_ANVIL_UNROLL_COPY MLX_ANVIL_NO_UNROLL
#else
#define MLX_ANVIL_UNROLL_COPY MLX_ANVIL_UNROLL
#endif

// Copies elements from `column` on, a pack or up to the last column.
template <typename T>
METAL_FUNC void copy_pack(const device T* in, long stride, device T* out, int column, int columns) {
  const int count = metal::min(int(Pack<T>::kSize), columns - column);
  if (packs_are_aligned && count == Pack<T>::kSize) {
    *reinterpret_cast<device typename Pack<T>::Raw*>(out + column) = Pack<T>::read(in + column);
    return;
  }
  MLX_ANVIL_UNROLL_COPY
  for (int i = 0; i < int(Pack<T>::kSize); ++i) {
    if (i < count) {
      out[column + i] = in[(column + i) * stride];
    }
  }
}

// A row of one head.
template <typename T>
struct RopeHead {
  const device T* in;
  device T* out;
  long stride;  // of columns
};

template <typename T>
METAL_FUNC RopeHead<T> head_at(const thread RopeOperands<T>& operands,
                               constant RopeParams& params,
                               long batch,
                               int head,
                               int position) {
  // Selected member by member, so that both tensors stay in registers.
  const bool second = head >= params.heads[0];
  const constant int64_t* strides =
      second ? operands.tensors[1].strides : operands.tensors[0].strides;
  const long own_head = second ? head - params.heads[0] : head;
  const long heads = second ? operands.tensors[1].heads : operands.tensors[0].heads;
  RopeHead<T> place;
  place.in = (second ? operands.tensors[1].in : operands.tensors[0].in) + batch * strides[0] +
             own_head * strides[1] + position * strides[2];
  place.out = (second ? operands.tensors[1].out : operands.tensors[0].out) +
              ((batch * heads + own_head) * params.length + position) * params.head_dim;
  place.stride = packs_are_aligned ? 1 : strides[3];
  return place;
}

// A thread processes a pack of columns of one position for a chunk of heads. It computes sines and
// cosines once per position; all heads of the chunk share them.
template <typename T>
METAL_FUNC void rope(const thread RopeOperands<T>& operands,
                     constant RopeParams& params,
                     uint3 group,
                     uint3 groups,
                     uint thread_in_group,
                     uint threads) {
  enum { kSize = Pack<T>::kSize };
  const int rotated = 2 * params.pairs, packs = (params.pairs + kSize - 1) / kSize;
  const uint columns = packs + (params.head_dim - rotated + kSize - 1) / kSize;
  const uint item = group.x * threads + thread_in_group, row = item / columns;
  const int column = item - row * columns, chunk = row / params.length;
  const int position = row - chunk * params.length;
  if (chunk >= params.chunks) {
    return;
  }
  const int heads = params.heads[0] + params.heads[1];
  const int end = metal::min(heads, (chunk + 1) * params.chunk);
  const bool rotates = column < packs;
  PairsOfThread<T> pairs;
  if (rotates) {
    pairs.place(column * kSize, params);
  }
  for (long batch = group.z; batch < params.batch; batch += groups.z) {
    const ulong first_position = operands.first_position(params, batch);
    const int begin = chunk * params.chunk;
    RopeHead<T> next;
    typename Pack<T>::Raw ahead[2];
    if (reads_ahead && rotates) {
      next = head_at<T>(operands, params, batch, begin, position);
      pairs.read(next.in, ahead);
    }
    if (rotates) {
      pairs.turn(operands, column * kSize, first_position + ulong(position), params);
    }
    for (int head = begin; head < end; ++head) {
      if (reads_ahead && rotates) {
        float x[2 * kSize];
        Pack<T>::widen(ahead[0], x);
        Pack<T>::widen(ahead[1], x + kSize);
        device T* const out = next.out;
        if (head + 1 < end) {
          next = head_at<T>(operands, params, batch, head + 1, position);
          pairs.read(next.in, ahead);
        }
        pairs.rotate(x, out);
        continue;
      }
      const RopeHead<T> own = head_at<T>(operands, params, batch, head, position);
      if (rotates) {
        float x[2 * kSize];
        pairs.load(own.in, own.stride, x);
        pairs.rotate(x, own.out);
      } else {
        copy_pack(own.in, own.stride, own.out, rotated + (column - packs) * kSize, params.head_dim);
      }
    }
  }
}
