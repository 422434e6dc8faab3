// Backward of the norms on the CPU. Let c = h - mean (rms_norm: c = h), n = c rstd the normalised
// row, and d_n = d_y silu(gate) weight. The host (cpu.cpp) calls it for ranges of rows.
//
//   d_x      = rstd (d_n - mean(d_n) - n mean(d_n n)) + d_h     rms_norm omits mean(d_n)
//   d_gate   = d_y n weight silu'(gate)                         there is no bias with a gate
//   d_weight = sum over rows of d_y silu(gate) n
//   d_bias   = sum over rows of d_y
//
// mean and rstd are recomputed, since the row is in the cache then. A large mean is rounded by more
// than d_x may be off, so the second pass also measures `shift`, the mean of h - mean. With it,
//   sum(c^2) = sum((h - mean)^2) - columns shift^2
//   sum(d_n c) = sum(d_n (h - mean)) - shift sum(d_n)
#include "norm/simd/kernels.h"
#include "norm/simd/rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T>
struct BackwardRows {
  RowSource<T> h, gate, d_y, d_h;
  RowSink<T> d_x, d_gate;

  BackwardRows(const NormBackwardArgs& args, RowMemory<T> memory)
      : h(args.h, args.columns, memory),
        gate(args.gate, args.columns, memory),
        d_y(args.d_y, args.columns, memory),
        d_h(args.d_h, args.columns, memory),
        d_x(args.d_x, args.columns, args.stream_outputs),
        d_gate(args.d_gate, args.columns, args.stream_outputs) {}

  void move_to(int64_t row) {
    h.move_to(row);
    gate.move_to(row);
    d_y.move_to(row);
    d_h.move_to(row);
    d_x.move_to(row);
    d_gate.move_to(row);
  }

  void prefetch_next(int64_t column) const {
    h.prefetch_next(column);
    gate.prefetch_next(column);
    d_y.prefetch_next(column);
  }
};

inline void add_to(float* sums, Block x) {
  store_block<false>(sums, load_block(sums) + x);
}

template <class T, bool kCentred, class Gate, bool kHasDh>
void backward_row(BackwardRows<T>& rows,
                  const NormBackwardArgs& args,
                  const float* weight,
                  const NormSums& sums) {
  const int64_t columns = args.columns;
  const float share = 1.0f / static_cast<float>(columns);
  float mean = 0;
  if constexpr (kCentred) {
    const Block sum = sum_of_blocks(
        columns, [&](int64_t column, auto rest) { return rows.h.template load<rest()>(column); });
    mean = sum_of(sum) / static_cast<float>(columns);
  }

  // Sums of c^2, d_n c, d_n and c, where c lacks the shift.
  Block squares = {}, products = {}, plain = {}, deviations = {};
  for_each_block(0, columns, [&](int64_t column, auto rest) {
    const Block h = rows.h.template load<rest()>(column);
    Block c = h;
    if constexpr (kCentred) {
      c = deviation<T, rest()>(h, mean, columns - column);
    }
    Block d_n = rows.d_y.template load<rest()>(column) * load_block(weight + column);
    if constexpr (!std::is_same_v<Gate, NoGate>) {
      d_n = d_n * gate_of<T, Gate>(rows.gate.template load<rest()>(column));
    }
    squares = squares + c * c;
    products = products + d_n * c;
    if constexpr (kCentred) {
      plain = plain + d_n;
      deviations = deviations + c;
    }
  });
  const float sum_of_d_n = kCentred ? sum_of(plain) : 0.0f;
  const float shift = kCentred ? sum_of(deviations) * share : 0.0f;
  const float variance = sum_of(squares) * share - shift * shift;
  const float rstd = 1.0f / __builtin_sqrtf((variance < 0.0f ? 0.0f : variance) + args.eps);
  const float mean_of_products = (sum_of(products) - shift * sum_of_d_n) * rstd * share;
  const float mean_of_d_n = sum_of_d_n * share;

  for_each_block(0, columns, [&](int64_t column, auto rest) {
    rows.prefetch_next(column);
    const Block h = rows.h.template load<rest()>(column);
    const Block n = (kCentred ? (h - mean) - shift : h) * rstd;
    const Block w = load_block(weight + column);
    Block d_z = rows.d_y.template load<rest()>(column);
    if constexpr (!std::is_same_v<Gate, NoGate>) {
      const Block gate = rows.gate.template load<rest()>(column);
      const Slope first = Gate::template slope<kAccuracyOf<T>>(gate.first);
      const Slope second = Gate::template slope<kAccuracyOf<T>>(gate.second);
      rows.d_gate.template store<rest()>(
          column, d_z * (n * w) * Block{first.derivative, second.derivative});
      d_z = d_z * Block{first.value, second.value};
    }
    if (sums.weight) {
      add_to(sums.weight + column, d_z * n);
    }
    if (sums.bias) {
      add_to(sums.bias + column, d_z);
    }
    Block d_c = d_z * w - n * mean_of_products;
    if constexpr (kCentred) {
      d_c = d_c - mean_of_d_n;
    }
    d_c = d_c * rstd;
    if constexpr (kHasDh) {
      d_c = d_c + rows.d_h.template load<rest()>(column);
    }
    rows.d_x.template store<rest()>(column, d_c);
  });
}

template <class T, bool kCentred, class Gate, bool kHasDh>
void backward_rows(
    const NormBackwardArgs& args, int64_t begin, int64_t end, const NormSums& sums, void* scratch) {
  BackwardRows<T> rows(args, RowMemory<T>(scratch, args.columns));
  for (int64_t row = begin; row < end; ++row) {
    const float* const weight = args.weight + row / args.rows_per_group * args.padded_columns;
    rows.move_to(row);
    backward_row<T, kCentred, Gate, kHasDh>(rows, args, weight, sums);
  }
  if (args.stream_outputs) {
    finish_streaming();
  }
}

template <class T, bool kCentred>
void backward(
    const NormBackwardArgs& args, int64_t begin, int64_t end, const NormSums& sums, void* scratch) {
  with_gate<kCentred>(args.gate.data, args.gate_is_sigmoid, [&](auto gate) {
    with_constant(args.d_h.data, [&](auto d_h) {
      backward_rows<T, kCentred, decltype(gate), d_h()>(args, begin, end, sums, scratch);
    });
  });
}

}  // namespace

constinit const PerDtype<NormKernels<NormBackwardKernel>> norm_backward_kernels_table = {
    .float32 = {.rms = backward<float, false>, .layer = backward<float, true>},
    .float16 = {.rms = backward<f16, false>, .layer = backward<f16, true>},
    .bfloat16 = {.rms = backward<bf16, false>, .layer = backward<bf16, true>},
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
