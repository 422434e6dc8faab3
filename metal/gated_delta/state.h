// Rows of the state of gated_delta or ssd_scan in registers, and the operands of a step.
#pragma once

#include <metal_stdlib>

#include "metal/common/over_lanes.h"
#include "metal/gated_delta/load_gate.h"
#include "metal/gated_delta/params.h"
#include "metal/gated_delta/tiles.h"

constant bool rows_are_aligned [[function_constant(0)]];  // to four elements
constant bool columns_are_full [[function_constant(1)]];  // key_dim is that of the tile
constant bool has_state [[function_constant(2)]];
constant bool has_lengths [[function_constant(3)]];
constant bool returns_states [[function_constant(4)]];
constant bool normalizes [[function_constant(5)]];
constant bool g_is_float32 [[function_constant(6)]];  // else of the dtype
constant bool beta_is_float32 [[function_constant(7)]];
constant bool g_is_per_channel [[function_constant(8)]];
constant bool keeps_states [[function_constant(9)]];  // for the backward, and computes no y
constant bool corrects [[function_constant(10)]];     // the gated delta rule; else ssd_scan
constant bool has_skip [[function_constant(11)]];
constant bool is_gated [[function_constant(12)]];

// Four adjacent elements, widened.
template <typename T>
struct Four {
  static METAL_FUNC float4 load(const device T* from) {
    if (!rows_are_aligned) {
      return float4(float(from[0]), float(from[1]), float(from[2]), float(from[3]));
    }
    using T4 = metal::vec<T, 4>;
    const T4 x = as_type<T4>(*reinterpret_cast<const device uint2*>(from));
    return float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
  }
};

template <>
struct Four<float> {
  static METAL_FUNC float4 load(const device float* from) {
    return rows_are_aligned ? *reinterpret_cast<const device float4*>(from)
                            : float4(from[0], from[1], from[2], from[3]);
  }
};

// Four numbers of g.
template <typename T>
METAL_FUNC float4 load_gates(const device T* from, long at) {
  return g_is_float32 ? Four<float>::load(reinterpret_cast<const device float*>(from) + at)
                      : Four<T>::load(from + at);
}

// One lane's share of a row: packs of four columns. kLanes lanes share a row of kTile columns.
template <int kTile, int kLanes>
struct RowShare {
  enum { kPacks = kTile / (4 * kLanes), kRows = 32 / kLanes };
  enum { kApart = 4 * kLanes };  // columns between packs

  int lane;     // in the row
  int columns;  // that exist

  METAL_FUNC int column(int pack) const thread { return 4 * (pack * kLanes + lane); }
  METAL_FUNC bool has(int pack) const thread { return columns_are_full || column(pack) < columns; }

  // Zeros past the end, or everywhere if the row does not exist. Pointers of all functions are to
  // the lane's first column.
  template <typename T>
  METAL_FUNC void load(const device T* own, bool exists, thread float4 (&x)[kPacks]) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      x[i] = exists && has(i) ? Four<T>::load(own + kApart * i) : float4(0.0f);
    }
  }

  METAL_FUNC void store(device float* own, thread float4 (&x)[kPacks]) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      device float* const to = own + kApart * i;
      if (has(i) && rows_are_aligned) {
        *reinterpret_cast<device float4*>(to) = x[i];
      } else if (has(i)) {
        MLX_ANVIL_UNROLL
        for (int j = 0; j < 4; ++j) {
          to[j] = x[i][j];
        }
      }
    }
  }

  // The sum over the row's lanes, in all of them.
  METAL_FUNC float sum(float x) const thread { return over_lanes<false, 1, kLanes>(x); }

  METAL_FUNC float dot(thread float4 (&a)[kPacks], thread float4 (&b)[kPacks]) const thread {
    float total = 0.0f;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      total += metal::dot(a[i], b[i]);
    }
    return total;
  }

  // A row of q or k, scaled.
  template <typename T>
  METAL_FUNC void load_key(const device T* own,
                           constant GatedDeltaParams& params,
                           float scale,
                           thread float4 (&x)[kPacks]) const thread {
    load<T>(own, true, x);
    if (normalizes) {
      const float factor = scale * metal::precise::rsqrt(sum(dot(x, x)) + params.eps);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        x[i] *= factor;
      }
    }
  }

  // The factors of a step's decay. `at`: that of the head, or of the lane's first column.
  template <typename T>
  METAL_FUNC void load_decay(const device T* from,
                             long at,
                             thread float4 (&x)[kPacks]) const thread {
    const float of_head = g_is_per_channel ? 0.0f : load_gate(from, g_is_float32, at);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      x[i] = float4(of_head);
      if (g_is_per_channel && has(i)) {
        x[i] = load_gates(from, at + kApart * i);
      }
    }
  }
};

// Strides of an array. Read before any branch, they stay in uniform registers.
struct ArrayStrides {
  long batch, step, head;

  METAL_FUNC static ArrayStrides of(constant int64_t* strides) {
    ArrayStrides own;
    own.batch = strides[0];
    own.step = strides[1];
    own.head = strides[2];
    return own;
  }
  METAL_FUNC long place(uint own_batch, uint own_head) const thread {
    return own_batch * batch + own_head * head;
  }
  METAL_FUNC long at(uint own_batch, int own_step, uint own_head) const thread {
    return place(own_batch, own_head) + own_step * step;
  }
};

// Where the arrays of a value head of a batch row begin.
struct HeadPlace {
  long q, k, v, g, beta, skip, gate;
  long state;  // of its rows among all states' rows
};

METAL_FUNC HeadPlace place_of(constant GatedDeltaParams& params, int batch, int head) {
  const int key_head = head / params.group;
  HeadPlace place;
  place.q = batch * params.q_strides[0] + key_head * params.q_strides[2];
  place.k = batch * params.k_strides[0] + key_head * params.k_strides[2];
  place.v = batch * params.v_strides[0] + head * params.v_strides[2];
  place.g = batch * params.g_strides[0] + head * params.g_strides[2];
  place.beta = batch * params.beta_strides[0] + head * params.beta_strides[2];
  place.skip = batch * params.skip_strides[0] + head * params.skip_strides[2];
  place.gate = batch * params.gate_strides[0] + head * params.gate_strides[2];
  place.state = (long(batch) * params.value_heads + head) * params.value_dim;
  return place;
}

// The steps that change the state of a batch row.
METAL_FUNC int steps_of(constant GatedDeltaParams& params, const device int* lengths, int batch) {
  return has_lengths ? metal::clamp(lengths[batch], 0, params.length) : params.length;
}

// The positions of a batch row, at which its state is returned.
struct Positions {
  const device int* steps;
  int count;
  int last;  // step

  METAL_FUNC int at(int i) const thread { return metal::clamp(steps[i], 0, last); }

  // The first position after `step`; none: `last` + 1.
  METAL_FUNC int after(int step) const thread {
    int found = last + 1;
    for (int i = 0; i < count; ++i) {
      const int own = at(i);
      found = own > step && own < found ? own : found;
    }
    return found;
  }
  // The last one before `step`; none: -1.
  METAL_FUNC int before(int step) const thread {
    int found = -1;
    for (int i = 0; i < count; ++i) {
      const int own = at(i);
      found = own < step && own > found ? own : found;
    }
    return found;
  }
};

METAL_FUNC Positions positions_of(constant GatedDeltaParams& params,
                                  const device int* positions,
                                  int batch) {
  Positions own;
  own.steps = positions + long(batch) * params.positions_step;
  own.count = returns_states ? params.positions : 0;
  own.last = params.length - 1;
  return own;
}

// The row of a returned state among the rows of all of them.
METAL_FUNC long returned_row(constant GatedDeltaParams& params, int batch, int i, int head) {
  return ((long(batch) * params.positions + i) * params.value_heads + head) * params.value_dim;
}
