#include "distributed/ring_agreement.h"

#include <algorithm>
#include <bit>
#include <string>

#include "common/errors.h"

namespace mlx_anvil {

namespace {

struct Fact {
  const char* name;
  int64_t value;
};

constexpr int kFacts = 16;
using Facts = Fact[kFacts];

constexpr int64_t kMark = 0x416e76696c52696e;  // no other message begins like this

int64_t bits(float x) {
  return std::bit_cast<int32_t>(x);
}

void set_facts(Facts& facts, const RingCall& call, const AttentionOperands& args, int64_t pieces) {
  const AttentionSizes& sizes = args.sizes;
  const AttentionConfig& config = args.config;
  const Fact all[] = {
      {"the call", kMark},
      {"the batch", sizes.batch},
      {"heads of q", sizes.q_heads},
      {"heads of k", sizes.kv_heads},
      {"the length", sizes.q_len},
      {"the head_dim", sizes.head_dim},
      {"the head_dim of v", sizes.v_head_dim},
      {"the dtype", static_cast<int64_t>(args.dtype)},
      {"the layout", call.layout.zigzag},
      {"mask or window_size (left)", config.window_left},
      {"mask or window_size (right)", config.window_right},
      {"softcap", bits(config.softcap)},
      {"scale", bits(config.scale)},
      {"sinks", config.has_sinks},
      {"lengths", call.lengths != nullptr},
      {"the pass (result or gradients), or pieces", pieces * 2 + call.with_gradients},
  };
  static_assert(std::size(all) == kFacts);
  std::copy(std::begin(all), std::end(all), facts);
}

bool is_size(int fact) {
  return 1 <= fact && fact <= 6;
}

}  // namespace

int64_t agreement_bytes() {
  return kFacts * static_cast<int64_t>(sizeof(int64_t));
}

void require_agreement(Neighbours& neighbours,
                       const char* op,
                       const RingCall& call,
                       const AttentionOperands& args,
                       int64_t pieces) {
  Facts facts;
  set_facts(facts, call, args, pieces);
  mx::array ours = call.told[0], theirs = call.told[1];
  int64_t* const told = ours.data<int64_t>();
  for (int i = 0; i < kFacts; ++i) {
    told[i] = facts[i].value;
  }
  Neighbours::Pair pair = neighbours.begin(&ours, &theirs);
  pair.received.wait();
  pair.sent.wait();
  const int64_t* const heard = theirs.data<int64_t>();
  for (int i = 0; i < kFacts; ++i) {
    if (heard[i] != told[i]) {
      const std::string left = std::to_string(left_of(call.group));
      std::string text = "rank " + std::to_string(call.group.rank()) + " and rank " + left +
                         " do not make the same call: " + facts[i].name + " differs";
      if (is_size(i)) {
        text += ", " + std::to_string(told[i]) + " and " + std::to_string(heard[i]);
      }
      throw_internal_error(op, text + "; allowed: the same shapes and options on all ranks.");
    }
  }
}

}  // namespace mlx_anvil
