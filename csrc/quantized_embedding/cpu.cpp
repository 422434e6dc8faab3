#include "quantized_embedding/cpu.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "common/parallel.h"
#include "quantized_embedding/simd/kernels.h"

namespace mlx_anvil {

namespace {

// Minimum elements per thread.
constexpr int64_t kGrain = 32768;

template <class T>
int64_t number_at(const void* data, int64_t index) {
  return static_cast<int64_t>(static_cast<const T*>(data)[index]);
}

}  // namespace

int64_t RowIds::row(int64_t index, int64_t rows) const {
  int64_t id = is_long     ? number_at<int64_t>(data, index)
               : is_signed ? number_at<int32_t>(data, index)
                           : number_at<uint32_t>(data, index);
  if (id < 0) {
    id = is_signed ? id + rows : std::numeric_limits<int64_t>::max();
  }
  return std::clamp<int64_t>(id, 0, rows - 1);
}

void quantized_embedding_cpu(const QuantizedEmbeddingArgs& args) {
  const QuantizedMatrixView& matrix = args.matrix;
  if (args.ids.count * matrix.columns == 0) {
    return;
  }
  const QuantizedEmbeddingKernels& kernels = quantized_embedding_kernels();
  const int64_t row_bytes = matrix.columns * element_size(args.dtype);
  const int64_t grain = std::max<int64_t>(1, kGrain / matrix.columns);
  parallel_for(args.ids.count, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(kernels.scratch(matrix));
    for (int64_t i = begin; i < end; ++i) {
      kernels.row(matrix, args.ids.row(i, matrix.outputs), args.dtype,
                  static_cast<char*>(args.out) + i * row_bytes, scratch.data());
    }
  });
}

}  // namespace mlx_anvil
