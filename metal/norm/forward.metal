// rms_norm and layer_norm:
//   h = x + residual                                          (rounded to the dtype)
//   y = ((h - mean) rsqrt(var + eps) weight + bias) silu(gate)
// where var is the mean of (h - mean)^2. rms_norm has neither mean nor bias; residual, weight, bias
// and gate are optional. Statistics are in float32, in two passes.
//
// Kernels: <rms_norm|layer_norm>_forward_<dtype of rows>_<dtype of weight and bias>.
// Grid: linear_grid of rows. Threadgroup: eight simdgroups with a row each for up to 256 columns;
// beyond that one row, with 32 threads per 256 columns and at most 512 threads.
// Bindings: x, residual, gate, weight, bias, y, h, params.
// Function constants: 0: packs are aligned to 16 bytes (no other alignment is assumed); 1 to 6 and
// 10 to 13: see rows.h.
//
//   load h = x + residual, up to 16 elements per thread
//   mean = sum(h) / columns                                   (layer_norm only)
//   rstd = rsqrt(sum((h - mean)^2) / columns + eps)
//   for each pack:
//     z = (h - mean) rstd weight + bias
//     store h if there is a residual; store y = z silu(gate)
//   A long row does not fit in registers: each of the three passes loads h again.
#include "metal/common/kernel.h"
#include "metal/norm/rows.h"

template <typename T>
struct ForwardRow {
  const device T* x;
  const device T* residual;

  METAL_FUNC void load_h(constant NormParams& params, Columns<T> at, thread Held<T>& h) thread {
    load_held<T>(x, column_stride_of(params.x), at, h);
    if (has_residual) {
      Held<T> other;
      load_held<T>(residual, column_stride_of(params.residual), at, other);
      MLX_ANVIL_UNROLL
      for (int k = 0; k < kHeldElements; ++k) {
        const int j = k / Held<T>::kSize, i = k % Held<T>::kSize;
        if (Held<T>::uses(j)) {
          h.x[j][i] = static_cast<float>(static_cast<T>(h.x[j][i] + other.x[j][i]));
        }
      }
    }
  }
};

struct ParamsOfRows {
  int columns;
  float eps;
};

METAL_FUNC ParamsOfRows read_early(constant NormParams& params) {
  if (!MLX_ANVIL_READS_EARLY) {
    return {0, 0.0f};
  }
  return {int(params.columns), params.eps};
}

template <typename T, typename W, bool kCentred>
[[kernel, max_total_threads_per_threadgroup(kMostThreads)]] void norm_forward(
    const device T* x [[buffer(0)]],
    const device T* residual [[buffer(1)]],
    const device T* gate [[buffer(2)]],
    const device W* weight [[buffer(3)]],
    const device W* bias [[buffer(4)]],
    device T* y [[buffer(5)]],
    device T* h_out [[buffer(6)]],
    constant NormParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  keep_resident<3, 12>(registers_are_few);
  threadgroup float memory[2][1][kMostSimdgroups];
  TeamSums<1> sums = {memory, 0};
  const Team team = team_of(group, groups, threads.x, simdgroup, lane);
  const uint row = team.index;
  const ParamsOfRows early = read_early(params);
  if (row >= params.rows) {
    return;
  }
  const int columns = MLX_ANVIL_READS_EARLY ? early.columns : params.columns;
  ForwardRow<T> rows;
  rows.x = x + norm_row_offset(&params.x, row);
  rows.residual = has_residual ? residual + norm_row_offset(&params.residual, row) : residual;
  const device T* const gate_row = has_gate ? gate + norm_row_offset(&params.gate, row) : gate;
  const uint of_group = group_of(row, params);
  const device W* const own_weight =
      has_weight ? weight + norm_row_offset(&params.weight, of_group) : weight;
  const device W* const own_bias = has_bias ? bias + norm_row_offset(&params.bias, of_group) : bias;
  Stored<T, W> weight_ahead;
  if (has_weight && reads_ahead) {
    weight_ahead.read(own_weight, columns_of<T>(team, columns));
  }
  Held<T> h;
  rows.load_h(params, columns_of<T>(team, columns), h);

  float mean = 0.0f;
  if (kCentred) {
    float sum[1] = {0.0f};
    Columns<T> at = columns_of<T>(team, columns);
    do {
      if (row_is_long) {
        rows.load_h(params, at, h);
      }
      sum[0] += sum_of<T>(h);
    } while (at.next());
    sums.sum(team, sum);
    mean = sum[0] / columns;
  }

  float squares[1] = {0.0f};
  Columns<T> at = columns_of<T>(team, columns);
  do {
    if (row_is_long) {
      rows.load_h(params, at, h);
    }
    Held<T> c = h;
    if (kCentred) {
      subtract_mean<T>(mean, at, c);
    }
    MLX_ANVIL_UNROLL
    for (int k = 0; k < kHeldElements; ++k) {
      const int j = k / Held<T>::kSize, i = k % Held<T>::kSize;
      if (Held<T>::uses(j)) {
        squares[0] = metal::fma(c.x[j][i], c.x[j][i], squares[0]);
      }
    }
  } while (at.next());
  sums.sum(team, squares);
  const float rstd = metal::precise::rsqrt(squares[0] / columns +
                                           (MLX_ANVIL_READS_EARLY ? early.eps : params.eps));

  Held<T> weights;
  if (has_weight && reads_ahead) {
    weight_ahead.widen(weights);
  }
  const long to = static_cast<long>(row) * columns;
  at = columns_of<T>(team, columns);
  do {
    if (row_is_long) {
      rows.load_h(params, at, h);
    }
    MLX_ANVIL_UNROLL
    for (int j = 0; j < Held<T>::kPacks && Held<T>::uses(j); ++j) {
      const int column = at.of(j), count = at.count(j);
      thread float (&w)[Held<T>::kSize] = weights.x[j];
      float b[Held<T>::kSize], g[Held<T>::kSize], out[Held<T>::kSize];
      load_weight<T, W>(own_weight, params, at, j, w);
      if (has_bias) {
        load_vector<T, W>(own_bias, column_stride_of(params.bias), at, j, b);
      }
      if (has_gate) {
        const long stride = column_stride_of(params.gate);
        load_of_row<T>(gate_row + column * stride, stride, count, g);
      }
      MLX_ANVIL_UNROLL
      for (int i = 0; i < Held<T>::kSize; ++i) {
        const float c = h.x[j][i] - mean, factor = has_weight ? rstd * w[i] : rstd;
        const float z = has_bias ? metal::fma(c, factor, b[i]) : c * factor;
        out[i] = has_gate ? z * gate_value(g[i], params) : z;
      }
      if (has_residual) {
        store_of_row<T>(h_out + to + column, count, h.x[j]);
      }
      store_of_row<T>(y + to + column, count, out);
    }
  } while (at.next());
}

// ---- kernels

#define INSTANTIATE(op, centred, dtype, T, weight_dtype, W) \
  MLX_ANVIL_KERNEL(#op "_forward_" #dtype "_" #weight_dtype, norm_forward<T, W, centred>)

#define INSTANTIATE_DTYPES(op, centred)                      \
  INSTANTIATE(op, centred, float32, float, float32, float)   \
  INSTANTIATE(op, centred, float16, half, float32, float)    \
  INSTANTIATE(op, centred, float16, half, float16, half)     \
  INSTANTIATE(op, centred, bfloat16, bfloat, float32, float) \
  INSTANTIATE(op, centred, bfloat16, bfloat, bfloat16, bfloat)

INSTANTIATE_DTYPES(rms_norm, false)
INSTANTIATE_DTYPES(layer_norm, true)
