// Dense gathered products. Of more than a few rows, each expert's matrix is packed into panels
// (common/simd/panels.h), a strip of columns and a slice of the depth at a time, and multiplied by
// all rows of the expert.
#include "common/simd/panels.h"
#include "gather_matmul/simd/few_rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

constexpr int64_t kDepth = 256;  // per pass; a panel of it fits in L1
constexpr int64_t kRows = 512;   // of y and x in a sum of outer products, per pass

template <class T>
const T* element(const void* data, int64_t index) {
  return static_cast<const T*>(data) + index;
}

// ---- product ------------------------------------------------------------------------------------

int64_t dense_scratch(const GatherDenseTile& tile) {
  if (tile.rows <= kFewRows) {
    return few_rows_scratch(tile);
  }
  return panel_count(tile.count) * round_up(tile.rows, kTileRows) * kPanel + kDepth * kPanel +
         round_up(tile.rows, kTileRows) * kDepth;
}

template <class T>
void multiply_tile_of(const GatherDenseTile& tile) {
  if (tile.rows <= kFewRows) {
    multiply_few_rows<T>(tile);
    return;
  }
  constexpr Words kWords = kWordsOf<T>;
  const int64_t rows = round_up(tile.rows, kTileRows), panels = panel_count(tile.count);
  const Panels sums = {tile.scratch, rows};
  const Panels right = {sums.data + panels * rows * kPanel, kDepth};
  const Panels left = {right.data + kDepth * kPanel, rows};
  for (int64_t first = 0; first < tile.depth; first += kDepth) {
    const int64_t depth = tile.depth - first < kDepth ? tile.depth - first : kDepth;
    const int64_t words = word_count<kWords>(depth);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t given = r < tile.rows ? r : tile.rows - 1;
      pack_left<kWords>(Source<T>{element<T>(tile.x[given], first), 0, 1}, 1, depth, left, r);
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t column = tile.first + panel * kPanel;
      const int64_t end = tile.first + tile.count;
      const int64_t columns = end - column < kPanel ? end - column : kPanel;
      if (tile.transposed) {
        pack_right_transposed<kWords>(
            Source<T>{element<T>(tile.w, column * tile.depth + first), tile.depth, 1}, columns,
            depth, right);
      } else {
        pack_right<kWords>(
            Source<T>{element<T>(tile.w, first * tile.columns + column), tile.columns, 1}, depth,
            columns, right);
      }
      for (int64_t r = 0; r < tile.rows; r += kTileRows) {
        const int64_t count = tile.rows - r < kTileRows ? tile.rows - r : kTileRows;
        if (first == 0) {
          const float one = 1.0f;
          multiply<kWords, Accumulate::kNone>(left_rows(left, r, 0), right.data, count, kPanel,
                                              words, sums.at(r, panel), &one);
        } else {
          multiply<kWords, Accumulate::kAdd>(left_rows(left, r, 0), right.data, count, kPanel,
                                             words, sums.at(r, panel));
        }
      }
    }
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    unpack_row(sums, r, tile.count, 1.0f, static_cast<T*>(tile.out[r]) + tile.first);
  }
}

// ---- outer products -----------------------------------------------------------------------------

int64_t outer_scratch(const GatherOuterTile& tile) {
  return panel_count(tile.columns) * round_up(tile.count, kTileRows) * kPanel + kRows * kPanel +
         panel_count(tile.count) * kRows * kPanel;
}

// Sums over the rows in their order, kRows at a time.
template <class T>
void outer_tile_of(const GatherOuterTile& tile) {
  constexpr Words kWords = kWordsOf<T>;
  constexpr int64_t kStep = kWords == Words::kBf16Pairs ? 2 : 1;
  // Packs columns of given rows, in words of kStep of them.
  const auto pack = [](const void* const* rows, int64_t count, int64_t first, int64_t columns,
                       Panels to) {
    for (int64_t r = 0; r < count; r += kStep) {
      const T* const odd = r + 1 < count ? element<T>(rows[r + 1], first) : nullptr;
      pack_right_row<kWords>(element<T>(rows[r], first), odd, 1, columns, to, r / kStep);
    }
  };
  const Panels sums = {tile.scratch, round_up(tile.count, kTileRows)};
  const Panels right = {sums.data + panel_count(tile.columns) * sums.rows * kPanel, kRows};
  const Panels left = {right.data + kRows * kPanel, kRows};
  for (int64_t first = 0; first < tile.rows; first += kRows) {
    const int64_t depth = tile.rows - first < kRows ? tile.rows - first : kRows;
    pack(tile.y + first, depth, tile.first, tile.count, left);
    for (int64_t panel = 0; panel < panel_count(tile.columns); ++panel) {
      const int64_t column = panel * kPanel;
      const int64_t columns = tile.columns - column < kPanel ? tile.columns - column : kPanel;
      pack(tile.x + first, depth, column, columns, right);
      for (int64_t n = 0; n < tile.count; n += kTileRows) {
        const int64_t outputs = tile.count - n < kTileRows ? tile.count - n : kTileRows;
        const LeftOperand of_y = left_columns(left, n, 0);
        float* const to = sums.at(n, panel);
        if (first == 0) {
          const float one = 1.0f;
          multiply<kWords, Accumulate::kNone, true>(of_y, right.data, outputs, kPanel,
                                                    word_count<kWords>(depth), to, &one);
        } else {
          multiply<kWords, Accumulate::kAdd, true>(of_y, right.data, outputs, kPanel,
                                                   word_count<kWords>(depth), to);
        }
      }
    }
  }
  for (int64_t n = 0; n < tile.count; ++n) {
    unpack_row(sums, n, tile.columns, 1.0f,
               static_cast<T*>(tile.out) + (tile.first + n) * tile.columns);
  }
}

template <class Tile, class Call>
void with_type(const Tile& tile, Call call) {
  switch (tile.dtype) {
    case KernelDtype::kFloat32:
      return call(float{});
    case KernelDtype::kFloat16:
      return call(f16{});
    default:
      return call(bf16{});
  }
}

void dense_multiply(const GatherDenseTile& tile) {
  with_type(tile, [&](auto type) { multiply_tile_of<decltype(type)>(tile); });
}

void dense_outer(const GatherOuterTile& tile) {
  with_type(tile, [&](auto type) { outer_tile_of<decltype(type)>(tile); });
}

}  // namespace

extern const GatherDenseKernels gather_dense_kernels_table = {dense_scratch, dense_multiply,
                                                              outer_scratch, dense_outer};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
