// What the kernels of int_plain_gemv.cpp share: the walk over bands and blocks of a strip, the
// factors of a band, prefetching, and the sums. For kernel files only, and only on machines with
// VNNI.
#pragma once

#include <algorithm>

#include "quantized_matmul/simd/int_factors.h"
#include "quantized_matmul/simd/int_interleave.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Base of a Kernel, which has `template <bool kWhole> void multiply_block(n, rows, block)`: it adds
// the products of rows [n, n + rows) in a block of the strip. kWhole is the result of is_whole().
//
// kByGroups is the layout of the factors (BandFactors). With kSkips, blocks start at cache lines,
// so that the columns of a block may belong to the current and to the previous factors.
template <class Kernel, class Format, int kPieces, int kRows, bool kByGroups, bool kSkips>
class IntPlainStrip {
 public:
  explicit IntPlainStrip(const QuantizedPlainGemvArgs& args)
      : args_(args),
        row_bytes_(args.matrix.columns * Format::kBits / 8),
        skipped_bytes_(skipped_columns(args.matrix) * Format::kBits / 8),
        group_shift_(__builtin_ctz(static_cast<unsigned>(args.matrix.format.group))) {
    if constexpr (kSkips) {
      std::fill_n(factors_, 2, Factors{});  // see read_factors()
    }
  }

  // Aligns blocks to cache lines if a block is one line. Otherwise two blocks share a line, and by
  // the time the second needs it, L1 has evicted it.
  static int64_t skipped_columns(const QuantizedMatrixView& matrix) {
    const bool rows_alike = matrix.columns * Format::kBits / 8 % 64 == 0;
    const uintptr_t w = reinterpret_cast<uintptr_t>(matrix.weights.w);
    return kSkips && rows_alike && w % 8 == 0 ? static_cast<int64_t>(w % 64) * 8 / Format::kBits
                                              : 0;
  }

  // Reorders a row of sums into the order of columns.
  static void put_in_order(float* row, int64_t blocks) {
    constexpr int64_t kCount = Codes::template kOrdered<kByGroups>;
    for (float* at = row; at < row + blocks * Codes::kColumns; at += kCount) {
      float vectors[kCount];
      std::memcpy(vectors, at, sizeof(vectors));
      Codes::template store_in_order<kByGroups>(vectors, at);
    }
  }

  // Returns false if a value is not finite.
  bool run() {
    for (int64_t i = 0; i < kRows * row_step(); i += kLanes) {
      store_lanes(args_.out + i, f32v{});
    }
    for (int64_t n = 0; n < args_.count; n += kBandRows) {
      const int64_t rows = args_.count - n < kBandRows ? args_.count - n : kBandRows;
      const bool last = n + kBandRows >= args_.count;
      ahead_ = last ? at(args_.next - args_.first, args_.next_block)
                    : at(n + kBandRows, args_.first_block);
      ahead_bytes_ = 0;
      for (int64_t block = 0; block < args_.blocks; ++block) {
        if (block % blocks_at_once() == 0 && !read_factors(n, rows, args_.first_block + block)) {
          return false;
        }
        if (is_whole(args_.first_block + block)) {
          kernel().template multiply_block<true>(n, rows, block);
        } else {
          kernel().template multiply_block<false>(n, rows, block);
        }
      }
    }
    return true;
  }

 protected:
  using Codes = RowBytes<Format>;
  using Factors = BandFactors<kPieces, kRows, kByGroups>;
  static constexpr int kVectors = Codes::kVectors;

  int64_t row_step() const { return args_.blocks * Codes::kColumns; }

  // Blocks that span one vector of groups. With skipped columns, the first of them also has columns
  // of the previous group.
  int64_t blocks_at_once() const { return (int64_t{kLanes} << group_shift_) / Codes::kColumns; }

  // First byte of a block in its row. Negative if the block starts before the row.
  int64_t first_byte(int64_t block) const { return block * Codes::kBlockBytes - skipped_bytes_; }
  int64_t first_column(int64_t block) const { return first_byte(block) * 8 / Format::kBits; }

  const char* at(int64_t n, int64_t block) const {
    return reinterpret_cast<const char*>(args_.matrix.weights.w) + (args_.first + n) * row_bytes_ +
           first_byte(block);
  }

  // Reads the factors of blocks_at_once() blocks from `block` on. Returns false if a value is not
  // finite.
  bool read_factors(int64_t n, int64_t rows, int64_t block) {
    first_group_ = block * Codes::kColumns >> group_shift_;
    if (skipped_bytes_ > 0) {
      if (block > 0 && block == args_.first_block &&
          !factors_[now_].read(args_, n, rows, first_group_ - kLanes, Format::kOffset)) {
        return false;
      }
      now_ = 1 - now_;
    }
    // The last block may have columns of the previous group only. Columns past the row then use
    // stale factors or zeros, and their results are not stored.
    return first_group_ << group_shift_ >= args_.matrix.columns ||
           factors_[now_].read(args_, n, rows, first_group_, Format::kOffset);
  }

  // First column of a block, relative to factors_[now_]. Columns below 0 use the previous factors.
  int64_t column_of_factors(int64_t block) const {
    return first_column(block) - (first_group_ << group_shift_);
  }

  // True if the block lies within these factors and within the row.
  bool is_whole(int64_t block) const {
    return column_of_factors(block) >= 0 && row_bytes_ - first_byte(block) >= Codes::kBlockBytes;
  }

  // Prefetches some of the next band: as many bytes as a quad of a block, row by row along the
  // strip, since DRAM delivers adjacent lines fastest.
  void prefetch_some() {
    for (int64_t end = ahead_bytes_ + 4 * Codes::kBlockBytes; ahead_bytes_ < end;
         ahead_bytes_ += 64) {
      __builtin_prefetch(ahead_ + ahead_bytes_, 0, 2);
    }
    if (ahead_bytes_ >= args_.blocks * Codes::kBlockBytes) {
      ahead_ += row_bytes_;
      ahead_bytes_ = 0;
    }
  }

  // Adds the sums of a band to the totals of a vector of columns, for row m of x. Per-group
  // arguments are scalars or vectors.
  template <class Sum, class Number>
  MLX_ANVIL_UNROLLED void add_sums(int64_t block,
                                   int vector,
                                   int m,
                                   const i32v* sums,
                                   Sum sum_of_x,
                                   Number exponent,
                                   Number shift) {
    i32v pieces[kPieces];
    for (int p = 0; p < kPieces; ++p) {
      pieces[p] = sums[p];
    }
    const f32v sum = in_floats<Format, kBandRows>(pieces, Format::kOffset, sum_of_x);
    float* const total = args_.out + m * row_step() + block * Codes::kColumns + vector * kLanes;
    const f32v product = times_power(sum, f32v{} + exponent);
    store_lanes(total, load_lanes(total) + (product * (Format::kFactor / Factors::kScale) + shift));
  }

  const QuantizedPlainGemvArgs& args_;
  const int64_t row_bytes_, skipped_bytes_;
  const int group_shift_;
  int64_t first_group_ = 0;  // of factors_[now_]
  int now_ = 0;
  Factors factors_[kSkips ? 2 : 1];  // current and previous factors

 private:
  Kernel& kernel() { return static_cast<Kernel&>(*this); }

  const char* ahead_ = nullptr;  // a row of the next band
  int64_t ahead_bytes_ = 0;
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
