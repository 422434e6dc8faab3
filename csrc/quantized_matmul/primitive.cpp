#include "quantized_matmul/primitive.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/isa.h"
#include "common/trace.h"
#include "mlx/backend/cpu/encoder.h"
#include "quantized_matmul/gpu.h"
#include "quantized_matmul/native.h"
#include "silu_gate/silu_gate.h"

namespace mlx_anvil {

namespace {

QuantizedProduct other(QuantizedProduct product) {
  return product == QuantizedProduct::kTransposed ? QuantizedProduct::kPlain
                                                  : QuantizedProduct::kTransposed;
}

QuantizedDtype dtype_of(const mx::array& x) {
  return x.dtype() == mx::float32   ? QuantizedDtype::kFloat32
         : x.dtype() == mx::float16 ? QuantizedDtype::kFloat16
                                    : QuantizedDtype::kBfloat16;
}

// The arrays of a matrix among the inputs of a primitive, and back.
void append(Arrays& inputs, const QuantizedMatrix& matrix, mx::Stream s) {
  inputs.push_back(mx::contiguous(matrix.w, false, s));
  inputs.push_back(mx::contiguous(matrix.scales, false, s));
  if (matrix.biases) {
    inputs.push_back(mx::contiguous(*matrix.biases, false, s));
  }
}

QuantizedMatrix matrix_at(const QuantizedFormat& format, const Arrays& inputs, size_t at) {
  return {inputs[at], inputs[at + 1],
          format.has_biases() ? std::optional(inputs[at + 2]) : std::nullopt};
}

QuantizedWeights weights_of(const QuantizedMatrix& matrix) {
  return {matrix.w.data<uint32_t>(), matrix.scales.data<void>(),
          matrix.biases ? matrix.biases->data<void>() : nullptr};
}

QuantizedWeightArrays arrays_of(const QuantizedMatrix& matrix) {
  return {&matrix.w, &matrix.scales, matrix.biases ? &*matrix.biases : nullptr};
}

// "affine4_g64"
std::string format_text(const QuantizedFormat& format) {
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

  // Runs `kernel(args)` on the stream, with all arrays registered.
  template <class Args>
  void dispatch_native(const std::string& variant,
                       const Arrays& inputs,
                       mx::array& output,
                       const Args& args,
                       void (*kernel)(const Args&)) {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const mx::array& input : inputs) {
      encoder.set_input_array(input);
    }
    encoder.set_output_array(output);
    encoder.dispatch([args, kernel] { kernel(args); });
    if (tracing()) {
      const std::string name = variant + "_" + to_text(output.dtype()) + "_" + format_text(format_);
      const std::string device = std::string("cpu (") + isa_name(current_isa()) + ")";
      record({TraceEvent::Kind::kKernel, op(), name, device, {}, {}, ""});
    }
  }

  const char* const op_;
  const QuantizedFormat format_;
};

// ---- quantized_matmul ---------------------------------------------------------------------------

class QuantizedMatmul : public QuantizedPrimitive {
 public:
  QuantizedMatmul(mx::Stream stream,
                  const char* op,
                  const QuantizedFormat& format,
                  QuantizedProduct product)
      : QuantizedPrimitive(stream, op, format), product_(product) {}

  const char* name() const override { return "AnvilQuantizedMatmul"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& o = static_cast<const QuantizedMatmul&>(other);
    return format_ == o.format_ && product_ == o.product_;
  }

  Arrays compose(const Arrays& inputs) override {
    return {compose_quantized_matmul(format_, product_, inputs[0], matrix(inputs), stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = product_ == QuantizedProduct::kTransposed ? inputs[1].shape(-2)
                                                             : inputs[2].shape(-1) * format_.group;
    return {shape};
  }

  void eval_native(const Arrays& inputs, Arrays& outputs) override {
    outputs[0].set_data(allocate(outputs[0].nbytes(), device()));
    QuantizedMatmulArgs args{};
    args.dtype = dtype_of(inputs[0]);
    args.format = format_;
    args.product = product_;
    args.sizes = quantized_sizes(format_, inputs[0], inputs[1]);
    args.weights = weights_of(matrix(inputs));
    args.x = inputs[0].data<void>();
    args.out = outputs[0].data<void>();
    const bool few = args.sizes.rows <= kQuantizedGemvRows;
    const bool transposed = product_ == QuantizedProduct::kTransposed;
    dispatch_native(!transposed ? "quantized_matmul_plain"
                    : few       ? "quantized_gemv"
                                : "quantized_matmul_transposed",
                    inputs, outputs[0], args, quantized_matmul_native);
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    outputs[0].set_data(allocate(outputs[0].nbytes(), device()));
    if (outputs[0].size() > 0) {
      const QuantizedMatrix weights = matrix(inputs);
      quantized_matmul_gpu(format_, quantized_sizes(format_, inputs[0], inputs[1]), product_,
                           inputs[0], arrays_of(weights), outputs[0], stream());
    }
  }

 protected:
  // In x by the other product of the same w; in scales and biases by the graph of MLX ops.
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override {
    Arrays gradients;
    for (int i : argnums) {
      if (i == 0) {
        gradients.push_back(apply_quantized_matmul(op_, format_, other(product_), cotangents[0],
                                                   matrix(primals), stream()));
        continue;
      }
      require_differentiable(i, 1);
      gradients.push_back(FusedPrimitive::gradient(primals, cotangents, {i}, outputs)[0]);
    }
    return gradients;
  }

  // The weights are linear in scales and biases, so that every tangent is a product of this kind.
  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    std::optional<mx::array> sum;
    const auto add = [&](const mx::array& x, const QuantizedMatrix& weights) {
      const mx::array term = apply_quantized_matmul(op_, format_, product_, x, weights, stream());
      sum = sum ? mx::add(*sum, term, stream()) : term;
    };
    QuantizedMatrix moved = matrix(primals);
    bool weights_move = false;
    if (format_.has_biases()) {
      moved.scales = mx::zeros_like(moved.scales, stream());
      moved.biases = mx::zeros_like(*moved.biases, stream());
    }
    for (size_t i = 0; i < argnums.size(); ++i) {
      if (argnums[i] == 0) {
        add(tangents[i], matrix(primals));
        continue;
      }
      require_differentiable(argnums[i], 1);
      weights_move = true;
      (argnums[i] == 2 ? moved.scales : *moved.biases) = tangents[i];
    }
    if (weights_move) {
      add(primals[0], moved);
    }
    return {*sum};
  }

  // vmap's axis becomes more rows where w is shared, and part of the batch otherwise.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::Stream s = stream();
    int count = 1;
    for (size_t i = 0; i < inputs.size(); ++i) {
      count = axes[i] < 0 ? count : inputs[i].shape(axes[i]);
    }
    const bool own_weights =
        std::any_of(axes.begin() + 1, axes.end(), [](int axis) { return axis >= 0; });
    const size_t w_rank = inputs[1].ndim() - (axes[1] >= 0);
    if (!own_weights && w_rank == 2) {
      return {{apply_quantized_matmul(op_, format_, product_,
                                      mx::moveaxis(inputs[0], axes[0], 0, s), matrix(inputs), s)},
              {0}};
    }
    Arrays front;
    for (size_t i = 0; i < inputs.size(); ++i) {
      mx::array x =
          axes[i] < 0 ? mx::expand_dims(inputs[i], 0, s) : mx::moveaxis(inputs[i], axes[i], 0, s);
      mx::Shape shape = x.shape();
      shape[0] = count;
      front.push_back(mx::broadcast_to(x, shape, s));
    }
    mx::Shape shape = front[0].shape();
    if (w_rank == 2) {
      const int rows = std::accumulate(shape.begin() + 1, shape.end() - 1, 1, std::multiplies<>());
      front[0] = mx::reshape(front[0], {count, rows, shape.back()}, s);
    }
    const mx::array out =
        apply_quantized_matmul(op_, format_, product_, front[0], matrix(front), s);
    shape.back() = out.shape(-1);
    return {{mx::reshape(out, shape, s)}, {0}};
  }

 private:
  QuantizedMatrix matrix(const Arrays& inputs) const { return matrix_at(format_, inputs, 1); }

  const QuantizedProduct product_;
};

// ---- quantized_swiglu ---------------------------------------------------------------------------

class QuantizedSwiglu : public QuantizedPrimitive {
 public:
  QuantizedSwiglu(mx::Stream stream, const QuantizedFormat& format)
      : QuantizedPrimitive(stream, "quantized_swiglu", format) {}

  const char* name() const override { return "AnvilQuantizedSwiglu"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           format_ == static_cast<const QuantizedSwiglu&>(other).format_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::array x = mx::astype(inputs[0], mx::float32, s);
    const auto product = [&](const QuantizedMatrix& matrix) {
      return compose_quantized_matmul(format_, QuantizedProduct::kTransposed, x, matrix, s);
    };
    return {mx::astype(compose_swiglu(product(gate(inputs)), product(up(inputs)), s),
                       inputs[0].dtype(), s)};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(-2);
    return {shape};
  }

  void eval_native(const Arrays& inputs, Arrays& outputs) override {
    outputs[0].set_data(allocate(outputs[0].nbytes(), device()));
    QuantizedSwigluArgs args{};
    args.dtype = dtype_of(inputs[0]);
    args.format = format_;
    args.sizes = sizes(inputs);
    args.gate = weights_of(gate(inputs));
    args.up = weights_of(up(inputs));
    args.x = inputs[0].data<void>();
    args.out = outputs[0].data<void>();
    dispatch_native("quantized_swiglu", inputs, outputs[0], args, quantized_swiglu_native);
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    outputs[0].set_data(allocate(outputs[0].nbytes(), device()));
    if (outputs[0].size() > 0) {
      const QuantizedMatrix gate_matrix = gate(inputs), up_matrix = up(inputs);
      quantized_swiglu_gpu(format_, sizes(inputs), inputs[0], arrays_of(gate_matrix),
                           arrays_of(up_matrix), outputs[0], stream());
    }
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    return mx::vjp(of_selected(primals, argnums), select(primals, argnums), cotangents).second;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    return mx::jvp(of_selected(primals, argnums), select(primals, argnums), tangents).second;
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    return {mx::vmap([this](const Arrays& in) { return in_steps(in); }, axes)(inputs), {0}};
  }

 private:
  QuantizedMatrix gate(const Arrays& inputs) const { return matrix_at(format_, inputs, 1); }
  QuantizedMatrix up(const Arrays& inputs) const {
    return matrix_at(format_, inputs, 1 + arrays_per_matrix());
  }
  QuantizedSizes sizes(const Arrays& inputs) const {
    return quantized_sizes(format_, inputs[0], inputs[1]);
  }

  // By ops that have fused derivatives of their own.
  Arrays in_steps(const Arrays& inputs) {
    const auto product = [&](const QuantizedMatrix& matrix) {
      return apply_quantized_matmul(op_, format_, QuantizedProduct::kTransposed, inputs[0], matrix,
                                    stream());
    };
    return {silu_gate(product(gate(inputs)), product(up(inputs)), stream())};
  }

  static Arrays select(const Arrays& primals, const std::vector<int>& argnums) {
    Arrays selected;
    for (int i : argnums) {
      selected.push_back(primals[i]);
    }
    return selected;
  }

  std::function<Arrays(const Arrays&)> of_selected(const Arrays& primals,
                                                   const std::vector<int>& argnums) {
    return [this, primals, argnums](const Arrays& values) {
      Arrays all = primals;
      for (size_t i = 0; i < argnums.size(); ++i) {
        all[argnums[i]] = values[i];
      }
      return in_steps(all);
    };
  }
};

bool for_gpu(mx::Stream s) {
  return s.device == mx::Device::gpu || simulation_mode().on;
}

}  // namespace

QuantizedSizes quantized_sizes(const QuantizedFormat& format,
                               const mx::array& x,
                               const mx::array& w) {
  QuantizedSizes sizes;
  sizes.columns = int64_t{32} * w.shape(-1) / format.bits;
  sizes.outputs = w.shape(-2);
  for (int i = 0; i + 2 < static_cast<int>(w.ndim()); ++i) {
    sizes.batch *= w.shape(i);
  }
  sizes.rows = 1;
  const int first_row_axis = w.ndim() == 2 ? 0 : static_cast<int>(x.ndim()) - 2;
  for (int i = std::max(0, first_row_axis); i + 1 < static_cast<int>(x.ndim()); ++i) {
    sizes.rows *= x.shape(i);
  }
  return sizes;
}

mx::array apply_quantized_matmul(const char* op,
                                 const QuantizedFormat& format,
                                 QuantizedProduct product,
                                 const mx::array& x,
                                 const QuantizedMatrix& matrix,
                                 mx::Stream s) {
  if (for_gpu(s)) {
    const QuantizedSizes sizes = quantized_sizes(format, x, matrix.w);
    if (const char* why_not = why_no_quantized_matmul_gpu(format, sizes, product, x.dtype())) {
      note_fallback(op, why_not);
      return mlx_quantized_matmul(format, product, x, matrix, s);
    }
  }
  Arrays inputs = {mx::contiguous(x, false, s)};
  append(inputs, matrix, s);
  auto primitive = std::make_shared<QuantizedMatmul>(s, op, format, product);
  return mx::array(primitive->output_shapes(inputs)[0], x.dtype(), primitive, inputs);
}

mx::array apply_quantized_swiglu(const QuantizedFormat& format,
                                 const mx::array& x,
                                 const QuantizedMatrix& gate,
                                 const QuantizedMatrix& up,
                                 mx::Stream s) {
  constexpr const char* op = "quantized_swiglu";
  const QuantizedSizes sizes = quantized_sizes(format, x, gate.w);
  const char* why_not =
      for_gpu(s) ? why_no_quantized_swiglu_gpu(format, sizes, x.dtype()) : nullptr;
  if (why_not) {
    note_fallback(op, why_not);
  }
  if (why_not || sizes.rows > kQuantizedGemvRows) {
    const auto product = [&](const QuantizedMatrix& matrix) {
      return apply_quantized_matmul(op, format, QuantizedProduct::kTransposed, x, matrix, s);
    };
    return silu_gate(product(gate), product(up), s);
  }
  Arrays inputs = {mx::contiguous(x, false, s)};
  append(inputs, gate, s);
  append(inputs, up, s);
  auto primitive = std::make_shared<QuantizedSwiglu>(s, format);
  return mx::array(primitive->output_shapes(inputs)[0], x.dtype(), primitive, inputs);
}

}  // namespace mlx_anvil
