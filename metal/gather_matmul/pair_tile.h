// What a threadgroup multiplies: a few rows of x, and the matrix of one expert.
#pragma once

#include "metal/gather_matmul/params.h"
#include "metal/quantized_matmul/dequant.h"

// True if tiles are runs of pairs with one expert, from the table of gather_table. Pair p then has
// row p of x. False: tiles are rows of one pair.
constant bool pairs_are_in_table [[function_constant(6)]];

// True if each pair has one row.
constant bool pairs_have_one_row [[function_constant(7)]];

// True if lhs has the matrices of x. Otherwise as many pairs in a row share each.
constant bool lefts_are_given [[function_constant(8)]];

// The matrix that an id means. Negative ids count from the end; others out of range mean the first
// or the last matrix.
METAL_FUNC int matrix_of(int id, int count) {
  return metal::clamp(id < 0 ? id + count : id, 0, count - 1);
}

// Arrays that say which tiles there are.
struct PairArrays {
  const device int* lhs;
  const device int* rhs;
  const device int2* table;
};

struct PairTile {
  uint expert;
  uint x_row;  // the first, over all matrices of x
  uint out_row;
  int rows;  // 0: there is no such tile
};

// Returns tile `index`. `most_rows` is what a tile has at most.
METAL_FUNC PairTile pair_tile(uint index,
                              uint most_rows,
                              PairArrays arrays,
                              constant GatherParams& params) {
  if (pairs_are_in_table) {
    const int2 own = arrays.table[index], next = arrays.table[index + 1];
    return {uint(own.x), uint(own.y), uint(own.y), next.y - own.y};
  }
  if (index >= uint(params.tiles)) {
    return {0, 0, 0, 0};
  }
  const uint rows = params.product.rows, blocks = params.row_blocks;
  const uint pair = pairs_have_one_row ? index : index / blocks;
  const uint first = pairs_have_one_row ? 0 : most_rows * (index - pair * blocks);
  const uint left = lefts_are_given ? uint(matrix_of(arrays.lhs[pair], params.lefts))
                                    : pair / uint(params.pairs_per_left);
  return {uint(matrix_of(arrays.rhs[pair], params.experts)), left * rows + first,
          pair * rows + first, int(metal::min(most_rows, rows - first))};
}

// Row 0 of an expert's matrix.
template <typename T, typename Format>
METAL_FUNC WeightRow<T, Format> matrix_of_expert(WeightRow<T, Format> first,
                                                 uint expert,
                                                 constant QuantizedParams& params) {
  return weight_row<T, Format>(first, long(expert) * params.outputs, params.columns,
                               params.group_shift);
}

// The tiles of a threadgroup: every params.tiles-th. It has more than one only if pairs in the
// table are not sorted.
class TileLoop {
 public:
  PairTile tile;

  METAL_FUNC TileLoop(uint3 group, uint3 groups) thread : index_(group.z* groups.y + group.y) {}

  // Moves on to the next tile. Returns false if there is none. All threads call it.
  METAL_FUNC bool next(uint most_rows, PairArrays arrays, constant GatherParams& params) thread {
    const bool is_first = index_ < uint(params.tiles);
    if (!is_first && !pairs_are_in_table) {
      return false;
    }
    tile = pair_tile(index_, most_rows, arrays, params);
    if (tile.rows == 0) {
      return false;
    }
    if (!is_first) {
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // all are done with the last tile
    }
    index_ += params.tiles;
    return true;
  }

  // The tile again, for a loop that has no registers for it while it multiplies.
  METAL_FUNC PairTile read_again(uint most_rows,
                                 PairArrays arrays,
                                 constant GatherParams& params) const thread {
    return pair_tile(index_ - params.tiles, most_rows, arrays, params);
  }

 private:
  uint index_;
};
