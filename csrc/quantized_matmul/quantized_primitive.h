// Shared parts of the primitives of quantized products.
#pragma once

#include <string>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/run_on_cpu.h"
#include "common/simulate.h"
#include "common/trace.h"
#include "common/vmap_axis.h"
#include "quantized_matmul/gpu.h"
#include "quantized_matmul/primitive.h"

namespace mlx_anvil {

inline QuantizedProduct other(QuantizedProduct product) {
  return product == QuantizedProduct::kTransposed ? QuantizedProduct::kPlain
                                                  : QuantizedProduct::kTransposed;
}

// Packs a matrix into the inputs of a primitive. matrix_at and weights_at are the inverse.
inline void append(Arrays& inputs, QuantizedMatrix&& matrix) {
  inputs.push_back(std::move(matrix.w));
  inputs.push_back(std::move(matrix.scales));
  if (matrix.biases) {
    inputs.push_back(*std::move(matrix.biases));
  }
}

// Returns the inputs of a primitive with one matrix.
inline Arrays inputs_with(mx::array&& x, QuantizedMatrix&& matrix) {
  Arrays inputs;
  inputs.reserve(4);
  inputs.push_back(std::move(x));
  append(inputs, std::move(matrix));
  return inputs;
}

inline QuantizedMatrix matrix_at(const QuantizedFormat& format, const Arrays& inputs, size_t at) {
  return {inputs[at], inputs[at + 1],
          format.has_biases() ? std::optional(inputs[at + 2]) : std::nullopt};
}

inline QuantizedWeightArrays weights_at(const QuantizedFormat& format,
                                        const Arrays& inputs,
                                        size_t at) {
  return {&inputs[at], &inputs[at + 1], format.has_biases() ? &inputs[at + 2] : nullptr};
}

inline QuantizedWeights pointers_of(const QuantizedWeightArrays& weights) {
  QuantizedWeights pointers;
  pointers.w = weights.w->data<uint32_t>();
  pointers.scales = weights.scales->data<void>();
  if (weights.biases) {
    pointers.biases = weights.biases->data<void>();
    pointers.scale_dtype = kernel_dtype_of(*weights.scales);
  }
  return pointers;
}

// Returns the inputs of each vmap element. Uses slices, because mx::take rejects an x without
// elements.
inline std::vector<Arrays> elements_of(const Arrays& inputs,
                                       const std::vector<int>& axes,
                                       mx::Stream s) {
  const int count = vmap_length(inputs, axes);
  std::vector<Arrays> elements(count, inputs);
  for (int element = 0; element < count; ++element) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (axes[i] >= 0) {
        mx::Shape start(inputs[i].ndim(), 0), stop = inputs[i].shape();
        start[axes[i]] = element;
        stop[axes[i]] = element + 1;
        elements[element][i] = mx::squeeze(mx::slice(inputs[i], start, stop, s), axes[i], s);
      }
    }
  }
  return elements;
}

// "affine4_g64", or "affine4_g64_a8" with 8-bit activations.
inline std::string format_text(const QuantizedFormat& format) {
  const std::string bits = format.has_biases() ? std::to_string(format.bits) : "";
  const std::string activations =
      format.activation_bits > 0 ? "_a" + std::to_string(format.activation_bits) : "";
  return mode_name(format.kind) + bits + "_g" + std::to_string(format.group) + activations;
}

class QuantizedPrimitive : public FusedPrimitive {
 public:
  QuantizedPrimitive(mx::Stream stream, const char* op, const QuantizedFormat& format)
      : FusedPrimitive(stream), op_(op), format_(format) {}

  const char* op() const override { return op_; }

 protected:
  bool wants_dense(size_t) const override { return true; }

  size_t arrays_per_matrix() const { return 2 + format_.has_biases(); }

  // Argument indices include x; `at` is the index of the matrix's first argument.
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
  void dispatch_cpu(const std::string& variant,
                    const Arrays& inputs,
                    Arrays& outputs,
                    const Args& args,
                    void (*kernel)(const Args&)) {
    run_on_cpu(
        *this, inputs, outputs, [args, kernel] { kernel(args); },
        [&] { return kernel_text(variant, outputs.back()); });
  }

  // The forward-mode derivative of multiply(x, weights); nullopt if neither moves. Weights are
  // linear in scales and biases, so every term is again such a product. Inputs after the matrix are
  // ids.
  template <class Multiply>
  std::optional<mx::array> product_tangent(const Arrays& primals,
                                           const Arrays& tangents,
                                           const std::vector<int>& argnums,
                                           Multiply multiply) {
    std::optional<mx::array> sum;
    const auto add = [&](const mx::array& x, const QuantizedMatrix& weights) {
      const mx::array term = multiply(x, weights);
      sum = sum ? mx::add(*sum, term, stream()) : term;
    };
    const QuantizedMatrix still = matrix_at(format_, primals, 1);
    QuantizedMatrix moved = still;
    bool weights_move = false;
    if (format_.has_biases()) {
      moved.scales = mx::zeros_like(moved.scales, stream());
      moved.biases = mx::zeros_like(*moved.biases, stream());
    }
    for (size_t i = 0; i < argnums.size(); ++i) {
      if (argnums[i] == 0) {
        add(tangents[i], still);
      } else if (argnums[i] <= static_cast<int>(arrays_per_matrix())) {
        require_differentiable(argnums[i], 1);
        weights_move = true;
        (argnums[i] == 2 ? moved.scales : *moved.biases) = tangents[i];
      }
    }
    if (weights_move) {
      add(primals[0], moved);
    }
    return sum;
  }

  std::string kernel_text(const std::string& variant, const mx::array& out) const {
    return variant + "_" + to_text(out.dtype()) + "_" + format_text(format_);
  }

  const char* const op_;
  const QuantizedFormat format_;
};

}  // namespace mlx_anvil
