// Gradients of causal_conv1d on the CPU. Two windows slide along the time of one block of channels:
// the rows that an output is of, and the gradients of the convolution that a row has a part in. The
// convolution before the activation is computed again.
#include "causal_conv1d/simd/rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T, int kWidth, bool kSilu, bool kSums>
class Backward {
 public:
  Backward(const ConvBackwardArgs& args, int64_t batch)
      : rows_(args.of, batch),
        d_y_(of_batch<T>(args.d_y, batch)),
        d_new_state_(of_batch<T>(args.d_new_state, batch)),
        d_y_stride_(args.d_y.row_stride),
        d_new_state_stride_(args.d_new_state.row_stride),
        channels_(args.of.channels),
        valid_(valid_length(args.of, batch)),
        d_x_(static_cast<T*>(args.d_x) + batch * args.of.length * channels_),
        d_state_(args.d_state ? static_cast<T*>(args.d_state) + batch * (kWidth - 1) * channels_
                              : nullptr) {}

  // Gradients of rows [begin, end), for a block of channels. Its sums are over the outputs of the
  // same numbers.
  template <bool kRest>
  void block(int64_t begin,
             int64_t end,
             int64_t channel,
             int64_t count,
             const Taps<kWidth>& taps,
             float* sums,
             float* lost) const {
    const int64_t first = begin < kWidth - 1 ? 0 : begin - (kWidth - 1);
    Block window[kWidth], d_sums[kWidth] = {};  // d_sums[w] is of output t - w
    Block own[kSums ? kWidth + 1 : 1] = {};
    for (int w = 0; w + 1 < kWidth; ++w) {
      window[w] = rows_.template load<kRest>(first + w, channel, count);
    }
    for (int64_t t = first; t < end; ++t) {
      Block d_sum = {};
      if (t < valid_) {
        window[kWidth - 1] = load_columns<kRest>(rows_.x + t * rows_.x_stride + channel, count);
        d_sum = load_columns<kRest>(d_y_ + t * d_y_stride_ + channel, count);
        if constexpr (kSilu) {
          d_sum = d_sum * slope(taps.sum(window));
        }
        if (kSums && t >= begin) {
          for (int w = 0; w < kWidth; ++w) {
            own[w] = own[w] + d_sum * window[w];
          }
          own[kWidth] = own[kWidth] + d_sum;
        }
        slide(window);
      }
      for (int w = kWidth - 1; w > 0; --w) {
        d_sums[w] = d_sums[w - 1];
      }
      d_sums[0] = d_sum;
      if (t >= begin) {
        store<kRest>(t, channel, count, taps, d_sums);
      }
    }
    if constexpr (kSums) {
      for (int w = 0; w <= kWidth; ++w) {
        add(own[w], sums + w * kBlock, lost + w * kBlock);
      }
    }
  }

 private:
  static Block slope(Block x) {
    return {silu_with_derivative<kAccuracyOf<T>>(x.first).derivative,
            silu_with_derivative<kAccuracyOf<T>>(x.second).derivative};
  }

  // Stores the gradient of row t: that of the outputs it has a part in, and of the new state.
  template <bool kRest>
  void store(int64_t t,
             int64_t channel,
             int64_t count,
             const Taps<kWidth>& taps,
             const Block (&d_sums)[kWidth]) const {
    T* const row = t >= kWidth - 1 ? d_x_ + (t - (kWidth - 1)) * channels_
                   : d_state_      ? d_state_ + t * channels_
                                   : nullptr;
    if (!row) {
      return;
    }
    Block total = {};
    if (t < valid_ + kWidth - 1) {  // rows past the end are never read
      total = d_sums[0] * taps.of[0];
      for (int w = 1; w < kWidth; ++w) {
        total = total + d_sums[w] * taps.of[w];
      }
      if (t >= valid_) {
        total = total + load_columns<kRest>(
                            d_new_state_ + (t - valid_) * d_new_state_stride_ + channel, count);
      }
    }
    store_columns<kRest>(row + channel, count, total);
  }

  // sums += x, with compensation.
  static void add(Block x, float* sums, float* lost) {
    const Block sum = load_block(sums), more = x - load_block(lost), total = sum + more;
    store_block<false>(lost, (total - sum) - more);
    store_block<false>(sums, total);
  }

  const BatchRows<T, kWidth> rows_;
  const T *const d_y_, *const d_new_state_;
  const int64_t d_y_stride_, d_new_state_stride_, channels_, valid_;
  T* const d_x_;
  T* const d_state_;
};

template <class T, int kWidth, bool kSilu, bool kSums>
void backward(const ConvBackwardArgs& args,
              const ConvPiece& piece,
              const float* weights,
              float* sums,
              float* lost) {
  const int64_t rows = args.of.length + kWidth - 1;
  for (int64_t tile = piece.first_tile; tile < piece.last_tile; ++tile) {
    const Backward<T, kWidth, kSilu, kSums> of_batch(args, tile / piece.tiles_per_batch);
    const int64_t begin = tile % piece.tiles_per_batch * piece.tile_rows;
    const int64_t end = begin + piece.tile_rows < rows ? begin + piece.tile_rows : rows;
    for_each_block(piece.first_channel, piece.last_channel, [&](int64_t channel, auto rest) {
      const int64_t at = (channel - piece.first_channel) * (kWidth + 1);
      of_batch.template block<rest()>(begin, end, channel, piece.last_channel - channel,
                                      Taps<kWidth>(weights + at), kSums ? sums + at : nullptr,
                                      kSums ? lost + at : nullptr);
    });
  }
}

template <class T, int kWidth>
struct BackwardOf {
  static void kernel(const ConvBackwardArgs& args,
                     const ConvPiece& piece,
                     const float* weights,
                     float* sums,
                     float* lost) {
    with_constant(args.of.silu, [&](auto silu) {
      with_constant(sums != nullptr, [&](auto has_sums) {
        backward<T, kWidth, silu(), has_sums()>(args, piece, weights, sums, lost);
      });
    });
  }
};

}  // namespace

constinit const ConvTable<ConvBackwardKernel> conv_backward_kernels_table =
    MLX_ANVIL_CONV_TABLE(BackwardOf);

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
