// The gradients on the CPU. Keys and values go round the ring once more. The gradients of a piece
// start at its rank, go round with each rank's share added, and come back.
#include <algorithm>
#include <cstring>

#include "common/aligned_floats.h"
#include "common/parallel.h"
#include "distributed/ring_blocks.h"
#include "distributed/ring_route.h"
#include "distributed/ring_sums.h"
#include "distributed/simd/ring.h"
#include "flash_attention/cpu.h"
#include "flash_attention/simd/kernels.h"

namespace mlx_anvil {

namespace {

class Backward {
 public:
  Backward(const AttentionBackwardArgs& args, const RingCall& call)
      : args_(args),
        call_(call),
        kernels_(ring_kernels()[args.dtype]),
        plan_(call.layout, call.group.rank(), args.config),
        item_bytes_(element_size(args.dtype)),
        share_(piece_bytes(args.sizes, plan_.longest_piece(), 1)),
        d_q_(args.d_q, args.dtype, args.sizes, args.sizes.head_dim),
        route_(kOp, call, plan_, args, item_bytes_),
        relay_(plan_, args.sizes, sizeof(float), call.gradients) {}

  void run() {
    d_q_.clear();
    for (int piece = 0; piece < plan_.pieces(); ++piece) {
      for (int hops = 0; hops < plan_.ranks(); ++hops) {
        route_.advance(piece, hops);
        const bool has_share = add_share(piece, hops);
        pass_on(piece, hops, has_share);
      }
    }
    take_arrived();
    route_.finish();
    d_q_.store();
    sink_gradients();
  }

 private:
  static constexpr const char* kOp = "ring_attention";

  int64_t floats_of(int source, int piece) const {
    return piece_bytes(args_.sizes, plan_.piece_rows(source, piece), 1);
  }
  bool travels(int source, int piece) const { return plan_.hops(source, piece) > 0; }

  // Adds to d_q, and sets this rank's share of the gradients of the current piece. False for none:
  // it then is not set.
  bool add_share(int piece, int hops) {
    const int source = plan_.source(hops);
    const std::vector<Block> blocks = blocks_of(plan_, args_, call_.lengths, source, piece);
    if (blocks.empty() && hops > 0) {
      return false;
    }
    std::memset(share_.get(), 0, floats_of(source, piece) * sizeof(float));
    const int64_t rows = plan_.piece_rows(source, piece);
    const PieceViews to = packed_views(args_.sizes, rows, share_.get(), sizeof(float));
    for (const Block& block : blocks) {
      attention_backward_cpu(args_of(block, to));
    }
    return true;
  }

  AttentionBackwardArgs args_of(const Block& block, const PieceViews& to) const {
    AttentionBackwardArgs own = args_of_block(args_, block, route_.views(), item_bytes_);
    const int64_t first_row = block.batch * args_.sizes.q_heads;
    own.out = moved(args_.out, block.batch, block.query, item_bytes_);
    own.d_out = moved(args_.d_out, block.batch, block.query, item_bytes_);
    own.lse = args_.lse + first_row * args_.lse_stride + block.query;
    if (args_.d_lse) {
      own.d_lse =
          args_.d_lse + block.batch * args_.d_lse_strides[0] + block.query * args_.d_lse_strides[2];
    }
    own.adds = true;
    own.d_q = d_q_.from(block.batch, block.query);
    own.d_k = as_output(moved(to.k, block.batch, block.key, sizeof(float)));
    own.d_v = as_output(moved(to.v, block.batch, block.key, sizeof(float)));
    own.d_sinks = nullptr;
    return own;
  }

  static AttentionOutput as_output(const AttentionView& view) {
    AttentionOutput output;
    output.data = const_cast<void*>(view.data);
    std::copy_n(view.strides, 4, output.strides);
    return output;
  }

  // Adds the share to the piece's gradients, and sends them on.
  void pass_on(int piece, int hops, bool has_share) {
    take_arrived();
    const int source = plan_.source(hops), next = plan_.source(hops + 1);
    const bool sends = travels(source, piece), receives = travels(next, piece);
    const int64_t floats = floats_of(source, piece);
    if (hops == 0 && !sends) {
      store_piece(piece, share_.get());
    } else if (hops == 0) {
      std::memcpy(sums_of_piece(), share_.get(), floats * sizeof(float));
    } else if (sends && has_share) {
      kernels_.add(sums_of_piece(), share_.get(), floats);
    }
    relay_.begin(route_.neighbours(), piece, sends ? std::optional(source) : std::nullopt,
                 receives ? std::optional(next) : std::nullopt);
    returning_ = receives && hops + 1 == plan_.ranks() ? piece : -1;
  }

  // Waits for gradients on their way, and stores those that are back.
  void take_arrived() {
    relay_.arrive();
    if (returning_ >= 0) {
      store_piece(returning_, sums_of_piece());
      returning_ = -1;
    }
  }

  float* sums_of_piece() const { return static_cast<float*>(relay_.memory()); }

  void store_piece(int piece, const float* from) const {
    const int64_t rows = plan_.piece_rows(plan_.rank(), piece);
    const PieceViews views =
        packed_views(args_.sizes, rows, const_cast<float*>(from), sizeof(float));
    store_rows(views.k, args_.sizes.head_dim, piece, args_.d_k);
    store_rows(views.v, args_.sizes.v_head_dim, piece, args_.d_v);
  }

  void store_rows(const AttentionView& from,
                  int64_t columns,
                  int piece,
                  const AttentionOutput& to) const {
    for (int64_t batch = 0; batch < args_.sizes.batch; ++batch) {
      for (int64_t head = 0; head < args_.sizes.kv_heads; ++head) {
        const float* rows =
            static_cast<const float*>(from.data) + batch * from.strides[0] + head * from.strides[1];
        for (const Segment& segment : plan_.piece(plan_.rank(), piece)) {
          char* const first =
              static_cast<char*>(to.data) +
              (batch * to.strides[0] + head * to.strides[1] + segment.first * to.strides[2]) *
                  item_bytes_;
          kernels_.store(rows, segment.length, columns, first, to.strides[2]);
          rows += segment.length * columns;
        }
      }
    }
  }

  void sink_gradients() const {
    if (args_.d_sinks) {
      const auto gradient = attention_backward_kernels()[args_.dtype].sink_gradient;
      d_q_.for_each_head([&](int64_t batch, int64_t head) { gradient(args_, batch, head); });
    }
  }

  const AttentionBackwardArgs& args_;
  const RingCall& call_;
  const RingKernels& kernels_;
  const RingPlan plan_;
  const int64_t item_bytes_;
  const AlignedFloats share_;  // of the current piece's gradients
  const RowSums d_q_;
  PieceRoute route_;
  Relay relay_;         // of gradients
  int returning_ = -1;  // the piece whose gradients come back, or -1
};

}  // namespace

void ring_backward_cpu(const AttentionBackwardArgs& args, const RingCall& call) {
  Backward(args, call).run();
}

}  // namespace mlx_anvil
