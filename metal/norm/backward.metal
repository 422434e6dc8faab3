// Gradients of rms_norm and layer_norm. With c = h - mean (rms_norm: c = h), n = c rstd and d_n =
// d_y silu(gate) weight:
//   d_x = rstd (d_n - mean(d_n) - n mean(d_n n)) + d_h     (rms_norm: without mean(d_n))
//   d_gate = d_y n weight silu'(gate)
//   d_weight = sum over rows of d_y silu(gate) n
//   d_bias = sum over rows of d_y
//
// Kernels: <rms_norm|layer_norm>_backward_<dtype of rows>_<dtype of weight and bias>, and
// norm_sum_parts_<dtype of the sum>, which reduces the partial sums of d_weight and d_bias. The
// order of summation is fixed, so that results do not depend on scheduling.
// Grid and threadgroup: backward: linear_grid of parts, threadgroup as in forward. norm_sum_parts:
// (blocks of 32 columns, groups of rows, one or both sums), threadgroup 1024.
// Bindings:
//   backward:  h, gate, weight, d_y, d_h, d_x, d_gate, d_weight_parts, d_bias_parts, params
//   sum_parts: parts and parts, sum and sum, params
// Function constants: 0 to 5 and 10 to 13 as in forward, 7 to 9 below. Alignment: as in forward.
//
//   for each row of the team's part:
//     load h, d_y, gate
//     mean = sum(h) / columns                                 (layer_norm only)
//     sum c^2, d_n c and, for layer_norm, d_n and c over the team
//     shift = sum(c) / columns, which rounding left in c; correct the sums for it
//     rstd = rsqrt(sum(c^2) / columns + eps)
//     for each pack: store d_gate; store d_x; add d_z n and d_z to the part's sums
//   after the last row: store the part's sums of d_weight and d_bias
//   norm_sum_parts: add up all parts of each column
#include "metal/common/kernel.h"
#include "metal/common/sum_parts.h"
#include "metal/norm/rows.h"

constant bool has_d_h [[function_constant(7)]];
constant bool wants_weight [[function_constant(8)]];
constant bool wants_bias [[function_constant(9)]];

// Only rms_norm takes a gate, and only layer_norm a bias.
template <bool kCentred>
METAL_FUNC bool is_gated() {
  return !kCentred && has_gate;
}
template <bool kCentred>
METAL_FUNC bool sums_bias() {
  return kCentred && wants_bias;
}

// Operands of one row, in registers. d_z is d_y silu(gate).
template <typename T, bool kCentred>
struct BackwardRow {
  const device T* h;
  const device T* gate;
  const device T* d_y;
  Held<T> held_h, held_gate, held_d_y;
  Stored<T, T> ahead_h, ahead_d_y;

  METAL_FUNC void load(constant NormParams& params, Columns<T> at) thread {
    load_held<T>(h, column_stride_of(params.x), at, held_h);
    load_held<T>(d_y, column_stride_of(params.d_y), at, held_d_y);
    if (is_gated<kCentred>()) {
      load_held<T>(gate, column_stride_of(params.gate), at, held_gate);
    }
  }

  METAL_FUNC void read_ahead(constant NormParams& params,
                             const device T* all_h,
                             const device T* all_d_y,
                             uint row,
                             Columns<T> at) thread {
    ahead_h.read(all_h + norm_row_offset(&params.x, row), at);
    ahead_d_y.read(all_d_y + norm_row_offset(&params.d_y, row), at);
  }

  METAL_FUNC float d_z(constant NormParams& params, int pack, int i) const thread {
    if (!is_gated<kCentred>()) {
      return held_d_y.x[pack][i];
    }
    return held_d_y.x[pack][i] * gate_value(held_gate.x[pack][i], params);
  }
};

// Adds one pack of a row's products to the sums of its part, in float32. A short row keeps the sums
// in registers until the part's last row; a long row keeps them in device memory.
template <typename T>
METAL_FUNC void add_to_part(device float* part,
                            bool first_row,
                            bool last_row,
                            int count,
                            const thread float* a,
                            const thread float* b,
                            thread float* sums) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < Held<T>::kSize; i += Pack<float>::kSize) {
    const int of_pack = metal::min(int(Pack<float>::kSize), count - i);
    if (row_is_long && !first_row) {
      load_of_row<float>(part + i, 1, of_pack, sums + i);
    }
    MLX_ANVIL_UNROLL
    for (int k = i; k < i + Pack<float>::kSize; ++k) {
      sums[k] = metal::fma(a[k], b[k], first_row ? 0.0f : sums[k]);
    }
    if (row_is_long || last_row) {
      store_of_row<float>(part + i, of_pack, sums + i);
    }
  }
}

template <typename T, typename W, bool kCentred>
[[kernel, max_total_threads_per_threadgroup(kMostThreads)]] void norm_backward(
    const device T* h [[buffer(0)]],
    const device T* gate [[buffer(1)]],
    const device W* weight [[buffer(2)]],
    const device T* d_y [[buffer(3)]],
    const device T* d_h [[buffer(4)]],
    device T* d_x [[buffer(5)]],
    device T* d_gate [[buffer(6)]],
    device float* d_weight_parts [[buffer(7)]],
    device float* d_bias_parts [[buffer(8)]],
    constant NormParams& params [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  keep_resident<2, 12>(registers_are_few);
  threadgroup float memory[2][4][kMostSimdgroups];
  TeamSums<4> sums = {memory, 0};
  const Team team = team_of(group, groups, threads.x, simdgroup, lane);
  const uint first_of_group = team.index / params.parts_per_group * params.rows_per_group;
  const uint first = first_of_group + team.index % params.parts_per_group * params.rows_per_part;
  if (first >= params.rows) {
    return;
  }
  const uint last =
      metal::min(first + params.rows_per_part, first_of_group + params.rows_per_group);
  const int columns = params.columns;
  device float* const weight_part = d_weight_parts + long(team.index) * columns;
  device float* const bias_part = d_bias_parts + long(team.index) * columns;
  const device W* const own_weight =
      has_weight ? weight + norm_row_offset(&params.weight, group_of(first, params)) : weight;
  Held<T> weight_sums, bias_sums;

  BackwardRow<T, kCentred> in;
  Held<T> weights;
  const Columns<T> start = columns_of<T>(team, columns);
  if (reads_ahead) {
    in.read_ahead(params, h, d_y, first, start);
    if (has_weight) {
      Stored<T, W> weight_ahead;
      weight_ahead.read(own_weight, start);
      weight_ahead.widen(weights);
    }
    MLX_ANVIL_UNROLL
    for (int j = 0; j < Held<T>::kPacks && Held<T>::uses(j); ++j) {
      load_weight<T, W>(own_weight, params, start, j, weights.x[j]);
    }
  }

  for (uint row = first; row < last; ++row) {
    in.h = h + norm_row_offset(&params.x, row);
    in.d_y = d_y + norm_row_offset(&params.d_y, row);
    in.gate = is_gated<kCentred>() ? gate + norm_row_offset(&params.gate, row) : gate;
    const device T* const d_h_row = has_d_h ? d_h + norm_row_offset(&params.d_h, row) : d_h;
    Stored<T, T> ahead_d_h;
    if (reads_ahead) {
      in.ahead_h.widen(in.held_h);
      in.ahead_d_y.widen(in.held_d_y);
      if (has_d_h) {
        ahead_d_h.read(d_h_row, start);
      }
      if (row + 1 < last) {
        in.read_ahead(params, h, d_y, row + 1, start);
      }
    } else {
      in.load(params, start);
    }

    float mean = 0.0f;
    if (kCentred) {
      float sum[1] = {0.0f};
      Columns<T> at = columns_of<T>(team, columns);
      do {
        if (row_is_long) {
          load_held<T>(in.h, column_stride_of(params.x), at, in.held_h);
        }
        sum[0] += sum_of<T>(in.held_h);
      } while (at.next());
      sums.sum(team, sum);
      mean = sum[0] / columns;
    }

    float moments[kCentred ? 4 : 2] = {};  // sums of c^2, d_n c, d_n, c
    Columns<T> at = columns_of<T>(team, columns);
    do {
      if (row_is_long) {
        in.load(params, at);
      }
      thread Held<T>& c = in.held_h;
      if (kCentred) {
        subtract_mean<T>(mean, at, c);
      }
      MLX_ANVIL_UNROLL
      for (int j = 0; j < Held<T>::kPacks && Held<T>::uses(j); ++j) {
        thread float (&w)[Held<T>::kSize] = weights.x[j];
        if (!reads_ahead) {
          load_weight<T, W>(own_weight, params, at, j, w);
        }
        MLX_ANVIL_UNROLL
        for (int i = 0; i < Held<T>::kSize; ++i) {
          const float d_z = in.d_z(params, j, i);
          moments[0] = metal::fma(c.x[j][i], c.x[j][i], moments[0]);
          moments[1] = metal::fma(d_z * w[i], c.x[j][i], moments[1]);
          if (kCentred) {
            moments[kCentred ? 2 : 0] = metal::fma(d_z, w[i], moments[kCentred ? 2 : 0]);
            moments[kCentred ? 3 : 0] += c.x[j][i];
          }
        }
      }
    } while (at.next());
    sums.sum(team, moments);
    const float sum_of_d_n = kCentred ? moments[kCentred ? 2 : 0] : 0.0f;
    const float shift = kCentred ? moments[kCentred ? 3 : 0] / columns : 0.0f;
    const float variance = metal::fma(-shift, shift, moments[0] / columns);
    const float rstd = metal::precise::rsqrt((variance < 0.0f ? 0.0f : variance) + params.eps);
    const float mean_of_products = metal::fma(-shift, sum_of_d_n, moments[1]) * rstd / columns;
    const float mean_of_d_n = sum_of_d_n / columns;

    const long to = static_cast<long>(row) * columns;
    at = columns_of<T>(team, columns);
    do {
      if (row_is_long) {
        in.load(params, at);
        if (kCentred) {
          subtract_mean<T>(mean, at, in.held_h);
        }
      }
      MLX_ANVIL_UNROLL
      for (int j = 0; j < Held<T>::kPacks && Held<T>::uses(j); ++j) {
        const int column = at.of(j), count = at.count(j);
        float n[Held<T>::kSize], d_z[Held<T>::kSize], out[Held<T>::kSize];
        thread float (&w)[Held<T>::kSize] = weights.x[j];
        if (!reads_ahead) {
          load_weight<T, W>(own_weight, params, at, j, w);
        }
        MLX_ANVIL_UNROLL
        for (int i = 0; i < Held<T>::kSize; ++i) {
          n[i] = (in.held_h.x[j][i] - shift) * rstd;
          d_z[i] = in.d_z(params, j, i);
        }
        if (is_gated<kCentred>()) {
          MLX_ANVIL_UNROLL
          for (int i = 0; i < Held<T>::kSize; ++i) {
            const float g = in.held_gate.x[j][i];
            out[i] = in.held_d_y.x[j][i] * (n[i] * w[i]) * gate_slope(g, params);
          }
          store_of_row<T>(d_gate + to + column, count, out);
        }
        if (has_d_h && reads_ahead) {
          ahead_d_h.widen(j, out);
        } else if (has_d_h) {
          load_of_row<T>(d_h_row + column * column_stride_of(params.d_h),
                         column_stride_of(params.d_h), count, out);
        }
        MLX_ANVIL_UNROLL
        for (int i = 0; i < Held<T>::kSize; ++i) {
          const float d_c =
              metal::fma(-n[i], mean_of_products, metal::fma(d_z[i], w[i], -mean_of_d_n));
          out[i] = has_d_h ? metal::fma(rstd, d_c, out[i]) : rstd * d_c;
        }
        store_of_row<T>(d_x + to + column, count, out);
        if (wants_weight) {
          add_to_part<T>(weight_part + column, row == first, row + 1 == last, count, d_z, n,
                         weight_sums.x[j]);
        }
        if (sums_bias<kCentred>()) {
          const float ones[8] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
          add_to_part<T>(bias_part + column, row == first, row + 1 == last, count, d_z, ones,
                         bias_sums.x[j]);
        }
      }
    } while (at.next());
  }
}

// The second sum is launched only if it is wanted.
template <typename W>
[[kernel, max_total_threads_per_threadgroup(kSumThreads)]] void norm_sum_parts(
    const device float* first_parts [[buffer(0)]],
    const device float* second_parts [[buffer(1)]],
    device W* first_sum [[buffer(2)]],
    device W* second_sum [[buffer(3)]],
    constant NormSumParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shares[kSumThreads];
  const device float* const parts = group.z == 0 ? first_parts : second_parts;
  device W* const sum = group.z == 0 ? first_sum : second_sum;
  const long columns = params.columns;
  sum_parts<W>(parts + group.y * params.parts * columns, params.parts, params.columns,
               sum + group.y * columns, group.x, simdgroup, lane, shares);
}

// ---- kernels

#define INSTANTIATE(op, centred, dtype, T, weight_dtype, W) \
  MLX_ANVIL_KERNEL(#op "_backward_" #dtype "_" #weight_dtype, norm_backward<T, W, centred>)

#define INSTANTIATE_DTYPES(op, centred)                      \
  INSTANTIATE(op, centred, float32, float, float32, float)   \
  INSTANTIATE(op, centred, float16, half, float32, float)    \
  INSTANTIATE(op, centred, float16, half, float16, half)     \
  INSTANTIATE(op, centred, bfloat16, bfloat, float32, float) \
  INSTANTIATE(op, centred, bfloat16, bfloat, bfloat16, bfloat)

INSTANTIATE_DTYPES(rms_norm, false)
INSTANTIATE_DTYPES(layer_norm, true)

#define INSTANTIATE_SUM(dtype, W) MLX_ANVIL_KERNEL("norm_sum_parts_" #dtype, norm_sum_parts<W>)

INSTANTIATE_SUM(float32, float)
INSTANTIATE_SUM(float16, half)
INSTANTIATE_SUM(bfloat16, bfloat)
