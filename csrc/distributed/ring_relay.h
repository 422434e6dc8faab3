// Two pieces' memory, through which pieces pass: while one is sent on, the next is received.
#pragma once

#include <array>
#include <optional>

#include "distributed/neighbours.h"
#include "distributed/ring_call.h"
#include "distributed/ring_plan.h"

namespace mlx_anvil {

class Relay {
 public:
  Relay(const RingPlan& plan,
        const AttentionSizes& sizes,
        int64_t item_bytes,
        const std::array<mx::array, 2>& memory);

  // Waits for what has begun. Then memory() is that of the piece that has arrived, if one has.
  void arrive();

  // Begins to send the piece of rank `sent`, which is in memory(), and to receive that of
  // `received`. Without ranks, neither.
  void begin(std::optional<Neighbours>& neighbours,
             int piece,
             std::optional<int> sent,
             std::optional<int> received);

  void* memory() const;

 private:
  mx::array bytes_of(int slot, int source, int piece) const;

  const RingPlan& plan_;
  const AttentionSizes& sizes_;
  const int64_t item_bytes_;
  const std::array<mx::array, 2>& memory_;
  Neighbours::Pair begun_;
  bool receives_ = false;
  int slot_ = 0;
};

}  // namespace mlx_anvil
