// Plain product of up to 8 rows, as in a gradient. Columns are split into strips and rows of w into
// parts, whose sums are added in a fixed order (split-K).
#include <atomic>

#include "common/parallel.h"
#include "quantized_matmul/cpu_support.h"

namespace mlx_anvil {

namespace {

// Approximate columns per strip. Sums of 8 rows then take 16 KiB, and the contiguous bytes per row
// of w are long enough for efficient memory access.
constexpr int64_t kStripColumns = 512;
// Rows of w per work item, so that narrow matrices occupy all threads too. It depends on the shape
// only, so results do not depend on the number of threads.
constexpr int64_t kPartRows = 1024;
// Integer kernels use smaller parts and wider strips, so that they read longer pieces of each row.
// The strip width leaves at least kIntItems items, with sums that fit in L2.
constexpr int64_t kIntPartRows = 512;
constexpr int64_t kIntItems = 8, kIntStripColumns = 8192, kIntStripSums = 32768;
// Minimum elements per thread when adding up parts.
constexpr int64_t kSumsGrain = 65536;

// How the columns and rows of a matrix are split into work items.
struct PlainPlan {
  bool integers;
  int values;            // column interleaving, as in store_row
  int64_t block, strip;  // columns per block, blocks per strip
  int64_t skipped;       // padding columns before the matrix in the first block
  int64_t blocks, strips, part_rows, parts;

  PlainPlan(const QuantizedMatrixView& matrix, int64_t rows, bool in_integers)
      : integers(in_integers), values(integers ? 1 : unit_values(matrix.format.bits)) {
    const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
    const int64_t vector_of_groups = int64_t{kernels.lanes} * matrix.format.group;
    part_rows = integers ? kIntPartRows : kPartRows;
    parts = ceil_div(matrix.outputs, part_rows);
    block = integers ? kernels.int_plain_columns(matrix, rows) : int64_t{values} * kernels.lanes;
    skipped = integers ? kernels.int_plain_skipped(matrix, rows) : 0;
    blocks = ceil_div(skipped + matrix.columns, block);
    if (integers) {
      const int64_t columns =
          std::min({ceil_div(matrix.columns, std::max<int64_t>(1, kIntItems / parts)),
                    kIntStripColumns, kIntStripSums / rows});
      strip = round_up(columns, vector_of_groups) / block;
    } else {
      strip = std::max<int64_t>(1, std::min(kStripColumns, vector_of_groups) / block);
    }
    strips = ceil_div(ceil_div(matrix.columns, block), strip);
  }

  // The skipped columns may add one block to the last strip.
  int64_t strip_blocks(int64_t s) const { return s + 1 < strips ? strip : blocks - s * strip; }
  int64_t most_blocks() const { return strip_blocks(strips - 1) > strip ? strip + 1 : strip; }
  int64_t first_block(int64_t item) const { return item / parts * strip; }
  int64_t first_row(int64_t item) const { return item % parts * part_rows; }
};

// Returns x transposed, in float32: [outputs][rows].
Floats columns_of(const QuantizedMatrixView& matrix,
                  const void* x,
                  int64_t given_rows,
                  int64_t rows) {
  const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
  const int64_t outputs = matrix.outputs, padded = round_up(outputs, 2 * kernels.lanes);
  const Floats row = floats(padded);
  Floats columns = floats(outputs * rows);
  std::fill_n(columns.get(), outputs * rows, 0.0f);
  for (int64_t m = 0; m < given_rows; ++m) {
    kernels.load_row(matrix.dtype, at(x, m * outputs * element_size(matrix.dtype)), outputs, 1,
                     padded / kernels.lanes, row.get(), 2 * kernels.lanes);
    for (int64_t n = 0; n < outputs; ++n) {
      columns[n * rows + m] = row[n];
    }
  }
  return columns;
}

// Returns false, without writing `out`, if the integer kernel rejects the matrix.
bool plain_gemv(const QuantizedMatrixView& matrix,
                const float* columns,
                int64_t given_rows,
                int64_t rows,
                bool integers,
                void* out) {
  const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
  const PlainPlan plan(matrix, rows, integers);
  const int64_t sums_step = rows * plan.most_blocks() * plan.block;
  // store_row reads whole vectors, starting at the first column of the matrix.
  const Floats sums = floats(plan.strips * plan.parts * sums_step + kernels.lanes);
  std::atomic<bool> done = true;
  parallel_for(plan.strips * plan.parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first_block = plan.first_block(item), first = plan.first_row(item);
      // A thread's next range starts max_threads() ranges later.
      const int64_t next = item + 1 < end ? item + 1 : begin + max_threads() * (end - begin);
      const QuantizedPlainGemvArgs args = {matrix,
                                           first_block,
                                           plan.strip_blocks(item / plan.parts),
                                           first,
                                           std::min(plan.part_rows, matrix.outputs - first),
                                           plan.first_block(next),
                                           plan.first_row(next),
                                           rows,
                                           columns + first * rows,
                                           sums.get() + item * sums_step};
      if (!integers) {
        kernels.plain_gemv(args);
      } else if (!kernels.int_plain_gemv(args)) {
        done = false;
      }
    }
  });
  if (!done) {
    return false;
  }
  const int64_t size = element_size(matrix.dtype);
  const int64_t grain = std::max<int64_t>(1, kSumsGrain / (plan.parts * plan.strip * plan.block));
  parallel_for(plan.strips * given_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = i / given_rows, m = i % given_rows;
      const int64_t before = s == 0 ? plan.skipped : 0;
      const int64_t first = s * plan.strip * plan.block + before - plan.skipped;
      const int64_t count = plan.strip_blocks(s) * plan.block;
      float* const total = sums.get() + s * plan.parts * sums_step + m * count;
      for (int64_t part = 1; part < plan.parts; ++part) {
        kernels.add(total, total + part * sums_step, count);
      }
      if (integers) {
        kernels.int_plain_order(matrix, rows, plan.strip_blocks(s), total);
      }
      kernels.store_row(matrix.dtype, total + before, 2 * kernels.lanes, plan.values,
                        std::min(count - before, matrix.columns - first),
                        at(out, (m * matrix.columns + first) * size));
    }
  });
  return true;
}

}  // namespace

void quantized_plain_gemv_cpu(const QuantizedMatrixView& matrix,
                              const void* x,
                              int64_t given_rows,
                              void* out) {
  const int64_t rows = power_of_two_rows(given_rows);
  const Floats columns = columns_of(matrix, x, given_rows, rows);
  const bool integers = quantized_cpu_kernels().int_plain_columns(matrix, rows) > 0;
  if (!integers || !plain_gemv(matrix, columns.get(), given_rows, rows, true, out)) {
    plain_gemv(matrix, columns.get(), given_rows, rows, false, out);
  }
}

}  // namespace mlx_anvil
