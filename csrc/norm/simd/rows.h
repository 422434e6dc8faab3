// Block-wise access to rows for the norms' CPU kernels. For kernel files only (see simd.h).
//
// Sums run over blocks counted from the start of the row, wherever it is in memory. Results
// therefore do not depend on the alignment of operands.
#pragma once

#include <type_traits>

#include "common/simd/activations.h"
#include "common/simd/blocks.h"
#include "common/simd/prefetch.h"
#include "norm/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Hands out memory for a few rows.
template <class T>
class RowMemory {
 public:
  RowMemory(void* memory, int64_t columns) : next_(static_cast<T*>(memory)), columns_(columns) {}
  T* take() {
    T* const row = next_;
    next_ += columns_;
    return row;
  }

 private:
  T* next_;
  int64_t columns_;
};

// Iterates over the rows of an operand. Rows with a column stride other than 1 are gathered first.
template <class T>
class RowSource {
 public:
  RowSource(const NormOperand& operand, int64_t columns, RowMemory<T>& memory)
      : operand_(operand), columns_(columns) {
    if (operand.data && operand.rows.column_stride != 1) {
      gathered_ = memory.take();
    }
  }

  void move_to(int64_t row) {
    if (!operand_.data) {
      return;
    }
    row_ = at(row);
    if (gathered_) {
      for (int64_t i = 0; i < columns_; ++i) {
        gathered_[i] = row_[i * operand_.rows.column_stride];
      }
      row_ = gathered_;
    } else {
      next_ = at(row + 1);
    }
  }

  template <bool kRest>
  Block load(int64_t column) const {
    return load_columns<kRest>(row_ + column, columns_ - column);
  }

  // Prefetches a block of the next row. Memory would be idle while the current row is read again
  // from the cache.
  void prefetch_next(int64_t column) const {
    if (next_) {
      prefetch_block(next_ + column);
    }
  }

 private:
  const T* at(int64_t row) const {
    return static_cast<const T*>(operand_.data) +
           norm_row_offset(&operand_.rows, static_cast<uint32_t>(row));
  }

  const NormOperand& operand_;
  const int64_t columns_;
  T* gathered_ = nullptr;
  const T* row_ = nullptr;
  const T* next_ = nullptr;  // may point past the last row, which is harmless for a prefetch
};

// Iterates over the rows of a dense output. Streaming stores require rows that start at cache
// lines.
template <class T>
class RowSink {
 public:
  RowSink(void* data, int64_t columns, bool stream)
      : data_(static_cast<T*>(data)), columns_(columns), stream_(stream) {}

  void move_to(int64_t row) { row_ = data_ + row * columns_; }
  T* row() const { return row_; }

  template <bool kRest>
  void store(int64_t column, Block x) const {
    if (!kRest && stream_) {
      store_block<true>(row_ + column, x);
    } else {
      store_columns<kRest>(row_ + column, columns_ - column, x);
    }
  }

 private:
  T* const data_;
  const int64_t columns_;
  const bool stream_;
  T* row_ = nullptr;
};

// ---- sums and deviations of a row ---------------------------------------------------------------

inline float sum_of(Block x) {
  return lane_sum(x.first + x.second);
}

// Sums body(column, rest) over the blocks of a row, with separate sums for odd and even blocks: a
// single sum would be bound by the latency of the addition.
template <class Body>
inline Block sum_of_blocks(int64_t columns, Body body) {
  Block even = {}, odd = {};
  int64_t column = 0;
  for (; column + 2 * kBlock <= columns; column += 2 * kBlock) {
    even = even + body(column, std::false_type{});
    odd = odd + body(column + kBlock, std::false_type{});
  }
  for_each_block(column, columns, [&](int64_t last, auto rest) { even = even + body(last, rest); });
  return even + odd;
}

// 1 in valid columns, 0 beyond.
template <class T>
inline Block validity(int64_t count) {
  T ones[kBlock];
  store_block<false>(ones, Block{splat(1.0f), splat(1.0f)});
  return load_rest(ones, count);
}

// x - mean, and 0 beyond the last column, where -mean would otherwise count as a deviation.
template <class T, bool kRest>
inline Block deviation(Block x, float mean, int64_t count) {
  if constexpr (kRest) {
    return (x - mean) * validity<T>(count);
  } else {
    return x - mean;
  }
}

// ---- gates --------------------------------------------------------------------------------------

struct NoGate {};

template <class T, class Gate>
inline Block gate_of(Block x) {
  return {Gate::template value<kAccuracyOf<T>>(x.first),
          Gate::template value<kAccuracyOf<T>>(x.second)};
}

// Calls body with the activation of the gate, or NoGate. Only rms_norm has one.
template <bool kCentred, class Body>
inline void with_gate(const void* gate, bool is_sigmoid, Body body) {
  if constexpr (kCentred) {
    body(NoGate{});
  } else if (!gate) {
    body(NoGate{});
  } else if (is_sigmoid) {
    body(SigmoidActivation{});
  } else {
    body(SiluActivation{});
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
