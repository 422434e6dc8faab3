#include "quantized_matmul/gpu.h"

#include "common/errors.h"

namespace mlx_anvil {

namespace {
constexpr const char* kNone = "quantized matrices have CPU kernels only so far";
}

const char* why_no_quantized_matmul_gpu(const QuantizedFormat&,
                                        const QuantizedSizes&,
                                        QuantizedProduct,
                                        mx::Dtype) {
  return kNone;
}

const char* why_no_quantized_swiglu_gpu(const QuantizedFormat&, const QuantizedSizes&, mx::Dtype) {
  return kNone;
}

void quantized_matmul_gpu(const QuantizedFormat&,
                          const QuantizedSizes&,
                          QuantizedProduct,
                          const mx::array&,
                          const QuantizedWeightArrays&,
                          mx::array&,
                          const mx::Stream&) {
  throw_internal_error("quantized_matmul", kNone);
}

void quantized_swiglu_gpu(const QuantizedFormat&,
                          const QuantizedSizes&,
                          const mx::array&,
                          const QuantizedWeightArrays&,
                          const QuantizedWeightArrays&,
                          mx::array&,
                          const mx::Stream&) {
  throw_internal_error("quantized_swiglu", kNone);
}

}  // namespace mlx_anvil
