// Gradients of a quantized table in scales and biases. A row of the table is a matrix of one row,
// of a product with ones.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "common/parallel.h"
#include "quantized_embedding/cpu.h"
#include "quantized_matmul/cpu.h"
#include "quantized_matmul/cpu_support.h"

namespace mlx_anvil {

namespace {

// Minimum elements of dy, and minimum bytes of zeros, per thread.
constexpr int64_t kGradientGrain = 16384, kZerosGrain = 1 << 18;

void set_to_zero(void* data, int64_t bytes) {
  parallel_for(bytes, kZerosGrain,
               [&](int64_t begin, int64_t end) { std::memset(at(data, begin), 0, end - begin); });
}

}  // namespace

void embedding_scale_gradient_cpu(const EmbeddingScaleGradientArgs& args) {
  const int64_t size = element_size(args.dtype);
  const int64_t row_bytes = args.columns * size;
  const int64_t result_bytes = args.columns / args.format.group * size;
  set_to_zero(args.d_scales, args.rows * result_bytes);
  set_to_zero(args.d_biases, args.rows * result_bytes);
  if (args.ids.count * row_bytes == 0) {
    return;
  }
  // By row, then in the order of ids, so that every sum has a fixed order.
  std::vector<std::pair<int64_t, int64_t>> places(args.ids.count);
  for (int64_t i = 0; i < args.ids.count; ++i) {
    places[i] = {args.ids.row(i, args.rows), i};
  }
  std::sort(places.begin(), places.end());
  std::vector<int64_t> first;  // of each row
  int64_t most = 0;
  for (int64_t i = 0; i < args.ids.count; ++i) {
    if (i == 0 || places[i].first != places[i - 1].first) {
      first.push_back(i);
    }
    most = std::max(most, i + 1 - first.back());
  }
  const int64_t rows = static_cast<int64_t>(first.size());
  first.push_back(args.ids.count);
  const Floats ones = floats(ceil_div(most * size, sizeof(float)));
  const std::vector<float> one(1, 1.0f);
  for (int64_t i = 0; i < most; ++i) {
    quantized_cpu_kernels().store_dense(args.dtype, one.data(), 1, at(ones.get(), i * size));
  }
  const int64_t grain = ceil_div(kGradientGrain, args.columns);
  parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t row = places[first[r]].first, count = first[r + 1] - first[r];
      const Floats own = floats(ceil_div(count * row_bytes, sizeof(float)));
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(at(own.get(), i * row_bytes),
                    at(args.dy, places[first[r] + i].second * row_bytes), row_bytes);
      }
      QuantizedScaleGradientArgs of_row{};
      of_row.dtype = args.dtype;
      of_row.format = args.format;
      of_row.sizes = {1, count, args.columns, 1};
      of_row.w = args.w + row * (args.columns * args.format.bits / 32);
      of_row.y = ones.get();
      of_row.x = own.get();
      of_row.d_scales = at(args.d_scales, row * result_bytes);
      of_row.d_biases = at(args.d_biases, row * result_bytes);
      quantized_scale_gradient_cpu(of_row);
    }
  });
}

}  // namespace mlx_anvil
