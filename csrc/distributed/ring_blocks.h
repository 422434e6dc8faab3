// A rank's queries against one piece of keys, as calls of the attention kernels.
#pragma once

#include <vector>

#include "distributed/ring_call.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// Keys and values of a piece, [batch, kv_head, row, column], or their gradients.
struct PieceViews {
  AttentionView k, v;
};

// Where a packed piece of `rows` rows keeps its keys and values.
PieceViews packed_views(const AttentionSizes& sizes, int64_t rows, void* data, int64_t item_bytes);

// Copies rows of k and v to a packed piece.
void pack_piece(const AttentionOperands& args,
                const std::vector<Segment>& segments,
                int64_t item_bytes,
                void* to);

// A view from row `first` of batch `batch` on.
AttentionView moved(const AttentionView& view, int64_t batch, int64_t first, int64_t item_bytes);

// A part of the rank's queries that sees a part of a piece's keys.
struct Block {
  int64_t batch, batches;
  int64_t query, queries;  // rows of the rank's part
  int64_t key, keys;       // rows of the piece
  AttentionConfig config;
};

// All blocks of a piece. Of sequences that end, rows past the end are in none.
std::vector<Block> blocks_of(const RingPlan& plan,
                             const AttentionOperands& args,
                             const int32_t* lengths,
                             int source,
                             int piece);

// The arguments of a block's call, but for results and what a gradient has beside.
template <class Args>
Args args_of_block(const Args& args,
                   const Block& block,
                   const PieceViews& piece,
                   int64_t item_bytes) {
  Args own = args;
  own.config = block.config;
  own.sizes.batch = block.batches;
  own.sizes.q_len = block.queries;
  own.sizes.kv_len = block.keys;
  own.q = moved(args.q, block.batch, block.query, item_bytes);
  own.k = moved(piece.k, block.batch, block.key, item_bytes);
  own.v = moved(piece.v, block.batch, block.key, item_bytes);
  own.sinks = nullptr;
  return own;
}

}  // namespace mlx_anvil
