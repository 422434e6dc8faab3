// Gathered quantized products of few rows per expert: each threadgroup reads 32 rows of an expert's
// matrix once, for up to 8 rows of x.
//   gather_few        out[p] = x[left(p)] w[expert(p)]^T
//   gather_few_gated  out[p] = activation(g) * u,  g and u: such products with gate and up
//
// Kernels: gather_few[_gated]_<dtype>_<format>.
// Grid: (blocks of rows of w, tiles), tiles folded into y and z. A block has 32 rows (gated: 16 of
// each matrix), or half of that if all tiles have one row of x. Threadgroup: 128 x 1 x 1.
// Bindings:
//   few:   x, w, scales, biases, lhs, rhs, table, out, params (GatherParams)
//   gated: x, gate w, scales, biases, up w, scales, biases, gate's and up's vectors [experts, N]
//          that are added to the products, lhs, rhs, table, out, params
// Other arrays are bound in place of absent ones. Function constants: 0: see dequant.h; 1: false;
// 3, 5: see tiles.metal; 6 to 8: see pair_tile.h; 9, 10: see gated_results.h.
// Alignment: none beyond these. Arrays are dense.
//
//   tile = the expert and the rows of this threadgroup          (pair_tile.h)
//   one row: lanes split the columns, four rows of w at a time  (gemv.h)
//   more:    fragments of w times fragments of x                (few_rows.h)
#include "metal/common/kernel.h"
#include "metal/gather_matmul/dense_format.h"
#include "metal/gather_matmul/gated_results.h"
#include "metal/gather_matmul/pair_tile.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/gemv.h"
#include "metal/quantized_matmul/tile_loops.h"

enum { kFewRows = 8 };
static_assert(int(kGemvThreads) == int(kTiledThreads), "a kernel has the loops of both");

// Fragments of w per threadgroup if there may be several rows of x: each reads these again.
enum { kFewFragments = 4 };

// Partial sums of the simdgroups.
using FewShares = float2[kFewFragments][1][32];

// Blocks of 16 rows of w (gated: 8 of each matrix) that a threadgroup has.
METAL_FUNC uint blocks_per_group() {
  return pairs_have_one_row && !pairs_are_in_table ? 1 : kFewFragments / 2;
}

// Where a lane has results: four in each block of 16 rows of w.
struct FewResults {
  METAL_FUNC static ResultPlace result(ResultPlace first, int i) {
    const ResultPlace of_block = TransposedPlace::result(first, i % 4);
    return {of_block.row, of_block.column + i / 4 * kOutputsOfLanes};
  }
};

// A threadgroup's blocks of rows of w, and this thread in it.
struct FewPlace {
  uint block;
  uint simdgroup;
  uint lane;
};

// Of pairs with one row, this is known when the kernel is compiled.
METAL_FUNC bool has_one_row(PairTile tile) {
  return (pairs_have_one_row && !pairs_are_in_table) || tile.rows == 1;
}

// Results of a tile whose rows of x and out start at `x` and `out`.
template <typename T, typename Format>
METAL_FUNC void few_of_tile(PairTile tile,
                            const device T* x,
                            WeightRow<T, Format> first,
                            device T* out,
                            constant QuantizedParams& params,
                            FewPlace at,
                            threadgroup FewShares* shares) {
  const uint first_block = blocks_per_group() * at.block;
  if (has_one_row(tile)) {
    enum { kStreams = GemvStreams<1>::kCount };
    MLX_ANVIL_NO_UNROLL
    for (uint b = 0; b < blocks_per_group(); ++b) {
      const GemvPlace place =
          gemv_place(uint3(first_block + b, 0, 0), at.simdgroup, at.lane, 1, kStreams);
      const float total =
          gemv_of_place<T, Format, 1>(first, x, params, place, at.simdgroup, at.lane,
                                      reinterpret_cast<threadgroup float (*)[32]>(shares));
      const int n = place.first_output + int(at.lane);
      if (at.lane < kStreams && n < params.outputs) {
        out[n] = static_cast<T>(total);
      }
    }
    return;
  }
  const TiledProduct<T, Format> product = {x, first, out, 0, tile.rows};
  const int first_output = kOutputsOfLanes * first_block;
  const ResultPlace results = TransposedPlace::first(0, first_output, at.lane);
  WeightRow<T, Format> own[kFewFragments];
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kFewFragments; ++f) {
    own[f] = product.row_of_w(results.column + f / 2 * kOutputsOfLanes + f % 2, params);
  }
  float2 totals[kFewFragments];
  products_of_few<T, Format, kFewRows>(product.rows_of_x(0, kFewRows, params.columns), own, params,
                                       shares, at.simdgroup, at.lane, totals);
  if (at.simdgroup > 0) {
    return;
  }
  bool overflowed = false;
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kFewFragments; f += 2) {
    overflowed |= store_transposed(product, results.row, results.column + f / 2 * kOutputsOfLanes,
                                   totals[f], totals[f + 1], params);
  }
  const uint zero = SumsOverflow<T>::kMay ? unknown_zero(at.lane) : 0;
  if (overflowed) {
    keep_results_in_range<FewResults, true, T, Format>(
        product, TransposedPlace::first(0, first_output + int(zero), at.lane + zero),
        2 * kFewFragments, params);
  }
}

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void gather_few(
    const device T* x [[buffer(0)]],
    const device uchar* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    const device int* lhs [[buffer(4)]],
    const device int* rhs [[buffer(5)]],
    const device int2* table [[buffer(6)]],
    device T* out [[buffer(7)]],
    constant GatherParams& params [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup FewShares shares[kTiledSimdgroups];
  constant QuantizedParams& product = params.product;
  TileLoop tiles(group, groups);
  while (tiles.next(kFewRows, {lhs, rhs, table}, params)) {
    const PairTile tile = tiles.tile;
    few_of_tile<T, Format>(
        tile, x + ulong(tile.x_row) * product.columns,
        matrix_of_expert<T, Format>({words_of(w), scales, biases, 0, 0}, tile.expert, product),
        out + ulong(tile.out_row) * product.outputs, product, {group.x, simdgroup, lane}, shares);
  }
}

// The same of gate and up.
template <typename T, typename Format>
METAL_FUNC void gated_few_of_tile(PairTile tile,
                                  const device T* x,
                                  WeightRow<T, Format> first_gate,
                                  WeightRow<T, Format> first_up,
                                  AddedVectors<T> added,
                                  device T* out,
                                  constant QuantizedParams& params,
                                  FewPlace at,
                                  threadgroup FewShares* shares) {
  const uint first_block = blocks_per_group() * at.block;
  if (has_one_row(tile)) {
    enum { kPairs = GemvStreams<1>::kCount / 2 };
    const GateAndUp<T, Format, kPairs> matrices = {first_gate, first_up};
    MLX_ANVIL_NO_UNROLL
    for (uint b = 0; b < blocks_per_group(); ++b) {
      const GemvPlace place =
          gemv_place(uint3(first_block + b, 0, 0), at.simdgroup, at.lane, 1, kPairs);
      const float gate =
          gemv_totals<T, Format, 1>(matrices, x, params, place, at.simdgroup, at.lane,
                                    reinterpret_cast<threadgroup float (*)[32]>(shares));
      const float up = metal::simd_shuffle_down(gate, ushort(kPairs));
      const int n = place.first_output + int(at.lane);
      if (at.lane < kPairs && n < params.outputs) {
        out[n] = static_cast<T>(added.gated(gate, up, n, params));
      }
    }
    return;
  }
  const TiledProduct<T, Format> gate = {x, first_gate, out, 0, tile.rows};
  const TiledProduct<T, Format> up = {x, first_up, out, 0, tile.rows};
  const FragmentPlace place = fragment_place(at.lane);
  const int output = kGatedOutputs * int(first_block) + place.row;
  WeightRow<T, Format> own[kFewFragments];
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kFewFragments; f += 2) {
    own[f] = gate.row_of_w(output + f / 2 * kGatedOutputs, params);
    own[f + 1] = up.row_of_w(output + f / 2 * kGatedOutputs, params);
  }
  float2 totals[kFewFragments];
  products_of_few<T, Format, kFewRows>(gate.rows_of_x(0, kFewRows, params.columns), own, params,
                                       shares, at.simdgroup, at.lane, totals);
  if (at.simdgroup > 0) {
    return;
  }
  uint overflowed = 0;
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kFewFragments; f += 2) {
    overflowed |= store_gated(gate, added, place.column, output + f / 2 * kGatedOutputs, totals[f],
                              totals[f + 1], params)
                  << f;
  }
  const uint zero = SumsOverflow<T>::kMay ? unknown_zero(at.lane) : 0;
  if (overflowed != 0) {
    const FragmentPlace again = fragment_place(at.lane + zero);
    keep_gated_in_range(
        gate, up, added,
        {again.column, kGatedOutputs * int(first_block + zero) + again.row, 0, int(kGatedOutputs)},
        overflowed, params);
  }
}

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void gather_few_gated(
    const device T* x [[buffer(0)]],
    const device uint* gate_w [[buffer(1)]],
    const device typename Format::template Scale<T>* gate_scales [[buffer(2)]],
    const device T* gate_biases [[buffer(3)]],
    const device uint* up_w [[buffer(4)]],
    const device typename Format::template Scale<T>* up_scales [[buffer(5)]],
    const device T* up_biases [[buffer(6)]],
    const device T* gate_added [[buffer(7)]],
    const device T* up_added [[buffer(8)]],
    const device int* lhs [[buffer(9)]],
    const device int* rhs [[buffer(10)]],
    const device int2* table [[buffer(11)]],
    device T* out [[buffer(12)]],
    constant GatherParams& params [[buffer(13)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup FewShares shares[kTiledSimdgroups];
  constant QuantizedParams& product = params.product;
  TileLoop tiles(group, groups);
  while (tiles.next(kFewRows, {lhs, rhs, table}, params)) {
    const PairTile tile = tiles.tile;
    gated_few_of_tile<T, Format>(
        tile, x + ulong(tile.x_row) * product.columns,
        matrix_of_expert<T, Format>({gate_w, gate_scales, gate_biases, 0, 0}, tile.expert, product),
        matrix_of_expert<T, Format>({up_w, up_scales, up_biases, 0, 0}, tile.expert, product),
        {gate_added, up_added, ulong(tile.expert) * product.outputs},
        out + ulong(tile.out_row) * product.outputs, product, {group.x, simdgroup, lane}, shares);
  }
}

// ---- kernels

#define INSTANTIATE_FEW(name, format, kernel_name, dtype, type) \
  MLX_ANVIL_KERNEL(#kernel_name "_" #dtype "_" #name, kernel_name<type, format>)

#define INSTANTIATE_FEW_DTYPES(kernel_name)                                 \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_FEW, kernel_name, float32, float) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_FEW, kernel_name, float16, half)  \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_FEW, kernel_name, bfloat16, bfloat)

INSTANTIATE_FEW_DTYPES(gather_few)
INSTANTIATE_FEW_DTYPES(gather_few_gated)

INSTANTIATE_FEW(dense, DenseFormat<float>, gather_few, float32, float)
INSTANTIATE_FEW(dense, DenseFormat<half>, gather_few, float16, half)
INSTANTIATE_FEW(dense, DenseFormat<bfloat>, gather_few, bfloat16, bfloat)
