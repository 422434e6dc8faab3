// The arrays of one quantized product on a GPU, and what gpu*.cpp share to launch its kernels.
#pragma once

#include <algorithm>

#include "common/gate_options.h"
#include "common/inline_vector.h"
#include "common/launch.h"
#include "quantized_matmul/gpu_support.h"

namespace mlx_anvil {

struct QuantizedRequest {
  const mx::array& x;
  InlineVector<QuantizedWeightArrays, 2> matrices;
  mx::array& out;
  const mx::Stream& stream;
  GateOptions activation = {};  // of a swiglu

  QuantizedParams params(const QuantizedFormat& format, const QuantizedSizes& sizes) const {
    QuantizedParams params = params_of(format, sizes);
    params.activation = static_cast<int32_t>(activation.activation);
    params.limit = activation.limit;
    return params;
  }

  bool words_are_vectors(const QuantizedFormat& format) const {
    return std::all_of(matrices.begin(), matrices.end(), [&](const QuantizedWeightArrays& m) {
      return mlx_anvil::words_are_vectors(format, *m.w);
    });
  }

  // True if scales and biases can be loaded as vectors of up to four: those of 256 columns
  // (gemv_stage.h).
  bool factors_are_vectors(const QuantizedFormat& format) const {
    const int bytes = format.group == 128 ? 4 : 8;
    return std::all_of(matrices.begin(), matrices.end(), [&](const QuantizedWeightArrays& m) {
      return rows_are_vectors({m.scales, m.biases}, bytes);
    });
  }

  void launch_kernel(const KernelName& name,
                     const FunctionConstants& constants,
                     const QuantizedParams& params,
                     Extent grid,
                     int64_t threads = kGemvThreads,
                     int64_t threadgroup_memory = 0) const {
    KernelLaunch request{};
    request.kernel = &kernel_named("quantized_matmul", name, constants);
    request.inputs = {&x};
    for (const QuantizedWeightArrays& m : matrices) {
      request.inputs.append({m.w, m.scales, m.biases ? m.biases : &x});
    }
    request.outputs = {&out};
    request.params = &params;
    request.params_size = sizeof(params);
    request.grid = grid;
    request.threadgroup = {static_cast<uint32_t>(threads), 1, 1};
    if (threadgroup_memory > 0) {
      request.threadgroup_memory = {static_cast<uint32_t>(threadgroup_memory)};
    }
    launch(request, stream);
  }
};

// True if the kernels of x W^T for few rows use matrix units (gemv_matrix.metal). That must not
// depend on the number of rows from 1 to 8, or results would.
bool takes_matrix_units(const QuantizedFormat& format,
                        const QuantizedSizes& sizes,
                        const QuantizedRequest& request);

// x W for few rows (plain.metal).
void launch_quantized_plain(const QuantizedFormat& format,
                            const QuantizedSizes& sizes,
                            const QuantizedRequest& request);

// out = the sum of parts of its shape, in float32 and in order (plain.metal). They lie along the
// first axis.
void launch_quantized_sum(const Scratch& parts, mx::array& out, const mx::Stream& stream);

// Calls `launch_into` with `out`, or with scratch memory for several parts of it, and adds these
// up.
template <class LaunchInto>
void launch_in_parts(int64_t parts,
                     mx::array& out,
                     const mx::Stream& stream,
                     LaunchInto launch_into) {
  if (parts == 1) {
    launch_into(out);
    return;
  }
  mx::Shape shape = out.shape();
  shape.insert(shape.begin(), static_cast<int>(parts));
  Scratch partial(shape, mx::float32, stream);
  launch_into(*partial);
  launch_quantized_sum(partial, out, stream);
}

// Either product, for 9 and more rows (gemm_matrix.metal and gemm_plain.metal).
bool takes_quantized_gemm(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          const QuantizedRequest& request);
void launch_quantized_gemm(const QuantizedFormat& format,
                           const QuantizedSizes& sizes,
                           QuantizedProduct product,
                           const QuantizedRequest& request);

// Either product, for many rows (tiles.metal and matmul.metal).
void launch_quantized_tiles(const QuantizedFormat& format,
                            const QuantizedSizes& sizes,
                            QuantizedProduct product,
                            const QuantizedRequest& request);

// activation(x Wg^T) * (x Wu^T), for up to kQuantizedGemvRows rows (tiles.metal).
void launch_quantized_gated_tiles(const QuantizedFormat& format,
                                  const QuantizedSizes& sizes,
                                  const QuantizedRequest& request);

}  // namespace mlx_anvil
