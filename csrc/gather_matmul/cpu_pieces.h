// The rows of a gathered product on the CPU, grouped by expert.
#pragma once

#include <cstdint>
#include <vector>

#include "gather_matmul/problem.h"

namespace mlx_anvil {

struct GatherRow {
  int64_t x, out;  // indices of rows of x and of the result
};

// Rows of one expert: [begin, begin + count) of GatherRows::rows.
struct GatherPiece {
  int64_t expert, begin, count;
};

// All rows, by expert, in the order of pairs. The result does not depend on threads.
struct GatherRows {
  std::vector<GatherRow> rows;
  std::vector<GatherPiece> experts;  // those with rows

  GatherRows(const GatherSizes& sizes, const GatherIds& ids);

  // Splits the rows of experts into pieces of `most` rows or less.
  std::vector<GatherPiece> pieces(int64_t most) const;

  bool same_x(const GatherPiece& a, const GatherPiece& b) const;
  // True if the piece's rows of the result are adjacent.
  bool is_run(const GatherPiece& piece) const;
  // Copies the piece's rows of `row_bytes` from x.
  void copy_x(const GatherPiece& piece, const void* x, int64_t row_bytes, void* to) const;
};

}  // namespace mlx_anvil
