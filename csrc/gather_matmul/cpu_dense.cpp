// Dense gathered products and their gradient in the weights.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "common/sum_kernels.h"
#include "gather_matmul/cpu.h"
#include "gather_matmul/cpu_pieces.h"
#include "gather_matmul/cpu_support.h"
#include "gather_matmul/simd/kernels.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kMostRows = 256;  // of a piece: sums stay in cache
constexpr int64_t kDenseTileColumns = 128;
constexpr int64_t kOuterRows = 64;  // of a result, per item

std::vector<const void*> pointers(const GatherRows& rows,
                                  const GatherPiece& piece,
                                  const void* data,
                                  int64_t row_bytes,
                                  int64_t GatherRow::* place) {
  std::vector<const void*> all;
  for (int64_t i = 0; i < piece.count; ++i) {
    all.push_back(at(data, rows.rows[piece.begin + i].*place * row_bytes));
  }
  return all;
}

}  // namespace

void gather_matmul_cpu(const GatherDenseArgs& args) {
  const bool transposed = args.product == QuantizedProduct::kTransposed;
  const int64_t size = element_size(args.dtype);
  const int64_t depth = transposed ? args.sizes.columns : args.sizes.outputs;
  const int64_t columns = transposed ? args.sizes.outputs : args.sizes.columns;
  const GatherDenseKernels& kernels = gather_dense_kernels();
  const GatherRows rows(args.sizes, args.ids);
  const std::vector<GatherPiece> pieces = rows.pieces(kMostRows);
  const int64_t tiles = ceil_div(columns, kDenseTileColumns);
  parallel_for(static_cast<int64_t>(pieces.size()) * tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const GatherPiece& piece = pieces[item / tiles];
      const std::vector<const void*> x = pointers(rows, piece, args.x, depth * size, &GatherRow::x);
      std::vector<void*> out;
      for (const void* row : pointers(rows, piece, args.out, columns * size, &GatherRow::out)) {
        out.push_back(const_cast<void*>(row));
      }
      GatherDenseTile tile{};
      tile.dtype = args.dtype;
      tile.transposed = transposed;
      tile.w = at(args.w, piece.expert * depth * columns * size);
      tile.depth = depth;
      tile.columns = columns;
      tile.first = item % tiles * kDenseTileColumns;
      tile.count = std::min(kDenseTileColumns, columns - tile.first);
      tile.rows = piece.count;
      tile.x = x.data();
      tile.out = out.data();
      const Floats scratch = floats(kernels.scratch(tile));
      tile.scratch = scratch.get();
      kernels.multiply(tile);
    }
  });
}

void gather_outer_cpu(const GatherOuterArgs& args) {
  const GatherSizes& sizes = args.sizes;
  const int64_t size = element_size(args.dtype);
  const GatherDenseKernels& kernels = gather_dense_kernels();
  const GatherRows rows(sizes, args.ids);
  std::vector<GatherPiece> pieces(sizes.experts, GatherPiece{0, 0, 0});
  for (const GatherPiece& piece : rows.experts) {
    pieces[piece.expert] = piece;
  }
  const int64_t tiles = ceil_div(sizes.outputs, kOuterRows);
  parallel_for(sizes.experts * tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const GatherPiece& piece = pieces[item / tiles];
      GatherOuterTile tile{};
      tile.dtype = args.dtype;
      tile.rows = piece.count;
      tile.outputs = sizes.outputs;
      tile.columns = sizes.columns;
      tile.first = item % tiles * kOuterRows;
      tile.count = std::min(kOuterRows, sizes.outputs - tile.first);
      tile.out = at(args.out, item / tiles * sizes.outputs * sizes.columns * size);
      if (piece.count == 0) {
        std::memset(at(tile.out, tile.first * sizes.columns * size), 0,
                    tile.count * sizes.columns * size);
        continue;
      }
      const std::vector<const void*> y =
          pointers(rows, piece, args.y, sizes.outputs * size, &GatherRow::out);
      const std::vector<const void*> x =
          pointers(rows, piece, args.x, sizes.columns * size, &GatherRow::x);
      tile.y = y.data();
      tile.x = x.data();
      const Floats scratch = floats(kernels.outer_scratch(tile));
      tile.scratch = scratch.get();
      kernels.outer(tile);
    }
  });
}

void sum_pairs_cpu(const SumPairsArgs& args) {
  constexpr int64_t kChunk = 1024;  // columns
  GatherSizes sizes;
  sizes.pairs = sizes.lefts = args.pairs;
  sizes.rows = 1;
  sizes.experts = args.count;
  const GatherRows rows(sizes, {nullptr, args.ids});
  std::vector<GatherPiece> pieces(args.count, GatherPiece{0, 0, 0});
  for (const GatherPiece& piece : rows.experts) {
    pieces[piece.expert] = piece;
  }
  const SumKernels& kernels = sum_kernels()[args.dtype];
  const int64_t size = element_size(args.dtype), chunks = ceil_div(args.columns, kChunk);
  parallel_for(args.count * chunks, 8, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[kChunk], lost[kChunk];
    for (int64_t item = begin; item < end; ++item) {
      const GatherPiece& piece = pieces[item / chunks];
      const int64_t first = item % chunks * kChunk;
      const int64_t columns = std::min(kChunk, args.columns - first);
      std::fill_n(sums, kChunk, 0.0f);
      std::fill_n(lost, kChunk, 0.0f);
      for (int64_t i = 0; i < piece.count; ++i) {
        const int64_t pair = rows.rows[piece.begin + i].out;
        kernels.add_rows(at(args.x, (pair * args.columns + first) * size), 1, 0, columns, sums,
                         lost);
      }
      kernels.store(sums, columns, at(args.out, (item / chunks * args.columns + first) * size));
    }
  });
}

}  // namespace mlx_anvil
