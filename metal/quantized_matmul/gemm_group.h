// Tiles of x W^T for products of four SIMD groups (metal/common/group_product.h).
//
// Tiles of w and x pass through threadgroup memory as in gemm_matrix.h, those of x as the products
// read them. A SIMD group has 16 rows of w, the left operand. It unpacks the weights of 32 columns
// while those of the 32 before are multiplied.
#pragma once

#include "metal/common/group_product.h"
#include "metal/quantized_matmul/gemm_matrix.h"
#include "metal/quantized_matmul/gemm_pairs.h"

// 4 * kGroups SIMD groups, and kXRows rows of x. With two matrices, each has eight rows of a SIMD
// group.
template <typename T, typename Format, int kXRows, int kGroups, int kMatrices = 1>
struct GroupGemmTile : GemmTile<T, Format, kXRows / 8, 2, 4 * kGroups, 1, kMatrices> {
  using Base = GemmTile<T, Format, kXRows / 8, 2, 4 * kGroups, 1, kMatrices>;
  using Factors = typename Base::Factors;
  using XTile = SwizzledTile<T, kXRows, 128>;
  enum { kPart = 32, kParts = 4 };  // columns that are unpacked at a time; parts per step
  using Weights = RegTile<T, 16, kPart>;
  enum { kBits = Format::kBits, kStage = Base::kStage, kThreads = Base::kThreads };
  static_assert(Base::kXBegin * 16 % 1024 == 0 && kStage * 16 % 1024 == 0, "panels are aligned");

  enum { kRowsAtOnce = kThreads / 16 };  // of x, in vectors
  static_assert(kRowsAtOnce % 8 == 0, "the rows of a thread are swizzled alike");
  static_assert(kThreads == 2 * Base::kOutputs, "a thread copies the scales or biases of a row");

  // What a lane needs to unpack 32 columns of its two rows.
  struct Codes {
    uint words[2][kBits];
  };
  struct StepFactors {
    uint4 rows[2];  // in its first half scales, in its second biases
  };

  GemmPairs<kBits> order;
  const device uint4* own_x;        // the thread's first vector
  int rows_of_x;                    // from there
  const device uchar* own_factors;  // the thread's first

  METAL_FUNC void start(uint lane_in_row) thread {
    const uint row = this->copier / 16, output = this->copier / 2;
    order.start(lane_in_row);
    own_x = this->x + (metal::min(row, this->last_row) * this->row_x + this->copier % 16);
    rows_of_x = int(this->last_row) - int(row);
    own_factors = (this->copier % 2 == 0
                       ? reinterpret_cast<const device uchar*>(of_row(this->scales, output))
                       : reinterpret_cast<const device uchar*>(of_row(this->biases, output))) +
                  ulong(this->row_of_matrix(output)) * factor_row_bytes();
  }

  // Starts the share of part `part` in the copies of a step.
  METAL_FUNC void start_copies(threadgroup uint4* stage, uint step, int part) const thread {
    enum { kRowsOfPart = kXRows / kParts };
    static_assert(kRowsOfPart % kRowsAtOnce == 0, "equal shares");
    if (part == 0) {
      Base::start_word_copies(stage, step);
      start_factor_copies(stage, step);
    }
    const uint unit = this->copier % 16;
    threadgroup T* const to = reinterpret_cast<threadgroup T*>(stage + Base::kXBegin) +
                              XTile::unit_at(this->copier / 16, 8 * unit);
    const device uint4* const from = own_x + 16 * step;
    MLX_ANVIL_UNROLL
    for (int first = part * kRowsOfPart; first < (part + 1) * kRowsOfPart; first += kRowsAtOnce) {
      const bool exists = first <= rows_of_x && (steps_are_whole || 16 * step + unit < this->row_x);
      start_copy(reinterpret_cast<threadgroup uint4*>(to + first * XTile::kPanelColumns),
                 exists ? from + first * this->row_x : own_x, exists);
    }
  }

  METAL_FUNC void fetch_factors(const threadgroup uint4* stage,
                                thread StepFactors& factors) const thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < 2; ++f) {
      const threadgroup uint* const row = reinterpret_cast<const threadgroup uint*>(
          stage + Base::kFactorsBegin + own_row() + 8 * f);
      const bool two = copied_factors() * sizeof(typename Base::Scale) == 8;  // words of each
      factors.rows[f] = uint4(row[0], two ? row[1] : 0, Factors::kArrays == 2 ? row[2] : 0,
                              Factors::kArrays == 2 && two ? row[3] : 0);
    }
  }

  METAL_FUNC void fetch_codes(const threadgroup uint4* stage,
                              int part,
                              thread Codes& codes) const thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < 2; ++f) {
      load(stage + (own_row() + 8 * f) * Base::kStride, part, codes.words[f]);
    }
  }

  // Unpacks part `part` of a step, of which `left` columns are left in the matrix.
  METAL_FUNC void unpack(const thread Codes& codes,
                         const thread StepFactors& of_step,
                         uint step,
                         int part,
                         uint left,
                         thread Weights& to) const thread {
    const bool exists = steps_are_whole || uint(kPart * part) < left;
    MLX_ANVIL_UNROLL
    for (int f = 0; f < 2; ++f) {
      uint pairs[4];
      order.pairs(codes.words[f], pairs);
      Factors by = factors(of_step.rows[f], step, kPart * part, exists);
      see_nan(codes.words[f], by);
      if (metal::is_same_v<Format, Nvfp4Format>) {
        uint last[4] = {pairs[2], pairs[3], 0, 0};
        scale_codes<T>(by, this->magic, pairs);
        scale_codes<T>(factors(of_step.rows[f], step, kPart * part + 16, exists), this->magic,
                       last);
        pairs[2] = last[0];
        pairs[3] = last[1];
      } else {
        scale_codes<T>(by, this->magic, pairs);
      }
      MLX_ANVIL_UNROLL
      for (int u = 0; u < 4; ++u) {
        to.fragments[f][u] = fragment_of_pair<T>(pairs[u]);
      }
    }
  }

  template <int kIndex>
  using Right = TransposedSwizzledOperand<T,
                                          kXRows,
                                          XTile::kPanelColumns,
                                          kIndex * kPart % XTile::kPanelColumns>;

  template <int kIndex>
  METAL_FUNC Right<kIndex> part_of_x(const threadgroup uint4* stage) const thread {
    return {reinterpret_cast<const threadgroup T*>(stage + Base::kXBegin) +
                kIndex * kPart / XTile::kPanelColumns * XTile::kPanel,
            this->place};
  }

 private:
  METAL_FUNC void load(const threadgroup uint4* row,
                       int part,
                       thread uint (&words)[kBits]) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBits; i += 4) {
      if (kBits % 4 == 0) {
        const uint4 four = row[Base::swizzled(this->place.row, (kBits * part + i) / 4)];
        MLX_ANVIL_UNROLL
        for (int j = 0; j < 4; ++j) {
          words[(i + j) % kBits] = four[j];
        }
      } else {
        MLX_ANVIL_UNROLL
        for (int j = i; j < i + 4 && j < kBits; ++j) {
          words[j] = reinterpret_cast<const threadgroup uint*>(row)[kBits * part + j];
        }
      }
    }
  }

  // The array of the matrix that has this row of the tile.
  template <typename Pointer>
  METAL_FUNC static Pointer of_row(const thread Pointer (&arrays)[kMatrices], uint row) {
    return Base::is_of_last(row) ? arrays[kMatrices - 1] : arrays[0];
  }

  METAL_FUNC uint own_row() const thread { return 16 * this->across + uint(this->place.row); }
  METAL_FUNC uint factor_row_bytes() const thread {
    return this->row_groups * sizeof(typename Base::Scale);
  }
  // Per row and step. A copy has four bytes at least: where a step has one factor of two bytes,
  // that of another step comes with it.
  METAL_FUNC uint copied_factors() const thread {
    return metal::max(Base::factors_per_step(), uint(4 / sizeof(typename Base::Scale)));
  }

  METAL_FUNC void start_factor_copies(threadgroup uint4* stage, uint step) const thread {
    const uint bytes = copied_factors() * sizeof(typename Base::Scale);
    const uint begin =
        step * Base::factors_per_step() * sizeof(typename Base::Scale) & ~(bytes - 1);
    if (Factors::kArrays == 1 && this->copier % 2 != 0) {
      return;
    }
    threadgroup uint2* const to =
        reinterpret_cast<threadgroup uint2*>(stage + Base::kFactorsBegin) + this->copier;
    if (this->factor_bytes == 8) {
      start_copy(to, reinterpret_cast<const device uint2*>(
                         own_factors + metal::min(begin, factor_row_bytes() - 8)));
      return;
    }
    MLX_ANVIL_UNROLL
    for (uint i = 0; i < 8; i += 4) {
      if (i < bytes) {
        start_copy(reinterpret_cast<threadgroup uint*>(to) + i / 4,
                   reinterpret_cast<const device uint*>(
                       own_factors + metal::min(begin + i, factor_row_bytes() - 4)));
      }
    }
  }

  // Those of the group of column `column` of the step, or zeros.
  METAL_FUNC Factors factors(uint4 row, uint step, uint column, bool exists) const thread {
    const uint group = (uint(Base::kColumns) * step + column) >> this->group_shift;
    Factors found;
    found.take(row.xy, row.zw, group & (copied_factors() - 1));
    if (!exists) {
      found.clear();
    }
    return found;
  }
};

// What a SIMD group has in registers: of w, what it will unpack next, and what is being multiplied.
template <typename Tile>
struct GroupGemmState {
  typename Tile::Codes codes;
  typename Tile::StepFactors factors;
  typename Tile::Weights weights[Tile::kParts];
  typename Tile::Sums sums;

  // Starts the product of part kIndex of a step, and loads codes of the part after it.
  template <int kIndex>
  METAL_FUNC void start_part(const thread Tile& tile,
                             const threadgroup uint4* stage,
                             const threadgroup uint4* next_stage,
                             uint step,
                             uint left) thread {
    tile.unpack(codes, factors, step, kIndex, left, weights[kIndex]);
    if (kIndex + 1 < int(Tile::kParts)) {
      tile.fetch_codes(stage, kIndex + 1, codes);
    } else {
      tile.fetch_codes(next_stage, 0, codes);
      tile.fetch_factors(next_stage, factors);
    }
    start_product(sums, weights[kIndex], tile.template part_of_x<kIndex>(stage), true);
  }
};

// Sums of the steps from `begin` on, up to `end` or the last of all columns. There is at least one.
template <int kStages, typename Tile>
METAL_FUNC void add_group_steps(const thread Tile& tile,
                                threadgroup uint4* memory,
                                uint begin,
                                uint end,
                                uint columns,
                                thread typename Tile::Sums& sums) {
  end = metal::min((columns + Tile::kColumns - 1) / Tile::kColumns, end);
  MLX_ANVIL_UNROLL
  for (int s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) {
      MLX_ANVIL_UNROLL
      for (int part = 0; part < Tile::kParts; ++part) {
        tile.start_copies(memory + s * Tile::kStage, begin + s, part);
      }
    }
    end_copies();
  }
  GroupGemmState<Tile> state;
  state.sums.zero();
  wait_for_tiles<kStages - 2>();
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  tile.fetch_codes(memory, 0, state.codes);
  tile.fetch_factors(memory, state.factors);
  uint place_of_step = 0, step = begin;
  // A loop that may be skipped would end with products that may not be running: ptxas would wait
  // for each where it starts.
  MLX_ANVIL_NO_UNROLL
  do {
    const threadgroup uint4* const stage = memory + place_of_step * Tile::kStage;
    threadgroup uint4* const free =
        memory + (place_of_step == 0 ? kStages - 1 : place_of_step - 1) * Tile::kStage;
    place_of_step = place_of_step == kStages - 1 ? 0 : place_of_step + 1;
    const threadgroup uint4* const next_stage =
        step + 1 < end ? memory + place_of_step * Tile::kStage : stage;
    const uint left = columns - step * Tile::kColumns, copied = step + kStages - 1;
    state.template start_part<0>(tile, stage, next_stage, step, left);
    wait_for_products<1>();
    // All products with the step before are complete, so its place is free.
    wait_for_tiles<kStages - 3>();
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (copied < end) {
      tile.start_copies(free, copied, 0);
      tile.start_copies(free, copied, 1);
    }
    state.template start_part<1>(tile, stage, next_stage, step, left);
    if (copied < end) {
      tile.start_copies(free, copied, 2);
    }
    state.template start_part<2>(tile, stage, next_stage, step, left);
    if (copied < end) {
      tile.start_copies(free, copied, 3);
    }
    end_copies();
    state.template start_part<3>(tile, stage, next_stage, step, left);
    wait_for_products<1>();
  } while (++step < end);
  wait_for_products<0>(state.sums);
  sums = state.sums;
}
