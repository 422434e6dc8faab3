#include "quantized_embedding/primitive.h"

#include <algorithm>
#include <string>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/errors.h"
#include "quantized_embedding/cpu.h"
#include "quantized_embedding/gpu.h"
#include "quantized_embedding/quantized_embedding.h"
#include "quantized_embedding/scale_gradient.h"
#include "quantized_matmul/quantized_primitive.h"

namespace mlx_anvil {

namespace {

// This many elements take 0.2 ms on two cores. A round trip to the thread of MLX's CPU stream takes
// 0.1 ms.
constexpr int64_t kMostElementsAtOnce = 1 << 20;

// Takes the requested rows of each array of a matrix. Keeps one axis for a scalar id, because MLX
// dequantises matrices only.
QuantizedMatrix rows_of(const QuantizedMatrix& matrix, const mx::array& ids, mx::Stream s) {
  const mx::array some = ids.ndim() == 0 ? mx::expand_dims(ids, 0, s) : ids;
  const auto take = [&](const mx::array& x) { return mx::take(x, some, 0, s); };
  return {take(matrix.w), take(matrix.scales),
          matrix.biases ? std::optional(take(*matrix.biases)) : std::nullopt};
}

mx::array without_row(const mx::array& rows, const mx::array& ids, mx::Stream s) {
  return ids.ndim() == 0 ? mx::squeeze(rows, 0, s) : rows;
}

// Inputs: ids, w, scales, and biases for affine formats.
class QuantizedEmbedding : public QuantizedPrimitive {
 public:
  QuantizedEmbedding(mx::Stream stream, const QuantizedFormat& format, mx::Dtype dtype)
      : QuantizedPrimitive(stream, kQuantizedEmbedding, format), dtype_(dtype) {}

  const char* kind() const override { return "QuantizedEmbedding"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& o = static_cast<const QuantizedEmbedding&>(other);
    return format_ == o.format_ && dtype_ == o.dtype_;
  }

  // Widens scales and biases to float32 before the take, so that gradients of repeated ids
  // accumulate in float32.
  Arrays compose(const Arrays& inputs) override {
    QuantizedMatrix wide = matrix(inputs);
    if (wide.biases) {
      wide.scales = mx::astype(wide.scales, mx::float32, stream());
      wide.biases = mx::astype(*wide.biases, mx::float32, stream());
    }
    const QuantizedMatrix rows = rows_of(wide, inputs[0], stream());
    const mx::array numbers =
        mx::astype(compose_dequantized(format_, rows, stream()), dtype_, stream());
    return {without_row(numbers, inputs[0], stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.push_back(inputs[2].shape(-1) * format_.group);
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs[0], stream());
    dispatch_cpu(kQuantizedEmbedding, inputs, outputs, args_of(inputs, outputs[0]),
                 quantized_embedding_cpu);
  }

  // Computes the rows eagerly on the calling thread. All inputs must be available.
  mx::array rows_at_once(const Arrays& inputs) {
    mx::array out(std::move(output_shapes(inputs)[0]), dtype_, nullptr, {});
    allocate_dense(out, stream());
    const int64_t begin = trace_clock();
    quantized_embedding_cpu(args_of(inputs, out));
    record_on_cpu(*this, [&] { return kernel_text(kQuantizedEmbedding, out); }, span_since(begin));
    out.set_status(mx::array::Status::available);
    return out;
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs[0], stream());
    if (outputs[0].size() > 0) {
      quantized_embedding_gpu(format_, inputs[0], weights_at(format_, inputs, 1), outputs[0],
                              stream());
    }
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    require_floats(argnums);
    const Arrays both =
        apply_embedding_scale_gradient(format_, cotangents[0], primals[0], primals[1], stream());
    Arrays gradients;
    for (int i : argnums) {
      gradients.push_back(both[i - 2]);
    }
    return gradients;
  }

  // The rows are linear in scales and biases, so their tangent is the same lookup with the tangents
  // of scales and biases. A missing tangent is zero.
  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    require_floats(argnums);
    QuantizedMatrix moved = matrix(primals);
    moved.scales = mx::zeros_like(moved.scales, stream());
    moved.biases = mx::zeros_like(*moved.biases, stream());
    for (size_t i = 0; i < argnums.size(); ++i) {
      (argnums[i] == 2 ? moved.scales : *moved.biases) = tangents[i];
    }
    return {apply_quantized_embedding(format_, primals[0], moved, dtype_, stream())};
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const bool one_matrix =
        std::all_of(axes.begin() + 1, axes.end(), [](int axis) { return axis < 0; });
    if (!one_matrix && format_.has_biases()) {
      return FusedPrimitive::batched(inputs, axes);
    }
    if (!one_matrix) {  // MLX has no vmap over codes of float formats, so loop over the matrices
      Arrays rows;
      for (const Arrays& own : elements_of(inputs, axes, stream())) {
        rows.push_back(apply_quantized_embedding(format_, own[0], matrix(own), dtype_, stream()));
      }
      return {{mx::stack(rows, 0, stream())}, {0}};
    }
    return {{apply_quantized_embedding(format_, inputs[0], matrix(inputs), dtype_, stream())},
            {axes[0]}};
  }

 private:
  QuantizedEmbeddingArgs args_of(const Arrays& inputs, mx::array& out) const {
    QuantizedEmbeddingArgs args{};
    args.ids = row_ids(inputs[0]);
    args.matrix = {format_, kernel_dtype_of(out), out.shape(-1), inputs[1].shape(0),
                   pointers_of(weights_at(format_, inputs, 1))};
    args.dtype = kernel_dtype_of(out);
    args.out = out.data<void>();
    return args;
  }

  QuantizedMatrix matrix(const Arrays& inputs) const { return matrix_at(format_, inputs, 1); }

  void require_floats(const std::vector<int>& argnums) const {
    for (int i : argnums) {
      if (i < 2 || !format_.has_biases()) {
        const char* const names[] = {"ids", "w", "scales", "biases"};
        throw_value_error(kQuantizedEmbedding,
                          std::string("no gradient in ") + names[i] +
                              ", which holds integers; allowed: scales and biases of mode "
                              "'affine'.");
      }
    }
  }

  const mx::Dtype dtype_;
};

// True if all inputs are available and the result is small, as for the rows of a prompt. A graph
// node would only add latency.
bool can_be_had_at_once(const QuantizedFormat& format, const Arrays& inputs, mx::Stream s) {
  const int64_t rows = static_cast<int64_t>(inputs[0].size());
  const int64_t columns = int64_t{inputs[2].shape(-1)} * format.group;
  return s.device == mx::Device::cpu && !simulation_mode().on &&
         rows * columns <= kMostElementsAtOnce &&
         std::all_of(inputs.begin(), inputs.end(), is_evaluated_dense);
}

}  // namespace

RowIds row_ids(const mx::array& ids) {
  return {ids.data<void>(), static_cast<int64_t>(ids.size()), ids.itemsize() == 8,
          mx::issubdtype(ids.dtype(), mx::signedinteger)};
}

mx::array apply_quantized_embedding(const QuantizedFormat& format,
                                    mx::array ids,
                                    QuantizedMatrix matrix,
                                    mx::Dtype dtype,
                                    mx::Stream s) {
  std::string why_not;
  if (s.device == mx::Device::gpu && !can_launch(s.device, &why_not)) {
    note_fallback(kQuantizedEmbedding, why_not);
    const QuantizedMatrix rows = rows_of(matrix, ids, s);
    const mx::array numbers =
        mx::dequantize(rows.w, rows.scales, rows.biases, format.group, format.bits,
                       mode_name(format.kind), std::nullopt, dtype, s);
    return without_row(numbers, ids, s);
  }
  auto primitive = std::make_shared<QuantizedEmbedding>(s, format, dtype);
  Arrays inputs = inputs_with(std::move(ids), std::move(matrix));
  if (can_be_had_at_once(format, inputs, s)) {
    return primitive->rows_at_once(inputs);
  }
  return output_of(std::move(primitive), dtype, std::move(inputs));
}

}  // namespace mlx_anvil
