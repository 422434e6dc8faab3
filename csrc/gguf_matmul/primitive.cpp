#include "gguf_matmul/primitive.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <string_view>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/evaluate.h"
#include "common/run_on_cpu.h"
#include "common/vmap_axis.h"
#include "gguf_matmul/checks.h"
#include "gguf_matmul/compose.h"
#include "gguf_matmul/cpu.h"
#include "gguf_matmul/gpu.h"
#include "quantized_matmul/quantized_primitive.h"

namespace mlx_anvil {

namespace {

class GgufPrimitive : public FusedPrimitive {
 public:
  GgufPrimitive(mx::Stream stream, const char* op, const GgufFormat& format)
      : FusedPrimitive(stream), op_(op), format_(format) {}

  const char* op() const override { return op_; }

 protected:
  bool wants_dense(size_t) const override { return true; }

  [[noreturn]] void refuse_gradient(const char* argument, const char* allowed) const {
    throw_value_error(op_, std::string("no gradient in ") + argument +
                               ", which holds integers; allowed: " + allowed + ".");
  }

  std::string kernel_text(const char* variant, const mx::array& out) const {
    return std::string(variant) + "_" + to_text(out.dtype()) + "_" + gguf_mode_name(format_.kind);
  }

  const char* const op_;
  const GgufFormat format_;
};

class GgufMatmul : public GgufPrimitive {
 public:
  GgufMatmul(mx::Stream stream, const char* op, const GgufFormat& format, QuantizedProduct product)
      : GgufPrimitive(stream, op, format), product_(product) {}

  const char* kind() const override { return "GgufMatmul"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& same = static_cast<const GgufMatmul&>(other);
    return format_ == same.format_ && product_ == same.product_;
  }

  Arrays compose(const Arrays& inputs) override {
    return {compose_gguf_matmul(format_.kind, product_, inputs[0], inputs[1], stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = product_ == QuantizedProduct::kTransposed
                       ? inputs[1].shape(-2)
                       : static_cast<int>(gguf_columns(format_.kind, inputs[1]));
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
    GgufMatmulArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.kind = format_.kind;
    args.activation_bits = format_.activation_bits;
    args.product = product_;
    args.sizes = gguf_sizes(format_.kind, inputs[0], inputs[1]);
    args.w = inputs[1].data<uint8_t>();
    args.x = inputs[0].data<void>();
    args.out = outputs[0].data<void>();
    const char* const variant = product_ == QuantizedProduct::kPlain    ? "gguf_plain"
                                : args.sizes.rows <= kQuantizedGemvRows ? "gguf_gemv"
                                                                        : "gguf_transposed";
    run_on_cpu(
        *this, inputs, outputs, [args] { gguf_matmul_cpu(args); },
        [&] { return kernel_text(variant, outputs[0]); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (outputs[0].size() == 0) {
      outputs[0].set_data(allocate(0, stream()));
      return;
    }
    if (inputs[0].size() == 0) {  // sums without terms
      set_zeros(outputs[0], stream());
      return;
    }
    const QuantizedSizes sizes = gguf_sizes(format_.kind, inputs[0], inputs[1]);
    if (is_gemv() && sizes.rows <= kQuantizedGemvRows) {
      gguf_gemv_gpu(format_.kind, sizes, inputs[0], inputs[1], outputs[0], stream());
    } else {
      gguf_matmul_gpu(format_.kind, sizes, product_, inputs[0], inputs[1], outputs[0], stream());
    }
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    require_x(argnums);
    return {apply_gguf_matmul(op_, {format_.kind}, other(product_), cotangents[0], primals[1],
                              stream())};
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    require_x(argnums);
    return {apply_gguf_matmul(op_, {format_.kind}, product_, tangents[0], primals[1], stream())};
  }

  // The vmap axis adds rows if w is shared; otherwise it becomes a batch axis.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::Stream s = stream();
    const size_t w_rank = inputs[1].ndim() - (axes[1] >= 0);
    if (axes[1] < 0 && w_rank == 2) {
      return {{apply_gguf_matmul(op_, format_, product_, mx::moveaxis(inputs[0], axes[0], 0, s),
                                 inputs[1], s)},
              {0}};
    }
    Arrays front = with_vmap_in_front(inputs, axes, s);
    mx::Shape shape = front[0].shape();
    if (w_rank == 2) {
      const int rows = std::accumulate(shape.begin() + 1, shape.end() - 1, 1, std::multiplies<>());
      front[0] = mx::reshape(front[0], {shape[0], rows, shape.back()}, s);
    }
    const mx::array out = apply_gguf_matmul(op_, format_, product_, front[0], front[1], s);
    shape.back() = out.shape(-1);
    return {{mx::reshape(out, shape, s)}, {0}};
  }

 private:
  void require_x(const std::vector<int>& argnums) const {
    if (std::any_of(argnums.begin(), argnums.end(), [](int i) { return i != 0; })) {
      refuse_gradient("w", "x");
    }
  }

  // Rows of quantized_gemv have the same bits however many they are; other products of 3 to 8 rows
  // may take another kernel.
  bool is_gemv() const {
    return product_ == QuantizedProduct::kTransposed && std::string_view(op_) == "quantized_gemv";
  }

  const QuantizedProduct product_;
};

// Inputs: ids, w.
class GgufRows : public GgufPrimitive {
 public:
  GgufRows(mx::Stream stream, const char* op, GgufKind kind, mx::Dtype dtype)
      : GgufPrimitive(stream, op, {kind}), dtype_(dtype) {}

  const char* kind() const override { return "GgufRows"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& same = static_cast<const GgufRows&>(other);
    return format_ == same.format_ && dtype_ == same.dtype_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::array rows = mx::take(inputs[1], inputs[0], 0, stream());
    return {mx::astype(compose_gguf_dequantized(format_.kind, rows, stream()), dtype_, stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.push_back(static_cast<int>(gguf_columns(format_.kind, inputs[1])));
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs[0], stream());
    const mx::array& ids = inputs[0];
    GgufRowsArgs args{};
    args.ids = {ids.data<void>(), static_cast<int64_t>(ids.size()), ids.itemsize() == 8,
                mx::issubdtype(ids.dtype(), mx::signedinteger)};
    args.kind = format_.kind;
    args.dtype = kernel_dtype_of(outputs[0]);
    args.rows = inputs[1].shape(0);
    args.columns = outputs[0].shape(-1);
    args.w = inputs[1].data<uint8_t>();
    args.out = outputs[0].data<void>();
    run_on_cpu(
        *this, inputs, outputs, [args] { gguf_rows_cpu(args); },
        [&] { return kernel_text("gguf_rows", outputs[0]); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (outputs[0].size() == 0) {
      outputs[0].set_data(allocate(0, stream()));
    } else {
      gguf_rows_gpu(format_.kind, inputs[1], inputs[0], outputs[0], stream());
    }
  }

 protected:
  Arrays gradient(const Arrays&,
                  const Arrays&,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    refuse(argnums);
  }
  Arrays tangent(const Arrays&, const Arrays&, const std::vector<int>& argnums) override {
    refuse(argnums);
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    if (axes[1] < 0) {
      return {{apply_gguf_rows(op_, format_.kind, inputs[0], inputs[1], dtype_, stream())},
              {axes[0]}};
    }
    Arrays rows;
    const mx::Stream s = stream();
    const Arrays front = with_vmap_in_front(inputs, axes, s);
    for (int i = 0; i < front[1].shape(0); ++i) {
      const mx::array own = mx::array(i);
      rows.push_back(apply_gguf_rows(op_, format_.kind, mx::take(front[0], own, 0, s),
                                     mx::take(front[1], own, 0, s), dtype_, s));
    }
    return {{mx::stack(rows, 0, s)}, {0}};
  }

 private:
  [[noreturn]] void refuse(const std::vector<int>& argnums) const {
    refuse_gradient(argnums.at(0) == 0 ? "ids" : "w", "no argument");
  }

  const mx::Dtype dtype_;
};

}  // namespace

QuantizedSizes gguf_sizes(GgufKind kind, const mx::array& x, const mx::array& w) {
  return sizes_with_columns(gguf_columns(kind, w), x, w);
}

mx::array apply_gguf_matmul(const char* op,
                            const GgufFormat& format,
                            QuantizedProduct product,
                            mx::array x,
                            mx::array w,
                            mx::Stream s) {
  std::string why_not;
  if (for_gpu(s) && !can_launch_gguf(format.kind, gguf_sizes(format.kind, x, w), s, &why_not)) {
    note_fallback(op, why_not);
    return compose_gguf_matmul(format.kind, product, x, w, s);
  }
  const mx::Dtype dtype = x.dtype();
  return output_of(std::make_shared<GgufMatmul>(s, op, format, product), dtype,
                   {std::move(x), std::move(w)});
}

mx::array apply_gguf_rows(
    const char* op, GgufKind kind, mx::array ids, mx::array w, mx::Dtype dtype, mx::Stream s) {
  std::string why_not;
  if (for_gpu(s) && !can_launch(s.device, &why_not)) {
    note_fallback(op, why_not);
    return mx::astype(compose_gguf_dequantized(kind, mx::take(w, ids, 0, s), s), dtype, s);
  }
  return output_of(std::make_shared<GgufRows>(s, op, kind, dtype), dtype,
                   {std::move(ids), std::move(w)});
}

}  // namespace mlx_anvil
