// The forward on the CPU: each piece of keys and values is joined to the running result while the
// next one arrives.
#include <algorithm>
#include <limits>

#include "common/parallel.h"
#include "common/thread_scratch.h"
#include "distributed/ring_blocks.h"
#include "distributed/ring_route.h"
#include "distributed/ring_sums.h"
#include "distributed/simd/ring.h"
#include "flash_attention/cpu_plan.h"

namespace mlx_anvil {

namespace {

class Forward {
 public:
  Forward(const AttentionForwardArgs& args, const RingCall& call)
      : args_(args),
        call_(call),
        plan_(call.layout, call.group.rank(), args.config),
        item_bytes_(element_size(args.dtype)),
        sums_(args.out, args.dtype, args.sizes, args.sizes.v_head_dim) {}

  void run() {
    start();
    PieceRoute route("ring_attention", call_, plan_, args_, item_bytes_);
    for (int piece = 0; piece < plan_.pieces(); ++piece) {
      for (int hops = 0; hops < plan_.ranks(); ++hops) {
        route.advance(piece, hops);
        for (const Block& block :
             blocks_of(plan_, args_, call_.lengths, plan_.source(hops), piece)) {
          attend(block, route.views());
        }
      }
    }
    route.finish();
    sums_.store();
  }

 private:
  // A sink is a key whose value is 0.
  void start() const {
    sums_.clear();
    sums_.for_each_head([&](int64_t batch, int64_t head) {
      const float lse =
          args_.config.has_sinks
              ? args_.sinks[batch * args_.sinks_strides[0] + head * args_.sinks_strides[1]]
              : -std::numeric_limits<float>::infinity();
      std::fill_n(args_.lse + (batch * args_.sizes.q_heads + head) * args_.lse_stride,
                  args_.sizes.q_len, lse);
    });
  }

  void attend(const Block& block, const PieceViews& piece) const {
    AttentionForwardArgs own = args_of_block(args_, block, piece, item_bytes_);
    own.out = sums_.from(block.batch, block.query);
    own.lse = args_.lse + block.batch * args_.sizes.q_heads * args_.lse_stride + block.query;
    const ForwardKernels<AttentionForwardArgs>& kernels = attention_forward_kernels()[args_.dtype];
    const auto join = ring_kernels()[args_.dtype].join;
    const int64_t rows_in_all = own.sizes.batch * own.sizes.q_heads * own.sizes.q_len;
    const RowBlocks blocks(own.sizes, forward_tile(own.sizes, rows_in_all));
    const int64_t scratch_bytes = round_up(kernels.scratch_bytes(own, blocks.tile), 64);
    const int64_t partial_bytes =
        blocks.tile.rows * (own.sizes.v_head_dim + 2) * static_cast<int64_t>(sizeof(float));
    parallel_for(blocks.count(), 1, [&](int64_t begin, int64_t end) {
      char* const scratch = static_cast<char*>(thread_scratch(scratch_bytes + partial_bytes));
      float* const partial = reinterpret_cast<float*>(scratch + scratch_bytes);
      for (int64_t turn = begin; turn < end; ++turn) {
        const AttentionRows rows = blocks.in_turn(turn);
        kernels.forward(own, rows, {0, own.sizes.kv_len}, blocks.tile, partial, scratch);
        join(own, rows, partial);
      }
    });
  }

  const AttentionForwardArgs& args_;
  const RingCall& call_;
  const RingPlan plan_;
  const int64_t item_bytes_;
  const RowSums sums_;
};

}  // namespace

void ring_forward_cpu(const AttentionForwardArgs& args, const RingCall& call) {
  Forward(args, call).run();
}

}  // namespace mlx_anvil
