#include "quantized_head/primitive.h"

#include <algorithm>
#include <functional>
#include <string>

#include "common/allocate.h"
#include "common/checks.h"
#include "quantized_head/cpu.h"
#include "quantized_head/gpu.h"
#include "quantized_matmul/quantized_primitive.h"

namespace mlx_anvil {

namespace {

// Uses MLX's stable ascending argsort, in which NaN is the largest, on the reversed logits: read
// from the end, the best come first and ties keep their order. Avoids mx::arange and mx::take over
// the logits, which would fix their shape in a shapeless graph.
mx::array indices_of_best(const mx::array& logits, int kept, mx::Stream s) {
  const mx::array ones = mx::astype(mx::ones_like(logits, s), mx::uint32, s);
  const mx::array backwards = mx::cumsum(ones, -1, /*reverse=*/true, /*inclusive=*/false, s);
  const mx::array order = mx::argsort(mx::take_along_axis(logits, backwards, -1, s), -1, s);
  const mx::array count = mx::number_of_elements(logits, {-1}, false, mx::uint32, s);
  const mx::array last = mx::subtract(count, mx::array(1, mx::uint32), s);
  mx::Shape one_row(logits.ndim(), 1);
  one_row.back() = kept;
  const mx::array kept_ones = mx::reshape(mx::arange(0, kept, 1, mx::uint32, s), one_row, s);
  const mx::array from_last = mx::take_along_axis(order, mx::subtract(last, kept_ones, s), -1, s);
  return mx::subtract(last, from_last, s);
}

// Inputs: x, w, scales, and biases for affine formats. Outputs: indices and values.
class QuantizedHead : public QuantizedPrimitive {
 public:
  QuantizedHead(mx::Stream stream, const char* op, const QuantizedFormat& format, int kept)
      : QuantizedPrimitive(stream, op, format), kept_(kept) {}

  const char* kind() const override { return "QuantizedHead"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& o = static_cast<const QuantizedHead&>(other);
    return format_ == o.format_ && kept_ == o.kept_;
  }

  Arrays compose(const Arrays& inputs) override {
    // MLX's CUDA backend has no quantized product for float32 x.
    const bool by_mlx = stream().device == mx::Device::cpu || mx::metal::is_available();
    const auto product = by_mlx ? mlx_quantized_matmul : compose_quantized_matmul;
    const mx::array logits =
        product(format_, QuantizedProduct::kTransposed, inputs[0], matrix(inputs), stream());
    const mx::array indices = mx::stop_gradient(indices_of_best(logits, kept_, stream()), stream());
    return {indices, mx::take_along_axis(logits, indices, -1, stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = kept_;
    return {shape, shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_outputs(outputs);
    const QuantizedSizes sizes = quantized_sizes(format_, inputs[0], inputs[1]);
    QuantizedHeadArgs args{};
    args.matrix = {format_, kernel_dtype_of(inputs[0]), sizes.columns, sizes.outputs,
                   pointers_of(weights_at(format_, inputs, 1))};
    args.rows = sizes.rows;
    args.kept = kept_;
    args.x = inputs[0].data<void>();
    args.indices = outputs[0].data<uint32_t>();
    args.values = outputs[1].data<void>();
    dispatch_cpu("quantized_head", inputs, outputs, args, quantized_head_cpu);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_outputs(outputs);
    if (outputs[0].size() > 0) {
      quantized_head_gpu(format_, quantized_sizes(format_, inputs[0], inputs[1]), inputs[0],
                         weights_at(format_, inputs, 1), outputs[0], outputs[1], stream());
    }
  }

 protected:
  // Indices have no gradient, as in mx.argmax. Values are products with the selected rows of w.
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override {
    const auto values = values_at(outputs[0], primals, argnums);
    return mx::vjp(values, chosen(primals, argnums), {cotangents[1]}).second;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    const mx::array indices =
        apply_quantized_head(op_, format_, primals[0], matrix(primals), kept_, stream()).indices;
    const auto values = values_at(indices, primals, argnums);
    return {mx::zeros_like(indices, stream()),
            mx::jvp(values, chosen(primals, argnums), tangents).second[0]};
  }

  // The vmap axis adds rows if w is shared; otherwise loops over the matrices.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::Stream s = stream();
    if (std::all_of(axes.begin() + 1, axes.end(), [](int axis) { return axis < 0; })) {
      const mx::array rows = mx::moveaxis(inputs[0], axes[0], 0, s);
      const BestLogits best = apply_quantized_head(op_, format_, rows, matrix(inputs), kept_, s);
      return {{best.indices, best.values}, {0, 0}};
    }
    Arrays indices, values;
    for (const Arrays& own : elements_of(inputs, axes, s)) {
      const BestLogits best = apply_quantized_head(op_, format_, own[0], matrix(own), kept_, s);
      indices.push_back(best.indices);
      values.push_back(best.values);
    }
    return {{mx::stack(indices, 0, s), mx::stack(values, 0, s)}, {0, 0}};
  }

 private:
  using Function = std::function<Arrays(const Arrays&)>;

  QuantizedMatrix matrix(const Arrays& inputs) const { return matrix_at(format_, inputs, 1); }

  void allocate_outputs(Arrays& outputs) {
    for (mx::array& output : outputs) {
      output.set_data(allocate(output.nbytes(), stream()));
    }
  }

  static Arrays chosen(const Arrays& primals, const std::vector<int>& argnums) {
    Arrays arrays;
    for (int i : argnums) {
      arrays.push_back(primals[i]);
    }
    return arrays;
  }

  // Returns the logits at `indices` as a function of the chosen inputs. Each row of x gets a matrix
  // of its selected rows of w, so the product has derivatives of every order. In float32, because
  // gradients accumulate over rows of x that selected the same row of w.
  Function values_at(const mx::array& indices,
                     const Arrays& primals,
                     const std::vector<int>& argnums) {
    for (int i : argnums) {
      if (i > 0) {
        require_differentiable(i, 1);
      }
    }
    const mx::Stream s = stream();
    const auto wide = [s](const mx::array& x) {
      return mx::issubdtype(x.dtype(), mx::floating) ? mx::astype(x, mx::float32, s) : x;
    };
    const mx::array rows = mx::stop_gradient(indices, s);
    return [=, this](const Arrays& values) -> Arrays {
      Arrays inputs = primals;
      for (size_t i = 0; i < argnums.size(); ++i) {
        inputs[argnums[i]] = wide(values[i]);
      }
      for (size_t i = 1; i < inputs.size(); ++i) {
        inputs[i] = wide(mx::take(inputs[i], rows, 0, s));
      }
      const mx::array x = wide(mx::expand_dims(inputs[0], -2, s));
      const mx::array logits = apply_quantized_matmul(
          op_, format_.exact(), QuantizedProduct::kTransposed, x, matrix(inputs), s);
      return {mx::astype(mx::squeeze(logits, -2, s), primals[0].dtype(), s)};
    };
  }

  const int kept_;
};

}  // namespace

BestLogits apply_quantized_head(const char* op,
                                const QuantizedFormat& format,
                                mx::array x,
                                QuantizedMatrix matrix,
                                int kept,
                                mx::Stream s) {
  const mx::Dtype dtype = x.dtype();
  const QuantizedSizes sizes = quantized_sizes(format, x, matrix.w);
  auto primitive = std::make_shared<QuantizedHead>(s, op, format, kept);
  Arrays inputs = inputs_with(std::move(x), std::move(matrix));
  std::string why_not;
  if (for_gpu(s) && !can_launch_quantized(sizes, s, &why_not, /*stores_results=*/false)) {
    note_fallback(op, why_not);
    const Arrays composed = primitive->compose(inputs);
    return {composed[0], composed[1]};
  }
  const Arrays outputs = outputs_of(std::move(primitive), {mx::uint32, dtype}, std::move(inputs));
  return {outputs[0], outputs[1]};
}

}  // namespace mlx_anvil
