// Forward of causal_conv1d on the CPU. A window of rows slides along the time of one block of
// channels, so that each row is read once per tile.
#include "causal_conv1d/simd/rows.h"
#include "common/simd/prefetch.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T, int kWidth, bool kSilu>
class Forward {
 public:
  Forward(const ConvForwardArgs& args, int64_t batch)
      : rows_(args.of, batch),
        channels_(args.of.channels),
        valid_(valid_length(args.of, batch)),
        streams_(args.stream_outputs),
        y_(static_cast<T*>(args.y) + batch * args.of.length * channels_),
        new_state_(static_cast<T*>(args.new_state) + batch * (kWidth - 1) * channels_) {}

  // Rows [begin, end) of y, for channels [first, last).
  void convolve(
      int64_t begin, int64_t end, int64_t first, int64_t last, const float* weights) const {
    const int64_t valid = end < valid_ ? end : valid_ < begin ? begin : valid_;
    for_each_block(first, last, [=, this](int64_t channel, auto rest) {
      const Taps<kWidth> taps(weights + (channel - first) * (kWidth + 1));
      const int64_t count = last - channel, x_stride = rows_.x_stride;
      Block window[kWidth];
      rows_.template fill<rest()>(window, begin, channel, count);
      const T* from = rows_.x + begin * x_stride + channel;
      T* to = y_ + begin * channels_ + channel;
      for (int64_t t = begin; t < valid; ++t) {
        window[kWidth - 1] = load_columns<rest()>(from, count);
        prefetch_block(from + (end - begin) * x_stride);
        const Block sum = taps.sum(window);
        store<rest()>(to, count, kSilu ? silu<T>(sum) : sum);
        slide(window);
        from += x_stride;
        to += channels_;
      }
      for (int64_t t = valid; t < end; ++t) {
        store<rest()>(to, count, Block{});
        to += channels_;
      }
    });
  }

  void keep_state(int64_t first, int64_t last) const {
    const size_t bytes = (last - first) * sizeof(T);
    for (int64_t i = 0; i < kWidth - 1; ++i) {
      T* const to = new_state_ + i * channels_ + first;
      const T* const from = rows_.row(valid_ + i);
      if (from) {
        std::memcpy(to, from + first, bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
  }

 private:
  template <bool kRest>
  void store(T* to, int64_t count, Block y) const {
    if (!kRest && streams_) {
      store_block<true>(to, y);
    } else {
      store_columns<kRest>(to, count, y);
    }
  }

  const BatchRows<T, kWidth> rows_;
  const int64_t channels_, valid_;
  const bool streams_;
  T* const y_;
  T* const new_state_;
};

template <class T, int kWidth, bool kSilu>
void forward(const ConvForwardArgs& args, const ConvPiece& piece, const float* weights) {
  for (int64_t tile = piece.first_tile; tile < piece.last_tile; ++tile) {
    const int64_t batch = tile / piece.tiles_per_batch;
    const int64_t begin = tile % piece.tiles_per_batch * piece.tile_rows;
    const int64_t end =
        begin + piece.tile_rows < args.of.length ? begin + piece.tile_rows : args.of.length;
    const Forward<T, kWidth, kSilu> of_batch(args, batch);
    of_batch.convolve(begin, end, piece.first_channel, piece.last_channel, weights);
    if (begin == 0) {
      of_batch.keep_state(piece.first_channel, piece.last_channel);
    }
  }
  if (args.stream_outputs) {
    finish_streaming();
  }
}

template <class T, int kWidth>
struct ForwardOf {
  static void kernel(const ConvForwardArgs& args, const ConvPiece& piece, const float* weights) {
    with_constant(args.of.silu,
                  [&](auto silu) { forward<T, kWidth, silu()>(args, piece, weights); });
  }
};

}  // namespace

constinit const ConvTable<ConvForwardKernel> conv_forward_kernels_table =
    MLX_ANVIL_CONV_TABLE(ForwardOf);

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
