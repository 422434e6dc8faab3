// Products of up to 8 rows of x with 4-bit rows of w on matrix units of 16-bit types. Eight rows of
// x then cost little more than one.
//
// Columns are assigned to fragments so that a lane's two elements are codes i and i + 4 of one
// word, which a single mask extracts, and so that a group is a whole number of fragments. Groups
// are summed before their scale is applied. All rows of x take the same steps, whatever their
// number. A lane reads words of w and the matching columns of x; lanes exchange neither.
//
// The simdgroups of a threadgroup split the columns of its tile of rows of w. Each prefetches its
// next step into threadgroup memory while it computes, across tiles too. That hides memory latency
// and costs no registers.
//
//   for each step of 256 columns of this simdgroup:
//     start copying the next step; wait for this one
//     for each group: x.sums += ones * x; sums += codes * x         (matrix units)
//       totals += scale * sums + bias * x.sums
#pragma once

#include "metal/common/tile.h"
#include "metal/quantized_matmul/gemv_stage.h"

// Encodes codes as 16-bit floats: OR-ing kBits to a code gives (code + offset) / factor. With two
// places, the code may also stand four bits higher; it is then 16 times as large. one() is what x
// is multiplied by for its sums. Totals are in units; coefficients() makes them so from the scale
// and bias of a group: x of the sum of codes, y of the sum of x.
template <typename T>
struct SmallCode;

// A subnormal half is an integer times 2^-24.
template <>
struct SmallCode<half> {
  enum { kBits = 0, kPlaces = 2 };
  METAL_FUNC static half one() { return half(1.0f); }
  METAL_FUNC static float unit() { return 1.0f; }
  METAL_FUNC static float2 coefficients(float scale, float bias) {
    return float2(0x1p24f * scale, bias);
  }
};

// Subnormals of bfloat16 are too small for that (2^-133). From 2^-9 on, adjacent values differ by
// 2^-16, so a code in the lowest mantissa bits of 2^-9 gives (128 + code) * 2^-16. Neither these
// sums nor those of x times 2^-16 can overflow, since a group has at most 128 columns.
template <>
struct SmallCode<bfloat> {
  enum { kBits = 0x3b003b00, kPlaces = 1 };
  METAL_FUNC static bfloat one() { return bfloat(0x1p-16f); }
  METAL_FUNC static float unit() { return 0x1p16f; }
  METAL_FUNC static float2 coefficients(float scale, float bias) {
    return float2(scale, metal::fma(-128.0f, scale, bias));
  }
};

// Adds run-time zeros to constants, so that they stay in registers. In PTX, a literal, or one
// register in several places of an operand, is moved into place for every product.
template <typename T>
struct Constants {
  uint ones[4];  // each holds two numbers
  uint codes;    // mask of two codes

  METAL_FUNC Constants(uint4 zeros) thread {
    const uint mask = 0x000f000fu;  // as the only operand it is an immediate
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      ones[i] = as_type<uint>(Pair<T>(SmallCode<T>::one(), SmallCode<T>::one())) + zeros[i];
    }
    codes = SmallCode<T>::kBits == 0 ? mask : mask + zeros[3];
  }
};

// Pairs up elements 0 and 4, 1 and 5, 2 and 6, 3 and 7 of eight contiguous elements.
template <typename T>
METAL_FUNC uint4 pairs_of(uint4 eight) {
  uint4 pairs;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Pair<T> low = as_type<Pair<T>>(eight[i / 2]);
    const Pair<T> high = as_type<Pair<T>>(eight[i / 2 + 2]);
    pairs[i] = as_type<uint>(Pair<T>(low[i % 2], high[i % 2]));
  }
  return pairs;
}

// The part of x that belongs to one group of columns.
template <typename T, int kWords>
struct GroupOfX {
  uint4 pairs[kWords];
  // For rows place.column and place.column + 1. Computed twice, for two fragments of w, because a
  // product of two fragments fills the matrix unit.
  float2 sums[2];

  METAL_FUNC Fragment<T> columns(int word, int code, FragmentPlace place) const thread {
    const Pair<T> pair = as_type<Pair<T>>(pairs[word][code]);
    return transposed(fragment_of<T>(pair.x, pair.y), place);
  }

  METAL_FUNC void add_up(FragmentPlace place, Constants<T> constants) thread {
    Fragment<float> totals[2] = {fragment_of<float>(0.0f, 0.0f), fragment_of<float>(0.0f, 0.0f)};
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4 * kWords; ++i) {
      const Fragment<T> x = columns(i % kWords, i / kWords, place);
      MLX_ANVIL_UNROLL
      for (int f = 0; f < 2; ++f) {
        const Pair<T> ones = as_type<Pair<T>>(constants.ones[2 * (i % 2) + f]);
        metal::simdgroup_multiply_accumulate(totals[f], fragment_of<T>(ones.x, ones.y), x,
                                             totals[f]);
      }
    }
    sums[0] = elements_of(totals[0]);
    sums[1] = elements_of(totals[1]);
  }
};

template <typename T, int kGroup, int kFragments>
struct GemvMatrixSums {
  // kWords: a lane's words of a group.
  enum { kGroups = kMatrixColumns / kGroup, kWords = kGroup / 32, kPlaces = SmallCode<T>::kPlaces };
  using Stage = MatrixStage<T, kGroup, kFragments>;

  FragmentPlace place;
  // For row place.row of w in each fragment, and rows place.column and place.column + 1 of x. In
  // units of SmallCode<T>::unit().
  float2 totals[kFragments];

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      totals[f] = float2(0.0f);
    }
  }

  // Accumulates one step, which is in `stage`. Rows of x that do not exist have sums that are not
  // stored.
  template <typename Copies>
  METAL_FUNC void add(threadgroup uint4* stage,
                      uint step,
                      const thread Copies& copies,
                      Constants<T> constants) thread {
    using Factors = typename Stage::Factors;
    Factors factors[kFragments][2];  // scales, biases
    MLX_ANVIL_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const int vector = g / Stage::kFactorSize, i = g % Stage::kFactorSize;
      // Else loads of several small groups are moved up to here, and their registers spill.
      if (kGroup == 32 && g > 0) {
        metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      }
      if (i == 0) {
        MLX_ANVIL_UNROLL
        for (int f = 0; f < kFragments; ++f) {
          const threadgroup Factors* from = Stage::factors(stage, 8 * f + place.row) + vector;
          factors[f][0] = from[0];
          factors[f][1] = from[Stage::kFactorVectors];
        }
      }
      uint words[kFragments][kWords];
      T scales[kFragments], biases[kFragments];
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        load_staged(Stage::words(stage, 8 * f + place.row, first_word(g)), words[f]);
        scales[f] = factors[f][0][i];
        biases[f] = factors[f][1][i];
      }
      GroupOfX<T, kWords> group;
      MLX_ANVIL_UNROLL
      for (int word = 0; word < kWords; ++word) {
        group.pairs[word] = pairs_of<T>(copies.x(stage, step, place.row, first_word(g) + word));
      }
      group.add_up(place, constants);
      add_group(words, scales, biases, group, constants);
    }
  }

 private:
  // First of this lane's words of group g in a row, and of its vectors of x.
  METAL_FUNC int first_word(int g) const thread {
    return g * (kGroup / 8) + place.column / 2 * kWords;
  }

  METAL_FUNC static void load_staged(const threadgroup uint* from, thread uint (&words)[kWords]) {
    using Words = metal::vec<uint, kWords == 1 ? 2 : int(kWords)>;
    if (kWords == 1) {
      words[0] = from[0];
      return;
    }
    const Words vector = *reinterpret_cast<const threadgroup Words*>(from);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWords; ++i) {
      words[i] = vector[i];
    }
  }

  METAL_FUNC void add_group(const thread uint (&words)[kFragments][kWords],
                            const thread T (&scales)[kFragments],
                            const thread T (&biases)[kFragments],
                            GroupOfX<T, kWords> x,
                            Constants<T> constants) thread {
    Fragment<float> sums[kPlaces][kFragments];
    MLX_ANVIL_UNROLL
    for (int p = 0; p < kPlaces; ++p) {
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        sums[p][f] = fragment_of<float>(0.0f, 0.0f);
      }
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4 * kWords; ++i) {
      const int code = i / kWords, word = i % kWords, p = code % kPlaces;
      const Fragment<T> columns = x.columns(word, code, place);
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        const uint codes = words[f][word] >> (4 * (code - p)) & constants.codes << (4 * p);
        const Pair<T> pair = as_type<Pair<T>>(codes | uint(SmallCode<T>::kBits));
        metal::simdgroup_multiply_accumulate(sums[p][f], fragment_of<T>(pair.x, pair.y), columns,
                                             sums[p][f]);
      }
    }
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      float2 of_codes = elements_of(sums[0][f]);
      if (kPlaces > 1) {
        of_codes = metal::fma(float2(1.0f / 16.0f), elements_of(sums[kPlaces - 1][f]), of_codes);
      }
      const float2 by =
          SmallCode<T>::coefficients(static_cast<float>(scales[f]), static_cast<float>(biases[f]));
      totals[f] =
          metal::fma(float2(by.x), of_codes, metal::fma(float2(by.y), x.sums[f % 2], totals[f]));
    }
  }
};

// The steps of a simdgroup, tile after tile. The copies of the next step, of the next tile too,
// overlap with the computation.
template <typename T, int kGroup, int kFragments, int kMatrices, int kSimdgroups>
class GemvMatrixSteps {
 public:
  using Stage = MatrixStage<T, kGroup, kFragments>;
  using Sums = GemvMatrixSums<T, kGroup, kFragments>;

  // Processes every tile_step-th tile from `tile` on. `memory` belongs to the threadgroup.
  METAL_FUNC GemvMatrixSteps(StagedMatrices<T, kMatrices> matrices,
                             StagedRows<T> x,
                             uint4 zeros,
                             uint tile,
                             uint tile_step,
                             uint simdgroup,
                             uint lane,
                             threadgroup uint4* memory) thread
      : copies_(matrices, x, lane),
        constants_(zeros),
        stage_size_(Stage::size(x.rows)),
        steps_(matrices.columns / kMatrixColumns),
        tiles_((matrices.last - matrices.first) / (8 * kFragments / kMatrices) + 1),
        tile_step_(tile_step),
        simdgroup_(simdgroup),
        next_tile_(tile),
        next_step_(simdgroup),
        current_(memory + 2 * simdgroup * stage_size_),
        next_(current_ + stage_size_) {
    if (simdgroup < steps_) {
      copies_.start(next_tile_, next_step_, current_);
    }
    end_copies();
    next_step_ += kSimdgroups;
  }

  METAL_FUNC uint tiles() const thread { return tiles_; }

  METAL_FUNC void add_tile(thread Sums& sums) thread {
    for (uint step = simdgroup_; step < steps_; step += kSimdgroups) {
      start_next();
      wait_for_copies<1>();
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      sums.add(current_, step, copies_, constants_);
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      threadgroup uint4* const used = current_;
      current_ = next_;
      next_ = used;
    }
  }

 private:
  METAL_FUNC void start_next() thread {
    if (next_step_ >= steps_) {
      next_step_ = simdgroup_;
      next_tile_ += tile_step_;
    }
    if (next_tile_ < tiles_) {
      copies_.start(next_tile_, next_step_, next_);
    }
    next_step_ += kSimdgroups;
    end_copies();
  }

  StageCopies<T, kGroup, kFragments, kMatrices> copies_;
  Constants<T> constants_;
  uint stage_size_;
  uint steps_;  // per tile
  uint tiles_;
  uint tile_step_;
  uint simdgroup_;
  uint next_tile_, next_step_;
  threadgroup uint4 *current_, *next_;
};
