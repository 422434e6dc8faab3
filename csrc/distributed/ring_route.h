// The way of pieces of keys and values round the ring, as one rank sees it.
#pragma once

#include <optional>

#include "distributed/ring_blocks.h"
#include "distributed/ring_relay.h"

namespace mlx_anvil {

class PieceRoute {
 public:
  PieceRoute(const char* op,
             const RingCall& call,
             const RingPlan& plan,
             const AttentionOperands& args,
             int64_t item_bytes);

  // Turns to the piece that is here after `hops`: waits for it, and begins to pass it on and to
  // receive the next one.
  void advance(int piece, int hops);

  // The keys and values of the current piece; valid only if a query of this rank needs it.
  const PieceViews& views() const { return views_; }

  // Waits for the last transfers.
  void finish() { relay_.arrive(); }

  // For other transfers, between those of the route. There are none for one rank.
  std::optional<Neighbours>& neighbours() { return neighbours_; }

 private:
  void take_own(int piece, bool travels);
  const RingPlan& plan_;
  const AttentionOperands& args_;
  const int64_t item_bytes_;
  std::optional<Neighbours> neighbours_;
  Relay relay_;
  PieceViews views_;
};

}  // namespace mlx_anvil
