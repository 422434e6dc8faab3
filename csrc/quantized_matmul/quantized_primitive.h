// What the primitives of quantized products share.
#pragma once

#include <string>

#include "common/checks.h"
#include "common/errors.h"
#include "common/run_native.h"
#include "common/simulate.h"
#include "common/trace.h"
#include "quantized_matmul/gpu.h"
#include "quantized_matmul/primitive.h"

namespace mlx_anvil {

inline QuantizedDtype dtype_of(const mx::array& x) {
  return x.dtype() == mx::float32   ? QuantizedDtype::kFloat32
         : x.dtype() == mx::float16 ? QuantizedDtype::kFloat16
                                    : QuantizedDtype::kBfloat16;
}

// The arrays of a matrix among the inputs of a primitive, and back.
inline void append(Arrays& inputs, const QuantizedMatrix& matrix, mx::Stream s) {
  inputs.push_back(dense(matrix.w, s));
  inputs.push_back(dense(matrix.scales, s));
  if (matrix.biases) {
    inputs.push_back(dense(*matrix.biases, s));
  }
}

inline QuantizedMatrix matrix_at(const QuantizedFormat& format, const Arrays& inputs, size_t at) {
  return {inputs[at], inputs[at + 1],
          format.has_biases() ? std::optional(inputs[at + 2]) : std::nullopt};
}

inline QuantizedWeights weights_of(const QuantizedMatrix& matrix) {
  return {matrix.w.data<uint32_t>(), matrix.scales.data<void>(),
          matrix.biases ? matrix.biases->data<void>() : nullptr};
}

inline QuantizedWeightArrays arrays_of(const QuantizedMatrix& matrix) {
  return {&matrix.w, &matrix.scales, matrix.biases ? &*matrix.biases : nullptr};
}

// "affine4_g64"
inline std::string format_text(const QuantizedFormat& format) {
  const std::string bits = format.has_biases() ? std::to_string(format.bits) : "";
  return mode_name(format.kind) + bits + "_g" + std::to_string(format.group);
}

class QuantizedPrimitive : public FusedPrimitive {
 public:
  QuantizedPrimitive(mx::Stream stream, const char* op, const QuantizedFormat& format)
      : FusedPrimitive(stream), op_(op), format_(format) {}

  const char* op() const override { return op_; }

 protected:
  size_t arrays_per_matrix() const { return 2 + format_.has_biases(); }

  // Arguments count from 1 behind x; `at` is the first of their matrix.
  void require_differentiable(size_t argument, size_t at) const {
    if (argument == at) {
      throw_value_error(op_, "no gradient in w, which holds integer codes; allowed: x" +
                                 std::string(format_.has_biases() ? ", scales, biases." : "."));
    }
    if (!format_.has_biases()) {
      throw_value_error(op_, std::string("no gradient in scales of mode '") +
                                 mode_name(format_.kind) + "', which are 8-bit codes; allowed: x.");
    }
  }

  template <class Args>
  void dispatch_native(const std::string& variant,
                       const Arrays& inputs,
                       Arrays& outputs,
                       const Args& args,
                       void (*kernel)(const Args&)) {
    run_native(
        *this, inputs, outputs, [args, kernel] { kernel(args); },
        [&] {
          return variant + "_" + to_text(outputs.back().dtype()) + "_" + format_text(format_);
        });
  }

  const char* const op_;
  const QuantizedFormat format_;
};

inline bool for_gpu(mx::Stream s) {
  return s.device == mx::Device::gpu || simulation_mode().on;
}

}  // namespace mlx_anvil
