// Who needs which keys: how a sequence is split over ranks, and how far each piece of keys and
// values travels.
//
// A rank's part is cut into pieces. Piece 0 of every rank goes round the ring first, one rank
// further in each step, then piece 1, and so on: a rank never holds more than a few pieces that are
// not its own. A piece stops at the last rank that needs it.
#pragma once

#include <cstdint>
#include <vector>

#include "flash_attention/problem.h"

namespace mlx_anvil {

// Rows of a part whose positions follow one another.
struct Segment {
  int64_t first;     // row in the part
  int64_t position;  // of that row in the whole sequence
  int64_t length;
};

struct RingLayout {
  int ranks = 1;
  int64_t part = 0;  // rows of each rank
  // Rank r of n has chunks r and 2n - 1 - r of 2n, in this order: with a causal mask all ranks then
  // have the same work. Otherwise it has part r of n.
  bool zigzag = false;

  bool operator==(const RingLayout&) const = default;
};

class RingPlan {
 public:
  // Of `config`, the window counts: a causal mask is one. Not `in_pieces`: a part is one piece.
  RingPlan(const RingLayout& layout,
           int rank,
           const AttentionConfig& config,
           bool in_pieces = true);

  int rank() const { return rank_; }
  int ranks() const { return layout_.ranks; }
  int pieces() const { return static_cast<int>(pieces_); }

  // The rank whose piece is at this one after `hops`.
  int source(int hops) const { return (rank_ + layout_.ranks - hops) % layout_.ranks; }

  // The segments of a rank's rows, and those of one of its pieces. At most two.
  std::vector<Segment> rows(int rank) const;
  std::vector<Segment> piece(int rank, int piece) const;

  int64_t piece_rows(int rank, int piece) const;
  // The rows of the longest piece.
  int64_t longest_piece() const;

  // True if a query of `rank` sees a key of the piece.
  bool needs(int rank, int source, int piece) const;

  // How many ranks further the piece travels.
  int hops(int source, int piece) const;

  // True if a query of one segment sees a key of the other.
  bool sees(const Segment& queries, const Segment& keys) const;

 private:
  RingLayout layout_;
  int rank_;
  int64_t left_, right_;  // the window
  int64_t pieces_;
};

// The window of a call of the attention kernels for the first `queries` and `keys` rows of two
// segments. The kernels align the last query with the last key. `simplified`: without a side of the
// window that hides nothing.
AttentionConfig config_of_block(const AttentionConfig& config,
                                int64_t query_position,
                                int64_t queries,
                                int64_t key_position,
                                int64_t keys,
                                bool simplified = true);

}  // namespace mlx_anvil
