// The way of pieces of keys and values round the ring, as one rank sees it.
#pragma once

#include <optional>

#include "distributed/ring_blocks.h"

namespace mlx_anvil {

// An array of `bytes` in the memory of `memory`, of rows that have equal sizes.
mx::array bytes_of(const mx::array& memory, int64_t rows, int64_t bytes);

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

  // Of the current piece, if a query of this rank needs it.
  const PieceViews& views() const { return views_; }

  // Waits for the last transfers.
  void finish();

  // For other transfers, between those of the route. There is none for one rank.
  Neighbours& neighbours() { return *neighbours_; }

 private:
  void take_own(int piece, bool travels);
  mx::array memory_of(int slot, int source, int piece) const;

  const RingCall& call_;
  const RingPlan& plan_;
  const AttentionOperands& args_;
  const int64_t item_bytes_;
  std::optional<Neighbours> neighbours_;
  Neighbours::Pair begun_;
  bool receives_ = false;
  int slot_ = 0;
  PieceViews views_;
};

}  // namespace mlx_anvil
