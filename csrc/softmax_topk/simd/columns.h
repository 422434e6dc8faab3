// Processes adjacent rows side by side: lane l of a vector belongs to row l of a block. This suits
// work with few steps per row and little arithmetic. For kernel files only (see simd.h).
#pragma once

#include "common/simd/simd.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

class RowBlock {
 public:
  // `rows` is clamped to kLanes. Unused lanes repeat the last row.
  explicit RowBlock(int64_t rows) : rows_(rows < kLanes ? rows : kLanes) {}

  int64_t rows() const { return rows_; }

  // Loads element `place(lane)` of each row. Rows are `stride` elements apart.
  template <class T, class Place>
  f32v load(const T* from, int64_t stride, Place place) const {
    T some[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t row = lane < rows_ ? lane : rows_ - 1;
      some[lane] = from[row * stride + place(row)];
    }
    return load_lanes(some);
  }

  template <class T, class Place>
  void store(T* to, int64_t stride, Place place, f32v x) const {
    T some[kLanes];
    store_lanes(some, x);
    for (int64_t row = 0; row < rows_; ++row) {
      to[row * stride + place(row)] = some[row];
    }
  }

 private:
  const int64_t rows_;
};

// Calls body(block, its first row) for the rows [begin, end).
template <class Body>
inline void for_each_block_of_rows(int64_t begin, int64_t end, Body body) {
  for (int64_t row = begin; row < end; row += kLanes) {
    body(RowBlock(end - row), row);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
