// The norms on the CPU, forward: h = x + residual; y = (h - mean) rstd weight + bias, times
// silu(gate). A row is read three times (twice without a mean), from memory once; h is formed anew
// each time, so that nothing is stored before the last.
#include "norm/cpu_kernels.h"
#include "norm/cpu_rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T>
struct ForwardRows {
  RowSource<T> x, residual, gate;
  RowSink<T> y, h;

  ForwardRows(const NormForwardArgs& args, RowMemory<T> memory)
      : x(args.x, args.columns, memory),
        residual(args.residual, args.columns, memory),
        gate(args.gate, args.columns, memory),
        y(args.y, args.columns, args.stream_outputs, memory),
        h(args.h, args.columns, args.stream_outputs, memory) {}

  void move_to(int64_t row) {
    x.move_to(row);
    residual.move_to(row);
    gate.move_to(row);
    y.move_to(row);
    h.move_to(row);
  }

  template <bool kRest>
  Block load_h(int64_t column) const {
    const Block own = x.template load<kRest>(column);
    return residual.exists() ? rounded<T>(own + residual.template load<kRest>(column)) : own;
  }
};

template <class T, bool kCentred>
void forward_row(const ForwardRows<T>& rows, const NormForwardArgs& args, int64_t group) {
  const int64_t columns = args.columns;
  const float* const weight = args.weight + group * args.padded_columns;
  const float* const bias = args.bias ? args.bias + group * args.padded_columns : nullptr;
  float mean = 0;
  if constexpr (kCentred) {
    Block sum = {};
    for_each_block(columns, [&](int64_t column, auto rest) {
      sum = sum + rows.template load_h<rest()>(column);
    });
    mean = sum_of(sum) / static_cast<float>(columns);
  }
  Block squares = {};
  for_each_block(columns, [&](int64_t column, auto rest) {
    const Block h = rows.template load_h<rest()>(column);
    const Block c = deviation<T, kCentred, rest()>(h, mean, columns - column);
    squares = squares + c * c;
  });
  const float rstd =
      1.0f / __builtin_sqrtf(sum_of(squares) / static_cast<float>(columns) + args.eps);

  for_each_block(columns, [&](int64_t column, auto rest) {
    const Block h = rows.template load_h<rest()>(column);
    const Block c = kCentred ? h - mean : h;
    Block y = (c * rstd) * load_block(weight + column);
    if (bias) {
      y = y + load_block(bias + column);
    }
    if (rows.gate.exists()) {
      y = y * silu<T>(rows.gate.template load<rest()>(column));
    }
    if (rows.residual.exists()) {
      rows.h.template store<rest()>(column, h);
    }
    rows.y.template store<rest()>(column, y);
  });
}

template <class T, bool kCentred>
void forward(const NormForwardArgs& args, int64_t begin, int64_t end, void* scratch) {
  ForwardRows<T> rows(args, RowMemory<T>(scratch, args.columns));
  for (int64_t row = begin; row < end; ++row) {
    rows.move_to(row);
    forward_row<T, kCentred>(rows, args, row / args.rows_per_group);
    rows.y.finish_row();
    rows.h.finish_row();
  }
  if (args.stream_outputs) {
    finish_streaming();
  }
}

}  // namespace

constinit const NormForwardTable norm_forward_kernels_table = {{
    {forward<float, false>, forward<float, true>},
    {forward<f16, false>, forward<f16, true>},
    {forward<bf16, false>, forward<bf16, true>},
}};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
