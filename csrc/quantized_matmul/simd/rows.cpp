// Converts rows of x and of results between their dtype and float32 in lane order (kernels.h).
// Defines the kernel table.
#include "common/simd/activations.h"
#include "common/simd/math.h"
#include "common/simd/panels.h"
#include "quantized_matmul/simd/entries.h"
#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

inline float* vector_at(float* row, int64_t vector, int64_t pair_step) {
  return row + vector / 2 * pair_step + vector % 2 * kLanes;
}

// Returns the largest magnitude. Infinity and NaN exceed every finite value.
float largest(KernelDtype dtype, const void* from, int64_t count) {
  u32v most{};
  with_elements(dtype, [&](auto element) {
    const auto* const in = static_cast<const decltype(element)*>(from);
    for (int64_t i = 0; i < count; i += kLanes) {
      const u32v x = bits_as<u32v>(absolute(load_columns(in, 1, i, count)));
      most = x > most ? x : most;
    }
  });
  uint32_t all = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    all = most[lane] > all ? most[lane] : all;
  }
  return bits_as<float>(all);
}

void scale(KernelDtype dtype, void* row, int64_t count, float factor) {
  with_elements(dtype, [&](auto element) {
    auto* const numbers = static_cast<decltype(element)*>(row);
    for (int64_t i = 0; i < count; i += kLanes) {
      store_columns(numbers, i, count, load_columns(numbers, 1, i, count) * factor);
    }
  });
}

void block_sums(const float* row, int32_t values, int64_t blocks, float* sums) {
  for (int64_t block = 0; block < blocks; ++block) {
    f32v sum{};
    for (int i = 0; i < values; ++i) {
      sum += load_lanes(row + (block * values + i) * kLanes);
    }
    store_lanes(sums + block * kLanes, sum);
  }
}

template <class Activation>
void gate_rows_by(float limit, float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const f32v x = clamped_gate(load_columns(gate, 1, i, count), limit);
    const f32v y = clamped_up<Activation>(load_columns(up, 1, i, count), limit);
    store_columns(gate, i, count, Activation::template value<Accuracy::kFloat32>(x) * y);
  }
}

void gate_rows(const GateOptions& options, float* gate, const float* up, int64_t count) {
  switch (options.activation) {
    case Activation::kSilu:
      return gate_rows_by<SiluActivation>(options.limit, gate, up, count);
    case Activation::kGelu:
      return gate_rows_by<GeluActivation>(options.limit, gate, up, count);
    case Activation::kGeluTanh:
      return gate_rows_by<GeluTanhActivation>(options.limit, gate, up, count);
    case Activation::kRelu2:
      return gate_rows_by<Relu2Activation>(options.limit, gate, up, count);
    case Activation::kSwigluOai:
      return gate_rows_by<SwigluOaiActivation>(options.limit, gate, up, count);
  }
}

void add(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store_lanes(to + i, load_lanes(to + i) + load_lanes(from + i));
  }
}

void store_dense(KernelDtype dtype, const float* from, int64_t count, void* to) {
  with_elements(dtype, [&](auto element) {
    auto* const out = static_cast<decltype(element)*>(to);
    for (int64_t i = 0; i < count; i += kLanes) {
      store_columns(out, i, count, load_columns(from, 1, i, count));
    }
  });
}

}  // namespace

void quantized_load_row(KernelDtype dtype,
                        const void* from,
                        int64_t columns,
                        int32_t values,
                        int64_t vectors,
                        float* to,
                        int64_t pair_step) {
  with_elements(dtype, [&](auto element) {
    const auto* const in = static_cast<const decltype(element)*>(from);
    for (int64_t first = 0; first < vectors; first += values) {
      for (int i = 0; i < values; ++i) {  // natural order at first
        const int64_t column = (first + i) * kLanes;
        float* const out = vector_at(to, first + i, pair_step);
        store_lanes(out, column < columns ? load_columns(in, 1, column, columns) : f32v{});
      }
      if (values == 1) {
        continue;
      }
      float block[32 * kLanes];
      for (int i = 0; i < values; ++i) {
        std::memcpy(block + i * kLanes, vector_at(to, first + i, pair_step), sizeof(f32v));
      }
      for (int i = 0; i < values; ++i) {
        float* const out = vector_at(to, first + i, pair_step);
        for (int lane = 0; lane < kLanes; ++lane) {
          out[lane] = block[lane * values + i];
        }
      }
    }
  });
}

void quantized_store_row(KernelDtype dtype,
                         const float* from,
                         int64_t pair_step,
                         int32_t values,
                         int64_t columns,
                         void* to) {
  with_elements(dtype, [&](auto element) {
    auto* const out = static_cast<decltype(element)*>(to);
    const int64_t block_columns = int64_t{values} * kLanes;
    for (int64_t first = 0; first < columns; first += block_columns) {
      float block[32 * kLanes];
      for (int i = 0; i < values; ++i) {
        const int64_t vector = first / kLanes + i;
        const float* const in = from + vector / 2 * pair_step + vector % 2 * kLanes;
        for (int lane = 0; lane < kLanes; ++lane) {
          block[lane * values + i] = in[lane];
        }
      }
      for (int64_t c = 0; c < block_columns && first + c < columns; c += kLanes) {
        store_columns(out, first + c, columns, load_lanes(block + c));
      }
    }
  });
}

constinit const QuantizedCpuKernels quantized_cpu_kernels_table = {
    .lanes = kLanes,
    .panel = kPanel,
    .tile_rows = kTileRows,
    .load_row = quantized_load_row,
    .store_row = quantized_store_row,
    .add = add,
    .largest = largest,
    .scale = scale,
    .store_dense = store_dense,
    .block_sums = block_sums,
    .gate = gate_rows,
    .gemv = quantized_gemv_kernel,
    .gemv_scratch = quantized_gemv_scratch,
    .int_row_bytes = quantized_int_row_bytes,
    .int_pack = quantized_int_pack,
    .int_gemv = quantized_int_gemv,
    .int_gemv_scratch = quantized_int_gemv_scratch,
    .plain_gemv = quantized_plain_gemv,
    .int_plain_columns = quantized_int_plain_columns,
    .int_plain_skipped = quantized_int_plain_skipped,
    .int_plain_order = quantized_int_plain_order,
    .int_plain_gemv = quantized_int_plain_gemv,
    .gemm = quantized_gemm_kernel,
    .gemm_scratch = quantized_gemm_scratch,
    .int_gemm = {.columns = quantized_int_gemm_columns,
                 .packed_bytes = quantized_int_gemm_bytes,
                 .pack = quantized_int_gemm_pack,
                 .multiply = quantized_int_gemm,
                 .scratch = quantized_int_gemm_scratch},
    .int_plain_gemm = {.columns = quantized_int_plain_gemm_columns,
                       .packed_bytes = quantized_int_plain_gemm_bytes,
                       .pack = quantized_int_plain_gemm_pack,
                       .multiply = quantized_int_plain_gemm,
                       .scratch = quantized_int_plain_gemm_scratch},
    .scale_gradient = {.packed = quantized_scale_gradient_packed,
                       .sums = quantized_scale_gradient_sums,
                       .scratch = quantized_scale_gradient_scratch,
                       .pack = quantized_scale_gradient_pack,
                       .multiply = quantized_scale_gradient},
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
