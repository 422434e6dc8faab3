// Forward of the norms on the CPU: h = x + residual; y = (h - mean) rstd weight + bias, times
// silu(gate). Each row is read from memory once; later passes find h in the cache. The host
// (cpu.cpp) calls it for ranges of rows.
#include "norm/simd/kernels.h"
#include "norm/simd/rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// x + residual as rounded for the output. The first pass over a row writes it and later passes read
// it back, from a private copy if the output uses streaming stores.
template <class T>
class ResidualRows {
 public:
  ResidualRows(const NormForwardArgs& args, RowMemory<T>& memory)
      : out_(args.h, args.columns, args.stream_outputs),
        columns_(args.columns),
        kept_(args.h && args.stream_outputs ? memory.take() : nullptr) {}

  void move_to(int64_t row) {
    out_.move_to(row);
    row_ = kept_ ? kept_ : out_.row();
  }

  template <bool kRest>
  Block store(int64_t column, Block sum) const {
    if (kept_) {
      out_.template store<kRest>(column, sum);
    }
    store_columns<kRest>(row_ + column, columns_ - column, sum);
    return load<kRest>(column);
  }

  template <bool kRest>
  Block load(int64_t column) const {
    return load_columns<kRest>(row_ + column, columns_ - column);
  }

 private:
  RowSink<T> out_;
  const int64_t columns_;
  T* const kept_;
  T* row_ = nullptr;
};

template <class T>
struct ForwardRows {
  RowSource<T> x, residual, gate;
  ResidualRows<T> h;
  RowSink<T> y;

  ForwardRows(const NormForwardArgs& args, RowMemory<T> memory)
      : x(args.x, args.columns, memory),
        residual(args.residual, args.columns, memory),
        gate(args.gate, args.columns, memory),
        h(args, memory),
        y(args.y, args.columns, args.stream_outputs) {}

  void move_to(int64_t row) {
    x.move_to(row);
    residual.move_to(row);
    gate.move_to(row);
    h.move_to(row);
    y.move_to(row);
  }

  template <bool kResidual, bool kRest>
  Block form_h(int64_t column) const {
    const Block own = x.template load<kRest>(column);
    if constexpr (kResidual) {
      return h.template store<kRest>(column, own + residual.template load<kRest>(column));
    } else {
      return own;
    }
  }

  template <bool kResidual, bool kRest>
  Block load_h(int64_t column) const {
    if constexpr (kResidual) {
      return h.template load<kRest>(column);
    } else {
      return x.template load<kRest>(column);
    }
  }
};

// Weight and bias of a row's group.
struct GroupVectors {
  const float* weight;
  const float* bias;
};

template <class T, bool kCentred, bool kResidual, class Gate>
void forward_row(ForwardRows<T>& rows, const NormForwardArgs& args, GroupVectors vectors) {
  const int64_t columns = args.columns;
  // Sums h for layer_norm, and h^2 for rms_norm.
  Block sum = sum_of_blocks(columns, [&](int64_t column, auto rest) {
    // Each pass prefetches one operand of the next row, which keeps memory busy throughout.
    if constexpr (kResidual) {
      rows.residual.prefetch_next(column);
    }
    const Block h = rows.template form_h<kResidual, rest()>(column);
    return kCentred ? h : h * h;
  });
  float mean = 0;
  if constexpr (kCentred) {
    mean = sum_of(sum) / static_cast<float>(columns);
    sum = sum_of_blocks(columns, [&](int64_t column, auto rest) {
      const Block h = rows.template load_h<kResidual, rest()>(column);
      const Block c = deviation<T, rest()>(h, mean, columns - column);
      return c * c;
    });
  }
  const float rstd = 1.0f / __builtin_sqrtf(sum_of(sum) / static_cast<float>(columns) + args.eps);

  for_each_block(0, columns, [&](int64_t column, auto rest) {
    rows.x.prefetch_next(column);
    const Block h = rows.template load_h<kResidual, rest()>(column);
    Block y = (kCentred ? h - mean : h) * rstd * load_block(vectors.weight + column);
    if constexpr (kCentred) {
      y = y + load_block(vectors.bias + column);
    }
    if constexpr (!std::is_same_v<Gate, NoGate>) {
      y = y * gate_of<T, Gate>(rows.gate.template load<rest()>(column));
    }
    rows.y.template store<rest()>(column, y);
  });
}

template <class T, bool kCentred, bool kResidual, class Gate>
void forward_rows(const NormForwardArgs& args, int64_t begin, int64_t end, void* scratch) {
  ForwardRows<T> rows(args, RowMemory<T>(scratch, args.columns));
  for (int64_t row = begin; row < end; ++row) {
    const int64_t vector = row / args.rows_per_group * args.padded_columns;
    rows.move_to(row);
    forward_row<T, kCentred, kResidual, Gate>(
        rows, args, {args.weight + vector, kCentred ? args.bias + vector : nullptr});
  }
  if (args.stream_outputs) {
    finish_streaming();
  }
}

template <class T, bool kCentred>
void forward(const NormForwardArgs& args, int64_t begin, int64_t end, void* scratch) {
  with_constant(args.residual.data, [&](auto residual) {
    with_gate<kCentred>(args.gate.data, args.gate_is_sigmoid, [&](auto gate) {
      forward_rows<T, kCentred, residual(), decltype(gate)>(args, begin, end, scratch);
    });
  });
}

}  // namespace

constinit const PerDtype<NormKernels<NormForwardKernel>> norm_forward_kernels_table = {
    .float32 = {.rms = forward<float, false>, .layer = forward<float, true>},
    .float16 = {.rms = forward<f16, false>, .layer = forward<f16, true>},
    .bfloat16 = {.rms = forward<bf16, false>, .layer = forward<bf16, true>},
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
