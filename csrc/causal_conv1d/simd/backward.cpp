// Gradients of causal_conv1d on the CPU. Two windows slide along the time of one block of channels:
// the rows that an output is of, and the gradients of the convolution that a row has a part in. The
// convolution before the activation is computed again.
#include "causal_conv1d/simd/rows.h"
#include "common/simd/prefetch.h"

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
                              : nullptr),
        streams_(args.stream_d_x) {}

  // Gradients of rows [begin, end), for a block of channels. Its sums are over the outputs of the
  // same numbers. `carry` has the newest d_sums before `begin` if `continues`; else they are
  // computed first.
  template <bool kRest>
  MLX_ANVIL_UNROLLED void block(int64_t begin,
                                int64_t end,
                                bool continues,
                                int64_t channel,
                                int64_t count,
                                const Taps<kWidth>& taps,
                                float* sums,
                                float* carry) const {
    const int64_t first = continues ? begin : begin < kWidth - 1 ? 0 : begin - (kWidth - 1);
    Block window[kWidth] = {}, d_sums[kWidth];  // d_sums[w] is of output t - (kWidth - 1 - w)
    Block own[kSums ? kWidth + 1 : 1] = {};
    if (first < valid_) {  // there are no rows past the last output
      rows_.template fill<kRest>(window, first, channel, count);
    }
    unroll<kWidth - 1>([&](auto w) __attribute__((always_inline)) {
      d_sums[w.value + 1] = continues ? load_block(carry + w.value * kBlock) : Block{};
    });
    const T* x = rows_.x + first * rows_.x_stride + channel;
    const T* d_y = d_y_ + first * d_y_stride_ + channel;
    for (int64_t t = first; t < end; ++t) {
      slide(d_sums);
      d_sums[kWidth - 1] = Block{};
      if (t < valid_) {
        window[kWidth - 1] = load_columns<kRest>(x, count);
        Block d_sum = load_columns<kRest>(d_y, count);
        prefetch_block(x + (end - begin) * rows_.x_stride);
        prefetch_block(d_y + (end - begin) * d_y_stride_);
        if constexpr (kSilu) {
          d_sum = d_sum * slope(taps.sum(window));
        }
        if constexpr (kSums) {
          if (t >= begin) {
            unroll<kWidth>([&](auto w) __attribute__((always_inline)) {
              own[w.value] = own[w.value] + d_sum * window[w.value];
            });
            own[kWidth] = own[kWidth] + d_sum;
          }
        }
        d_sums[kWidth - 1] = d_sum;
        slide(window);
        x += rows_.x_stride;
        d_y += d_y_stride_;
      }
      if (t >= begin) {
        store<kRest>(t, channel, count, taps, d_sums);
      }
    }
    unroll<kWidth - 1>([&](auto w) __attribute__((always_inline)) {
      store_block<false>(carry + w.value * kBlock, d_sums[w.value + 1]);
    });
    if constexpr (kSums) {
      unroll<kWidth + 1>([&](auto w) __attribute__((always_inline)) {
        float* const sum = sums + w.value * kBlock;
        store_block<false>(sum, load_block(sum) + own[w.value]);
      });
    }
  }

 private:
  static Block slope(Block x) {
    return {silu_with_derivative<kAccuracyOf<T>>(x.first).derivative,
            silu_with_derivative<kAccuracyOf<T>>(x.second).derivative};
  }

  // Stores the gradient of row t: that of the outputs it has a part in, and of the new state.
  template <bool kRest>
  MLX_ANVIL_UNROLLED void store(int64_t t,
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
      total = d_sums[kWidth - 1] * taps.of[0];
      unroll<kWidth - 1>([&](auto w) __attribute__((always_inline)) {
        total = total + d_sums[kWidth - 2 - w.value] * taps.of[w.value + 1];
      });
      if (t >= valid_) {
        total = total + load_columns<kRest>(
                            d_new_state_ + (t - valid_) * d_new_state_stride_ + channel, count);
      }
    }
    if (!kRest && streams_ && t >= kWidth - 1) {
      store_block<true>(row + channel, total);
    } else {
      store_columns<kRest>(row + channel, count, total);
    }
  }

  const BatchRows<T, kWidth> rows_;
  const T *const d_y_, *const d_new_state_;
  const int64_t d_y_stride_, d_new_state_stride_, channels_, valid_;
  T* const d_x_;
  T* const d_state_;
  const bool streams_;
};

template <class T, int kWidth, bool kSilu, bool kSums>
void backward(const ConvBackwardArgs& args,
              const ConvPiece& piece,
              const float* weights,
              float* sums,
              float* carry) {
  const int64_t rows = args.of.length + kWidth - 1;
  for (int64_t tile = piece.first_tile; tile < piece.last_tile; ++tile) {
    const Backward<T, kWidth, kSilu, kSums> of_batch(args, tile / piece.tiles_per_batch);
    const int64_t begin = tile % piece.tiles_per_batch * piece.tile_rows;
    const int64_t end = begin + piece.tile_rows < rows ? begin + piece.tile_rows : rows;
    const bool continues = begin > 0 && (tile > piece.first_tile || piece.continues);
    for_each_block(piece.first_channel, piece.last_channel, [&](int64_t channel, auto rest) {
      const int64_t at = channel - piece.first_channel;
      of_batch.template block<rest()>(begin, end, continues, channel, piece.last_channel - channel,
                                      Taps<kWidth>(weights + at * (kWidth + 1)),
                                      kSums ? sums + at * (kWidth + 1) : nullptr,
                                      carry + at * (kWidth - 1));
    });
  }
  if (args.stream_d_x) {
    finish_streaming();
  }
}

template <class T, int kWidth>
struct BackwardOf {
  static void kernel(const ConvBackwardArgs& args,
                     const ConvPiece& piece,
                     const float* weights,
                     float* sums,
                     float* carry) {
    with_constant(args.of.silu, [&](auto silu) {
      with_constant(sums != nullptr, [&](auto has_sums) {
        backward<T, kWidth, silu(), has_sums()>(args, piece, weights, sums, carry);
      });
    });
  }
};

}  // namespace

constinit const ConvTable<ConvBackwardKernel> conv_backward_kernels_table =
    MLX_ANVIL_CONV_TABLE(BackwardOf);

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
