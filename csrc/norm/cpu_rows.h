// Rows as the norms' CPU kernels read and write them, block by block. Kernel files only (see
// simd.h).
//
// Sums run over blocks that are counted from the start of a row, wherever that lies in memory: the
// bits of a result do not depend on where its operands are.
#pragma once

#include <type_traits>

#include "common/simd_math.h"
#include "norm/cpu_kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// body(first column, whether the block is cut short) for every block of [begin, end).
template <class Body>
inline void for_each_block(int64_t begin, int64_t end, Body body) {
  int64_t column = begin;
  for (; column + kBlock <= end; column += kBlock) {
    body(column, std::false_type{});
  }
  if (column < end) {
    body(column, std::true_type{});
  }
}

// Columns that are written past the cache together: few enough to stay in the first level until
// then.
inline constexpr int64_t kStreamColumns = 1024;

// body(begin, end) for every part of a row.
template <class Body>
inline void for_each_part(int64_t columns, Body body) {
  for (int64_t begin = 0; begin < columns; begin += kStreamColumns) {
    body(begin, begin + kStreamColumns < columns ? begin + kStreamColumns : columns);
  }
}

// body(kValue) with `value` as a constant: a loop that asks for it at every block, and has blocks
// that depend on the answer, keeps them in memory.
template <class Body>
inline void with_constant(bool value, Body body) {
  if (value) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// The last columns of a row, then zeros.
template <class T>
inline Block load_rest(const T* from, int64_t count) {
  T padded[kBlock] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load_block(padded);
}

template <class T>
inline void store_rest(T* to, int64_t count, Block x) {
  T padded[kBlock];
  store_block<false>(padded, x);
  std::memcpy(to, padded, count * sizeof(T));
}

// Memory for a few rows, given out one after the other.
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

// One row after another of an operand; a row whose columns are not neighbours is gathered first.
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
    row_ = static_cast<const T*>(operand_.data) +
           norm_row_offset(&operand_.rows, static_cast<uint32_t>(row));
    if (gathered_) {
      for (int64_t i = 0; i < columns_; ++i) {
        gathered_[i] = row_[i * operand_.rows.column_stride];
      }
      row_ = gathered_;
    }
  }

  template <bool kRest>
  Block load(int64_t column) const {
    if constexpr (kRest) {
      return load_rest(row_ + column, columns_ - column);
    } else {
      return load_block(row_ + column);
    }
  }

 private:
  const NormOperand& operand_;
  const int64_t columns_;
  T* gathered_ = nullptr;
  const T* row_ = nullptr;
};

// Copies past the cache.
template <class T>
inline void stream_row(T* to, const T* from, int64_t count) {
  constexpr int64_t kVector = sizeof(f32v) / sizeof(T);
  const int64_t misaligned = (reinterpret_cast<uintptr_t>(to) % sizeof(f32v)) / sizeof(T);
  int64_t i = misaligned == 0 ? 0 : kVector - misaligned;
  i = i < count ? i : count;
  std::memcpy(to, from, i * sizeof(T));
  for (; i + kVector <= count; i += kVector) {
    stream_bits(to + i, load_bits<f32v>(from + i));
  }
  std::memcpy(to + i, from + i, (count - i) * sizeof(T));
}

// One row after another of a dense output, part by part. Rows begin anywhere, so what goes past the
// cache is gathered first, and then has whole vectors.
template <class T>
class RowSink {
 public:
  RowSink(void* data, int64_t columns, bool stream, RowMemory<T>& memory)
      : data_(static_cast<T*>(data)), columns_(columns) {
    if (data_ && stream) {
      gathered_ = memory.take();
    }
  }

  void move_to(int64_t row) {
    row_ = data_ + row * columns_;
    first_ = 0;
  }

  template <bool kRest>
  void store(int64_t column, Block x) const {
    T* const to = gathered_ ? gathered_ + (column - first_) : row_ + column;
    if constexpr (kRest) {
      store_rest(to, columns_ - column, x);
    } else {
      store_block<false>(to, x);
    }
  }

  // After the columns of a part; the next one is gathered in the same place.
  void finish_part(int64_t begin, int64_t end) {
    if (gathered_) {
      stream_row(row_ + begin, gathered_, end - begin);
      first_ = end;
    }
  }

 private:
  T* const data_;
  const int64_t columns_;
  T* gathered_ = nullptr;
  T* row_ = nullptr;
  int64_t first_ = 0;  // column of the part that is gathered
};

// ---- arithmetic on blocks -----------------------------------------------------------------------

inline Block operator+(Block a, Block b) {
  return {a.first + b.first, a.second + b.second};
}
inline Block operator-(Block a, Block b) {
  return {a.first - b.first, a.second - b.second};
}
inline Block operator*(Block a, Block b) {
  return {a.first * b.first, a.second * b.second};
}
inline Block operator*(Block a, float b) {
  return {a.first * b, a.second * b};
}
inline Block operator-(Block a, float b) {
  return {a.first - b, a.second - b};
}

inline float sum_of(Block x) {
  return lane_sum(x.first + x.second);
}

inline f32v rounded(float, f32v x) {
  return x;
}
inline f32v rounded(f16, f32v x) {
  return widen(f16{}, narrow(f16{}, x));
}
inline f32v rounded(bf16, f32v x) {
  return bits_as<f32v>(round_to_bf16(x) & 0xffff0000u);
}

// As it would be read again after a store.
template <class T>
inline Block rounded(Block x) {
  return {rounded(T{}, x.first), rounded(T{}, x.second)};
}

template <class T>
inline Block silu(Block x) {
  return {silu<kAccuracyOf<T>>(x.first), silu<kAccuracyOf<T>>(x.second)};
}

// 1 in the columns that a row has, 0 beyond.
template <class T>
inline Block validity(int64_t count) {
  T ones[kBlock];
  store_block<false>(ones, Block{splat(1.0f), splat(1.0f)});
  return load_rest(ones, count);
}

// x - mean; 0 beyond the columns, where that would count as a deviation.
template <class T, bool kCentred, bool kRest>
inline Block deviation(Block x, float mean, int64_t count) {
  if constexpr (!kCentred) {
    return x;
  } else if constexpr (kRest) {
    return (x - mean) * validity<T>(count);
  } else {
    return x - mean;
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
