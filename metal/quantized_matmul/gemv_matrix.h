// Products of up to 8 rows of x with rows of w of 4-bit codes, by matrix products of 16-bit
// numbers: for GPUs that have units for these, on which eight rows of x cost little more than one.
//
// The columns of a fragment are dealt so that a lane's two elements are codes i and i + 4 of one
// word, which one mask gives, and that a group is whole fragments. So groups are summed up before
// their scale is applied, and all rows of x take the same steps, however many there are. A lane
// reads words of w and the columns of x that belong to them, and exchanges neither.
//
// The SIMD groups of a threadgroup share the columns of its tile, some rows of w. What one needs
// for its next step comes into threadgroup memory while it computes with what is there, across
// tiles too: that hides what memory takes, and costs no registers.
#pragma once

#include "metal/common/tile.h"
#include "metal/quantized_matmul/gemv_stage.h"

// What a code is as a 16-bit number: with these bits around it, (code + kOffset) / factor(). Where
// there are two places for it, a code may stand four bits higher and is 16 times as much.
template <typename T>
struct SmallCode;

// A subnormal number is an integer times 2^-24.
template <>
struct SmallCode<half> {
  enum { kBits = 0, kOffset = 0, kPlaces = 2 };
  METAL_FUNC static float factor() { return 0x1p24f; }
};

// Too few bits of range for that: from 128 to 255, neighbours are one apart.
template <>
struct SmallCode<bfloat> {
  enum { kBits = 0x43004300, kOffset = 128, kPlaces = 1 };
  METAL_FUNC static float factor() { return 1.0f; }
};

// Plus zeros that only run time knows: as PTX, constants, and one register in several places of an
// operand, are moved there anew for every product.
template <typename T>
struct Constants {
  uint ones[4];  // each of two numbers
  uint codes;    // a mask of two

  METAL_FUNC Constants(uint4 zeros) thread {
    const uint mask = 0x000f000fu;  // as only operand it is part of the instruction
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      ones[i] = as_type<uint>(Pair<T>(T(1), T(1))) + zeros[i];
    }
    codes = SmallCode<T>::kBits == 0 ? mask : mask + zeros[3];
  }
};

// Elements 0 and 4, 1 and 5, 2 and 6, 3 and 7 of eight neighbours.
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

// What a group of columns has of x.
template <typename T, int kWords>
struct GroupOfX {
  uint4 pairs[kWords];
  // Of rows place.column and place.column + 1; the same for two fragments of w, which make a
  // product that fills the unit.
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
  // kWords: a lane's of a group.
  enum { kGroups = kMatrixColumns / kGroup, kWords = kGroup / 32, kPlaces = SmallCode<T>::kPlaces };
  using Stage = MatrixStage<T, kGroup, kFragments>;

  FragmentPlace place;
  // Of w's row place.row of each fragment and x's rows place.column and place.column + 1.
  float2 totals[kFragments];

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      totals[f] = float2(0.0f);
    }
  }

  // Adds a step, which lies in `stage`. Rows of x that do not exist have sums that are nobody's.
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
  // Of group g, among the words of a row and the vectors of x.
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
      const float scale = SmallCode<T>::factor() * static_cast<float>(scales[f]);
      float bias = static_cast<float>(biases[f]);
      if (SmallCode<T>::kOffset != 0) {
        bias = metal::fma(-float(SmallCode<T>::kOffset), scale, bias);
      }
      totals[f] =
          metal::fma(float2(scale), of_codes, metal::fma(float2(bias), x.sums[f % 2], totals[f]));
    }
  }
};

// The steps of a SIMD group, tile after tile: while it computes with one, the next are copied,
// those of the next tile too.
template <typename T, int kGroup, int kFragments, int kMatrices, int kSimdgroups>
class GemvMatrixSteps {
 public:
  using Stage = MatrixStage<T, kGroup, kFragments>;
  using Sums = GemvMatrixSums<T, kGroup, kFragments>;

  // From tile `tile` on every tile_step'th. `memory`: of the threadgroup.
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
  uint steps_;  // of a tile
  uint tiles_;
  uint tile_step_;
  uint simdgroup_;
  uint next_tile_, next_step_;
  threadgroup uint4 *current_, *next_;
};
