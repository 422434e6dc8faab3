// The op function ring_attention: attention over a sequence that is split over the ranks of a
// group.
#pragma once

#include <optional>

#include "distributed/neighbours.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

inline constexpr const char* kRingAttention = "ring_attention";  // in messages

struct RingOptions {
  std::optional<Group> group;        // default: all ranks
  AttentionOptions attention;        // scale, mask ("causal" or none), sinks, window, softcap
  std::optional<mx::array> lengths;  // [batch]: of the whole sequences
  bool zigzag = false;
  bool return_lse = false;
};

// What a call is, but for its arrays.
struct RingConfig {
  Group group;
  AttentionConfig attention;
  bool zigzag = false;
  bool has_lengths = false;

  bool operator==(const RingConfig& other) const {
    return group.raw_group() == other.group.raw_group() && attention == other.attention &&
           zigzag == other.zigzag && has_lengths == other.has_lengths;
  }
};

// The arrays of a checked call: the rank's part.
struct RingInputs {
  mx::array q, k, v;
  std::optional<mx::array> sinks;    // float32 [batch or 1, q_heads]
  std::optional<mx::array> lengths;  // int32 [batch]
};

AttentionResult ring_attention(const mx::array& q,
                               const mx::array& k,
                               const mx::array& v,
                               const RingOptions& options,
                               mx::StreamOrDevice stream);

}  // namespace mlx_anvil
