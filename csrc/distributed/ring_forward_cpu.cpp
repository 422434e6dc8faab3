// The forward on the CPU: each piece of keys and values is joined to the running result while the
// next one arrives.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/aligned_floats.h"
#include "common/parallel.h"
#include "common/thread_scratch.h"
#include "distributed/ring_blocks.h"
#include "distributed/ring_route.h"
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
        sums_in_place_(args.dtype == KernelDtype::kFloat32),
        sums_(sums_in_place_ ? 0 : rows() * args.sizes.v_head_dim) {
    total_ = args.out;
    if (!sums_in_place_) {
      const AttentionSizes& sizes = args.sizes;
      const int64_t of_head = sizes.q_len * sizes.v_head_dim;
      total_ = {sums_.get(), {sizes.q_heads * of_head, of_head, sizes.v_head_dim, 1}};
    }
  }

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
    store();
  }

 private:
  int64_t rows() const { return args_.sizes.batch * args_.sizes.q_heads * args_.sizes.q_len; }

  template <class Row>
  void for_each_head(Row row) const {
    parallel_for(args_.sizes.batch * args_.sizes.q_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        row(i / args_.sizes.q_heads, i % args_.sizes.q_heads);
      }
    });
  }

  float* total_row(int64_t batch, int64_t head, int64_t row) const {
    return static_cast<float*>(total_.data) + batch * total_.strides[0] + head * total_.strides[1] +
           row * total_.strides[2];
  }

  // A sink is a key whose value is 0.
  void start() const {
    for_each_head([&](int64_t batch, int64_t head) {
      const float lse =
          args_.config.has_sinks
              ? args_.sinks[batch * args_.sinks_strides[0] + head * args_.sinks_strides[1]]
              : -std::numeric_limits<float>::infinity();
      std::fill_n(args_.lse + (batch * args_.sizes.q_heads + head) * args_.lse_stride,
                  args_.sizes.q_len, lse);
      for (int64_t row = 0; row < args_.sizes.q_len; ++row) {
        std::memset(total_row(batch, head, row), 0, args_.sizes.v_head_dim * sizeof(float));
      }
    });
  }

  void attend(const Block& block, const PieceViews& piece) const {
    AttentionForwardArgs own = args_of_block(args_, block, piece, item_bytes_);
    own.out = total_;
    own.out.data = total_row(block.batch, 0, block.query);
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

  void store() const {
    if (sums_in_place_) {
      return;
    }
    const auto store_rows = ring_kernels()[args_.dtype].store;
    for_each_head([&](int64_t batch, int64_t head) {
      char* const to = static_cast<char*>(args_.out.data) +
                       (batch * args_.out.strides[0] + head * args_.out.strides[1]) * item_bytes_;
      store_rows(total_row(batch, head, 0), args_.sizes.q_len, args_.sizes.v_head_dim, to,
                 args_.out.strides[2]);
    });
  }

  const AttentionForwardArgs& args_;
  const RingCall& call_;
  const RingPlan plan_;
  const int64_t item_bytes_;
  const bool sums_in_place_;
  const AlignedFloats sums_;  // of the result, if that is not float32
  AttentionOutput total_;
};

}  // namespace

void ring_forward_cpu(const AttentionForwardArgs& args, const RingCall& call) {
  Forward(args, call).run();
}

}  // namespace mlx_anvil
