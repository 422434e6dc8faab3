// Float32 rows of a result of the rank's queries, to which pieces add: the result itself, or memory
// of the call if the result has 16 bits.
#pragma once

#include <cstring>

#include "common/aligned_floats.h"
#include "common/parallel.h"
#include "distributed/simd/ring.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

class RowSums {
 public:
  RowSums(const AttentionOutput& result,
          KernelDtype dtype,
          const AttentionSizes& sizes,
          int64_t columns)
      : result_(result),
        dtype_(dtype),
        sizes_(sizes),
        columns_(columns),
        in_place_(dtype == KernelDtype::kFloat32),
        memory_(in_place_ ? 0 : sizes.batch * sizes.q_heads * sizes.q_len * columns),
        sums_(result) {
    if (!in_place_) {
      const int64_t of_head = sizes.q_len * columns;
      sums_ = {memory_.get(), {sizes.q_heads * of_head, of_head, columns, 1}};
    }
  }

  // The rows from `row` of head 0 of a batch on.
  AttentionOutput from(int64_t batch, int64_t row) const {
    AttentionOutput rows = sums_;
    rows.data = address(batch, 0, row);
    return rows;
  }

  // Calls head(batch, q_head) on several threads.
  template <class Head>
  void for_each_head(Head head) const {
    parallel_for(sizes_.batch * sizes_.q_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        head(i / sizes_.q_heads, i % sizes_.q_heads);
      }
    });
  }

  void clear() const {
    for_each_head([&](int64_t batch, int64_t head) {
      for (int64_t row = 0; row < sizes_.q_len; ++row) {
        std::memset(address(batch, head, row), 0, columns_ * sizeof(float));
      }
    });
  }

  // Stores the sums as the result.
  void store() const {
    if (in_place_) {
      return;
    }
    const auto store_rows = ring_kernels()[dtype_].store;
    for_each_head([&](int64_t batch, int64_t head) {
      const int64_t offset = batch * result_.strides[0] + head * result_.strides[1];
      store_rows(address(batch, head, 0), sizes_.q_len, columns_,
                 static_cast<char*>(result_.data) + offset * element_size(dtype_),
                 result_.strides[2]);
    });
  }

 private:
  float* address(int64_t batch, int64_t head, int64_t row) const {
    return static_cast<float*>(sums_.data) + batch * sums_.strides[0] + head * sums_.strides[1] +
           row * sums_.strides[2];
  }

  const AttentionOutput& result_;
  const KernelDtype dtype_;
  const AttentionSizes& sizes_;
  const int64_t columns_;
  const bool in_place_;
  const AlignedFloats memory_;
  AttentionOutput sums_;
};

}  // namespace mlx_anvil
