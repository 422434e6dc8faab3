// The gradients of moe_combine, with the formulas of metal/moe/backward.metal.
//
//   for each token: for each of its pairs:
//     d_y row = weight * d_out;  d_weight = d_out . y row
//   d_shared = sigmoid(gate) * d_out;  d_gate = sigmoid'(gate) * (d_out . shared)
#include "moe/simd/kernels.h"
#include "moe/simd/rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T>
class TokenGradient {
 public:
  TokenGradient(const MoeBackwardArgs& args, bool streams, int64_t token)
      : args_(args),
        streams_(streams),
        token_(token),
        d_out_(static_cast<const T*>(args.d_out) + token * args.sizes.columns) {}

  void run() const {
    const MoeSizes& sizes = args_.sizes;
    const int64_t pairs = sizes.pairs(), first = token_ / sizes.tokens * pairs;
    for (int64_t j = 0; j < sizes.chosen; ++j) {
      const int64_t pair = token_ * sizes.chosen + j;
      const int64_t at = (first + moe_place(args_.inverse[pair], pairs)) * sizes.columns;
      const float weight = args_.weights.data ? factor_at<T>(args_.weights, pair) : 1.0f;
      const float dot =
          product(static_cast<const T*>(args_.y) + at, static_cast<T*>(args_.d_y) + at, weight);
      if (args_.d_weights) {
        store_factor<T>(args_.weights, args_.d_weights, pair, dot);
      }
    }
    if (args_.d_gate) {
      const int64_t at = token_ * sizes.columns;
      const Share share = share_of(factor_at<T>(args_.gate, token_));
      const float dot = product(static_cast<const T*>(args_.shared) + at,
                                static_cast<T*>(args_.d_shared) + at, share.value);
      store_factor<T>(args_.gate, args_.d_gate, token_, dot * share.value * share.complement);
    }
  }

 private:
  // Writes factor * d_out, and returns the dot product of d_out and the row.
  float product(const T* row, T* to, float factor) const {
    return streams_ ? product_of<true>(row, to, factor) : product_of<false>(row, to, factor);
  }

  template <bool kStream>
  float product_of(const T* row, T* to, float factor) const {
    const int64_t columns = args_.sizes.columns;
    Block sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * kBlock <= columns; i += 2 * kBlock) {
      block<kStream>(row, to, i, kBlock, factor, sums[0]);
      block<kStream>(row, to, i + kBlock, kBlock, factor, sums[1]);
    }
    for (; i < columns; i += kBlock) {
      block<kStream>(row, to, i, columns - i, factor, sums[0]);
    }
    return lane_sum((sums[0].first + sums[1].first) + (sums[0].second + sums[1].second));
  }

  template <bool kStream>
  void block(const T* row, T* to, int64_t i, int64_t count, float factor, Block& sum) const {
    const Block d = load_part(d_out_ + i, count), x = load_part(row + i, count);
    sum.first += d.first * x.first;
    sum.second += d.second * x.second;
    store_part<kStream>(to + i, count, Block{d.first * factor, d.second * factor});
  }

  const MoeBackwardArgs& args_;
  const bool streams_;
  const int64_t token_;
  const T* const d_out_;
};

template <class T>
void backward(const MoeBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t columns = args.sizes.columns;
  const bool streams = args.stream_outputs &&
                       rows_are_aligned(static_cast<const T*>(args.d_y), columns) &&
                       rows_are_aligned(static_cast<const T*>(args.d_shared), columns);
  for (int64_t token = begin; token < end; ++token) {
    TokenGradient<T>(args, streams, token).run();
  }
  finish_streaming();
}

}  // namespace

constinit const MoeBackwardKernels moe_backward_kernels_table = {
    .of = {.float32 = backward<float>, .float16 = backward<f16>, .bfloat16 = backward<bf16>},
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
