// Both products in float32, for machines without VNNI and for numbers that are not finite. Tiles of
// w are dequantised into panels (common/simd/panels.h), which all rows of x use.
//
//   kTransposed, for each panel of rows of w: for each superblock: transpose the panel's numbers;
//     for each tile of rows of x: add the product
//   kPlain, for each superblock of columns: for each kDepth rows of w: copy their numbers into
//     panels; for each tile of rows of x and panel: add the product
#include "common/simd/panels.h"
#include "gguf_matmul/simd/dequantize.h"
#include "gguf_matmul/simd/entries.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

constexpr int64_t kDepth = 64;  // a multiple of kPanel
static_assert(kDepth % kPanel == 0);

int64_t padded_rows(int64_t rows) {
  return round_up(rows, kTileRows);
}

template <class Action>
void with_dtype(KernelDtype dtype, Action action) {
  dtype == KernelDtype::kFloat32   ? action(float())
  : dtype == KernelDtype::kFloat16 ? action(f16())
                                   : action(bf16());
}

int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Adds x times a panel to `result`, [padded rows][kPanel]. Words of x start at `column`.
void add_panel(
    const GgufFloatArgs& args, int64_t column, const float* right, int64_t depth, float* result) {
  const int64_t rows = padded_rows(args.x_rows);
  const Panels x = {const_cast<float*>(args.x), rows};
  for (int64_t m = 0; m < args.x_rows; m += kTileRows) {
    multiply<Words::kFloat32, Accumulate::kAdd>(left_rows(x, m, column), right,
                                                least(kTileRows, args.x_rows - m), kPanel, depth,
                                                result + m * kPanel);
  }
}

// Stores columns [column, column + count) of the result, of `columns` columns.
void store_panel(const GgufFloatArgs& args,
                 int64_t columns,
                 int64_t column,
                 int64_t count,
                 const float* result) {
  with_dtype(args.matrix.dtype, [&](auto element) {
    auto* const out = static_cast<decltype(element)*>(args.out) + column;
    for (int64_t m = 0; m < args.x_rows; ++m) {
      for (int64_t n = 0; n < count; n += kLanes) {
        store_columns(out + m * columns, n, count, load_lanes(result + m * kPanel + n));
      }
    }
  });
}

void multiply_transposed(const GgufFloatArgs& args) {
  const GgufView& matrix = args.matrix;
  float* const numbers = args.scratch;  // [kPanel][kGgufSuperblock]
  float* const right = numbers + kPanel * kGgufSuperblock;
  float* const result = right + kPanel * kGgufSuperblock;
  for (int64_t n = 0; n < args.count; n += kPanel) {
    const int64_t count = least(kPanel, args.count - n);
    std::memset(result, 0, padded_rows(args.x_rows) * kPanel * sizeof(float));
    for (int64_t column = 0; column < matrix.columns; column += kGgufSuperblock) {
      const int64_t columns = least(kGgufSuperblock, matrix.columns - column);
      for (int64_t i = 0; i < count; ++i) {
        gguf_dequantize(matrix.kind, matrix.w + (args.first + n + i) * matrix.row_bytes(), column,
                        columns, numbers + i * kGgufSuperblock);
      }
      pack_rows_transposed<Words::kFloat32>(
          [&](int64_t i) { return numbers + i * kGgufSuperblock; }, 1, count, columns,
          {right, kGgufSuperblock});
      add_panel(args, column, right, columns, result);
    }
    store_panel(args, matrix.outputs, args.first + n, count, result);
  }
}

void multiply_plain(const GgufFloatArgs& args) {
  const GgufView& matrix = args.matrix;
  float* const right = args.scratch;  // panels of kDepth rows
  float* const results = right + kDepth * kGgufSuperblock;
  const int64_t rows = padded_rows(args.x_rows);
  for (int64_t c = 0; c < args.count; c += kGgufSuperblock) {
    const int64_t column = args.first + c, columns = least(kGgufSuperblock, args.count - c);
    std::memset(results, 0, rows * kGgufSuperblock * sizeof(float));
    for (int64_t n = 0; n < matrix.outputs; n += kDepth) {
      const int64_t depth = least(kDepth, matrix.outputs - n);
      for (int64_t i = 0; i < depth; ++i) {
        float numbers[kGgufSuperblock];
        gguf_dequantize(matrix.kind, matrix.w + (n + i) * matrix.row_bytes(), column, columns,
                        numbers);
        for (int64_t p = 0; p < columns; p += kPanel) {
          std::memcpy(right + (p / kPanel * kDepth + i) * kPanel, numbers + p,
                      kPanel * sizeof(float));
        }
      }
      for (int64_t p = 0; p < columns; p += kPanel) {
        add_panel(args, n, right + p * kDepth, depth, results + p * rows);
      }
    }
    for (int64_t p = 0; p < columns; p += kPanel) {
      store_panel(args, matrix.columns, column + p, least(kPanel, columns - p), results + p * rows);
    }
  }
}

}  // namespace

int64_t gguf_packed_floats(int64_t x_rows, int64_t x_columns) {
  return padded_rows(x_rows) * round_up(x_columns, kPanel);
}

void gguf_pack_floats(
    KernelDtype dtype, const void* x, int64_t x_rows, int64_t x_columns, float* to) {
  const Panels panels = {to, padded_rows(x_rows)};
  std::memset(to, 0, gguf_packed_floats(x_rows, x_columns) * sizeof(float));
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    pack_left<Words::kFloat32>(Source<T>{static_cast<const T*>(x), x_columns, 1}, x_rows, x_columns,
                               panels, 0);
  });
}

int64_t gguf_float_scratch(int64_t x_rows) {
  const int64_t tiles = 2 * kPanel > kDepth ? 2 * kPanel : kDepth;
  return (tiles + padded_rows(x_rows)) * kGgufSuperblock;
}

void gguf_multiply_floats(const GgufFloatArgs& args) {
  args.product == QuantizedProduct::kTransposed ? multiply_transposed(args) : multiply_plain(args);
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
