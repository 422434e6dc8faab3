// CPU driver of the forward: blocks of rows of the states over threads.
#include "gated_delta/cpu.h"

#include <algorithm>
#include <cstring>

#include "common/integers.h"
#include "common/parallel.h"

namespace mlx_anvil {

namespace {

// Minimum numbers of a state, times steps, per thread.
constexpr int64_t kGrain = 16384;

const void* element(const DeltaView& view, int64_t bytes, int64_t batch, int64_t head) {
  return view.data ? static_cast<const char*>(view.data) +
                         (batch * view.strides[0] + head * view.strides[2]) * bytes
                   : nullptr;
}

// What a thread needs to know of a batch row.
struct BatchRow {
  int64_t steps;
  std::vector<DeltaPosition> positions;
};

void copy_state(const float* from, float* to, int64_t count) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  if (!from) {
    std::memset(to, 0, bytes);
  } else if (from != to) {
    std::memcpy(to, from, bytes);
  }
}

class ForwardCall {
 public:
  explicit ForwardCall(const DeltaForwardArgs& args)
      : args_(args), kernels_(gated_delta_forward_kernels()[args.dtype]) {
    for (int64_t b = 0; b < args.sizes.batch; ++b) {
      rows_.push_back({steps_of(args, b), positions_of(args, b)});
    }
  }

  void run() const {
    const DeltaSizes& sizes = args_.sizes;
    const bool few = sizes.length <= kMostFewSteps;
    const int64_t block = few ? sizes.value_dim : kernels_.block_rows;
    const int64_t blocks = ceil_div(sizes.value_dim, block);
    const int64_t work = std::max<int64_t>(1, sizes.length) * sizes.key_dim * block;
    parallel_for(sizes.batch * sizes.value_heads * blocks, ceil_div(kGrain, work),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     const int64_t head = i / blocks, first = i % blocks * block;
                     const int64_t count = std::min(block, sizes.value_dim - first);
                     run_rows(head / sizes.value_heads, head % sizes.value_heads, first, count);
                   }
                 });
  }

 private:
  void run_rows(int64_t batch, int64_t head, int64_t first, int64_t count) const {
    const DeltaSizes& sizes = args_.sizes;
    const BatchRow& row = rows_[static_cast<size_t>(batch)];
    const int64_t state = (batch * sizes.value_heads + head) * sizes.state();
    std::vector<DeltaSaved> saved;
    for (const DeltaPosition& position : row.positions) {
      const int64_t at = (batch * sizes.positions + position.index) * sizes.value_heads + head;
      saved.push_back({position.step, args_.states + at * sizes.state()});
    }
    DeltaForwardBlock block{};
    block.state_in = args_.state ? args_.state + state : nullptr;
    block.state_out = args_.state_out + state;
    if (row.steps > 0) {
      const int64_t bytes = element_size(args_.dtype);
      block.head = head_of(args_, batch, head);
      block.steps = row.steps;
      block.first = first;
      block.count = count;
      block.y_step = sizes.value_heads * sizes.value_dim;
      block.y = static_cast<char*>(args_.y) +
                (batch * sizes.length * block.y_step + head * sizes.value_dim) * bytes;
      block.saved = saved.data();
      block.saved_count = static_cast<int64_t>(saved.size());
      sizes.length <= kMostFewSteps ? kernels_.few_steps(block) : kernels_.many_steps(block);
    } else {
      const int64_t from = first * sizes.key_dim, numbers = count * sizes.key_dim;
      const float* const own = block.state_in ? block.state_in + from : nullptr;
      for (const DeltaSaved& to : saved) {
        copy_state(own, to.state + from, numbers);
      }
      copy_state(own, block.state_out + from, numbers);
    }
    clear_padding(batch, head, first, count, row.steps);
  }

  // y is 0 at the steps that change nothing.
  void clear_padding(
      int64_t batch, int64_t head, int64_t first, int64_t count, int64_t begin) const {
    const DeltaSizes& sizes = args_.sizes;
    const int64_t bytes = element_size(args_.dtype);
    for (int64_t t = begin; t < sizes.length; ++t) {
      const int64_t at =
          ((batch * sizes.length + t) * sizes.value_heads + head) * sizes.value_dim + first;
      std::memset(static_cast<char*>(args_.y) + at * bytes, 0, static_cast<size_t>(count * bytes));
    }
  }

  const DeltaForwardArgs& args_;
  const DeltaForwardKernels& kernels_;
  std::vector<BatchRow> rows_;
};

}  // namespace

DeltaHead head_of(const DeltaArgs& args, int64_t batch, int64_t value_head) {
  const int64_t bytes = element_size(args.dtype), key_head = value_head / args.sizes.group();
  const auto gate_bytes = [&](bool is_float32) { return is_float32 ? int64_t{4} : bytes; };
  DeltaHead head{};
  head.q = element(args.q, bytes, batch, key_head);
  head.k = element(args.k, bytes, batch, key_head);
  head.v = element(args.v, bytes, batch, value_head);
  head.g = element(args.g, gate_bytes(args.g_is_float32), batch, value_head);
  head.beta = element(args.beta, gate_bytes(args.beta_is_float32), batch, value_head);
  head.skip = static_cast<const float*>(element(args.skip, 4, batch, value_head));
  head.gate = element(args.gate, bytes, batch, value_head);
  head.corrects = args.corrects;
  head.q_step = args.q.strides[1];
  head.k_step = args.k.strides[1];
  head.v_step = args.v.strides[1];
  head.g_step = args.g.strides[1];
  head.beta_step = args.beta.strides[1];
  head.skip_step = args.skip.strides[1];
  head.gate_step = args.gate.strides[1];
  head.g_is_float32 = args.g_is_float32;
  head.beta_is_float32 = args.beta_is_float32;
  head.is_per_channel = args.sizes.is_per_channel;
  head.normalizes = args.normalizes;
  head.eps = args.eps;
  head.q_scale = args.q_scale;
  head.key_dim = args.sizes.key_dim;
  head.value_dim = args.sizes.value_dim;
  return head;
}

int64_t steps_of(const DeltaArgs& args, int64_t batch) {
  const int64_t length = args.sizes.length;
  return args.lengths ? std::clamp<int64_t>(args.lengths[batch], 0, length) : length;
}

std::vector<DeltaPosition> positions_of(const DeltaArgs& args, int64_t batch) {
  const int64_t last = steps_of(args, batch) - 1;
  std::vector<DeltaPosition> positions;
  for (int64_t i = 0; i < args.sizes.positions; ++i) {
    const int64_t given = args.positions[batch * args.positions_step + i];
    positions.push_back({i, std::min(std::max<int64_t>(given, 0), last)});
  }
  std::stable_sort(positions.begin(), positions.end(),
                   [](const auto& a, const auto& b) { return a.step < b.step; });
  return positions;
}

void gated_delta_cpu(const DeltaForwardArgs& args) {
  if (args.sizes.batch * args.sizes.value_heads > 0) {
    ForwardCall(args).run();
  }
}

}  // namespace mlx_anvil
