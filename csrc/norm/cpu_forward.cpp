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

  template <bool kResidual, bool kRest>
  Block load_h(int64_t column) const {
    const Block own = x.template load<kRest>(column);
    if constexpr (kResidual) {
      return rounded<T>(own + residual.template load<kRest>(column));
    } else {
      return own;
    }
  }
};

// The vectors of the group that a row belongs to.
struct GroupVectors {
  const float* weight;
  const float* bias;
};

template <class T, bool kCentred, bool kResidual, bool kGate>
void forward_row(ForwardRows<T>& rows, const NormForwardArgs& args, GroupVectors vectors) {
  const int64_t columns = args.columns;
  float mean = 0;
  if constexpr (kCentred) {
    Block sum = {};
    for_each_block(0, columns, [&](int64_t column, auto rest) {
      sum = sum + rows.template load_h<kResidual, rest()>(column);
    });
    mean = sum_of(sum) / static_cast<float>(columns);
  }
  Block squares = {};
  for_each_block(0, columns, [&](int64_t column, auto rest) {
    const Block h = rows.template load_h<kResidual, rest()>(column);
    const Block c = deviation<T, kCentred, rest()>(h, mean, columns - column);
    squares = squares + c * c;
  });
  const float rstd =
      1.0f / __builtin_sqrtf(sum_of(squares) / static_cast<float>(columns) + args.eps);

  for_each_part(columns, [&](int64_t begin, int64_t end) {
    for_each_block(begin, end, [&](int64_t column, auto rest) {
      const Block h = rows.template load_h<kResidual, rest()>(column);
      Block y = (kCentred ? h - mean : h) * rstd * load_block(vectors.weight + column);
      if constexpr (kCentred) {
        y = y + load_block(vectors.bias + column);
      }
      if constexpr (kGate) {
        y = y * silu<T>(rows.gate.template load<rest()>(column));
      }
      if constexpr (kResidual) {
        rows.h.template store<rest()>(column, h);
      }
      rows.y.template store<rest()>(column, y);
    });
    rows.y.finish_part(begin, end);
    rows.h.finish_part(begin, end);
  });
}

template <class T, bool kCentred, bool kResidual, bool kGate>
void forward_rows(const NormForwardArgs& args, int64_t begin, int64_t end, void* scratch) {
  ForwardRows<T> rows(args, RowMemory<T>(scratch, args.columns));
  for (int64_t row = begin; row < end; ++row) {
    const int64_t vector = row / args.rows_per_group * args.padded_columns;
    rows.move_to(row);
    forward_row<T, kCentred, kResidual, kGate>(
        rows, args, {args.weight + vector, kCentred ? args.bias + vector : nullptr});
  }
  if (args.stream_outputs) {
    finish_streaming();
  }
}

// Only rms_norm has a gate.
template <class T, bool kCentred>
void forward(const NormForwardArgs& args, int64_t begin, int64_t end, void* scratch) {
  with_constant(args.residual.data, [&](auto residual) {
    with_constant(!kCentred && args.gate.data, [&](auto gate) {
      forward_rows<T, kCentred, residual(), gate() && !kCentred>(args, begin, end, scratch);
    });
  });
}

}  // namespace

constinit const NormForwardTable norm_forward_kernels_table = {{
    {forward<float, false>, forward<float, true>},
    {forward<f16, false>, forward<f16, true>},
    {forward<bf16, false>, forward<bf16, true>},
}};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
