// Gathered quantized products of many rows per expert: tiles of up to 32 rows of x with one expert.
//   gather_tiles_transposed  out[p] = x[lhs[p]] w[rhs[p]]^T
//   gather_tiles_gated       out[p] = activation(g) * u,  g and u: such products with gate and up
//   gather_tiles_plain       out[p] = x[lhs[p]] w[rhs[p]]
//
// Kernels: gather_tiles_<transposed|gated|plain>_<dtype>_<format>.
// Grid: (blocks of columns of out, tiles), folded into y and z. A block has 64 columns
// (transposed), 32 (gated) or 128 (plain). Threadgroup: 128 x 1 x 1.
// Bindings, function constants and alignment: as in few.metal; gated also as gather_few_gated.
//
//   tile = the expert and the rows of this threadgroup          (pair_tile.h)
//   sums = products of these rows                               (tile_loops.h)
//   store sums; compute those that have overflowed again        (large_numbers.h)
#include "metal/common/kernel.h"
#include "metal/gather_matmul/dense_format.h"
#include "metal/gather_matmul/gated_results.h"
#include "metal/gather_matmul/pair_tile.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/tile_loops.h"

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void gather_tiles_transposed(
    const device T* x [[buffer(0)]],
    const device uchar* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    const device int* lhs [[buffer(4)]],
    const device int* rhs [[buffer(5)]],
    const device int2* table [[buffer(6)]],
    device T* out [[buffer(7)]],
    constant GatherParams& all [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  alignas(16) threadgroup Pair<T> memory[PairedRows<T>::kSize];
  constant QuantizedParams& params = all.product;
  TileLoop tiles(group, groups);
  while (tiles.next(kPairedRows, {lhs, rhs, table}, all)) {
    const PairTile tile = tiles.tile;
    const TiledProduct<T, Format> product = {
        x + ulong(tile.x_row) * params.columns,
        matrix_of_expert<T, Format>({words_of(w), scales, biases, 0, 0}, tile.expert, params),
        out + ulong(tile.out_row) * params.outputs, 0, tile.rows};
    const int first_output = kOutputsOfLanes * (group.x * kTiledSimdgroups + simdgroup);
    const ResultPlace results = TransposedPlace::first(0, first_output, lane);
    const WeightRow<T, Format> own[2] = {product.row_of_w(results.column, params),
                                         product.row_of_w(results.column + 1, params)};
    RegTile<float, kOutputsOfLanes, kPairedRows> sums;
    products_of_tile<T, Format>(product.rows_of_x(0, kPairedRows, params.columns), own, params,
                                memory, lane, thread_index, sums);
    bool overflowed = false;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kPairedFragments; ++i) {
      overflowed |=
          store_transposed(product, results.row + 8 * i, results.column,
                           elements_of(sums.block(0, i)), elements_of(sums.block(1, i)), params);
    }
    const uint zero = SumsOverflow<T>::kMay ? unknown_zero(lane) : 0;
    if (overflowed) {
      keep_results_in_range<TransposedPlace, true, T, Format>(
          product, TransposedPlace::first(0, first_output + int(zero), lane + zero),
          4 * kPairedFragments, params);
    }
  }
}

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void gather_tiles_gated(
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
    constant GatherParams& all [[buffer(13)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  alignas(16) threadgroup Pair<T> memory[PairedRows<T>::kSize];
  constant QuantizedParams& params = all.product;
  TileLoop tiles(group, groups);
  while (tiles.next(kPairedRows, {lhs, rhs, table}, all)) {
    const PairTile tile = tiles.tile;
    const device T* const own_x = x + ulong(tile.x_row) * params.columns;
    device T* const own_out = out + ulong(tile.out_row) * params.outputs;
    const TiledProduct<T, Format> gate = {
        own_x,
        matrix_of_expert<T, Format>({gate_w, gate_scales, gate_biases, 0, 0}, tile.expert, params),
        own_out, 0, tile.rows};
    const TiledProduct<T, Format> up = {
        own_x, matrix_of_expert<T, Format>({up_w, up_scales, up_biases, 0, 0}, tile.expert, params),
        own_out, 0, tile.rows};
    const FragmentPlace place = fragment_place(lane);
    const int output = kGatedOutputs * int(group.x * kTiledSimdgroups + simdgroup) + place.row;
    const WeightRow<T, Format> own[2] = {gate.row_of_w(output, params),
                                         up.row_of_w(output, params)};
    RegTile<float, kOutputsOfLanes, kPairedRows> sums;
    products_of_tile<T, Format>(gate.rows_of_x(0, kPairedRows, params.columns), own, params, memory,
                                lane, thread_index, sums);
    const AddedVectors<T> added = {gate_added, up_added, ulong(tile.expert) * params.outputs};
    uint overflowed = 0;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kPairedFragments; ++i) {
      overflowed |=
          store_gated(gate, added, 8 * i + place.column, output, elements_of(sums.block(0, i)),
                      elements_of(sums.block(1, i)), params)
          << (2 * i);
    }
    const uint zero = SumsOverflow<T>::kMay ? unknown_zero(lane) : 0;
    if (overflowed != 0) {
      const FragmentPlace again = fragment_place(lane + zero);
      const uint block = (group.x + zero) * kTiledSimdgroups + simdgroup;
      keep_gated_in_range(gate, up, added,
                          {again.column, kGatedOutputs * int(block) + again.row, 8, 0}, overflowed,
                          params);
    }
  }
}

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void gather_tiles_plain(
    const device T* x [[buffer(0)]],
    const device uchar* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    const device int* lhs [[buffer(4)]],
    const device int* rhs [[buffer(5)]],
    const device int2* table [[buffer(6)]],
    device T* out [[buffer(7)]],
    constant GatherParams& all [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  alignas(16) threadgroup Pair<T> memory[PairedColumns<T>::kSize];
  constant QuantizedParams& params = all.product;
  TileLoop tiles(group, groups);
  while (tiles.next(kPairedRows, {lhs, rhs, table}, all)) {
    const PairTile tile = tiles.tile;
    const TiledProduct<T, Format> product = {
        x + ulong(tile.x_row) * params.outputs,
        matrix_of_expert<T, Format>({words_of(w), scales, biases, 0, 0}, tile.expert, params),
        out + ulong(tile.out_row) * params.columns, 0, tile.rows};
    const int first_column = 32 * (group.x * kTiledSimdgroups + simdgroup);
    const ResultPlace results = PlainPlace::first(0, first_column, lane);
    RegTile<float, kPairedRows, 32> sums;
    plain_products_of_tile(product, product.rows_of_x(0, kPairedRows, params.outputs),
                           results.column, params, memory, lane, thread_index, sums);
    const bool overflowed = store_plain(product, results, sums, params);
    const uint zero = SumsOverflow<T>::kMay ? unknown_zero(lane) : 0;
    if (overflowed) {
      keep_results_in_range<PlainPlace, false, T, Format>(
          product, PlainPlace::first(0, first_column + int(zero), lane + zero),
          8 * kPairedFragments, params);
    }
  }
}

// ---- kernels

#define INSTANTIATE_TILES(name, format, product, dtype, type)     \
  MLX_ANVIL_KERNEL("gather_tiles_" #product "_" #dtype "_" #name, \
                   gather_tiles_##product<type, format>)

#define INSTANTIATE_TILES_DTYPES(product)                                 \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_TILES, product, float32, float) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_TILES, product, float16, half)  \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_TILES, product, bfloat16, bfloat)

INSTANTIATE_TILES_DTYPES(transposed)
INSTANTIATE_TILES_DTYPES(gated)
INSTANTIATE_TILES_DTYPES(plain)

#define INSTANTIATE_DENSE(product)                                      \
  INSTANTIATE_TILES(dense, DenseFormat<float>, product, float32, float) \
  INSTANTIATE_TILES(dense, DenseFormat<half>, product, float16, half)   \
  INSTANTIATE_TILES(dense, DenseFormat<bfloat>, product, bfloat16, bfloat)

INSTANTIATE_DENSE(transposed)
INSTANTIATE_DENSE(plain)
