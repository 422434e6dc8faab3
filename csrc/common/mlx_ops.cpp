#include "common/mlx_ops.h"

#include <memory>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "common/evaluate.h"
#include "mlx/primitives.h"

namespace mlx_anvil {

namespace {

using Axes = std::vector<int>;

// Evaluates by a primitive of MLX, which it holds: the library does not export classes to derive
// from. The primitive has no state, so a file of mx.export_function() holds nothing but its name.
class MlxOp : public mx::Primitive {
 public:
  explicit MlxOp(std::shared_ptr<mx::Primitive> op)
      : mx::Primitive(op->stream()), op_(std::move(op)) {}

  const char* name() const override { return op_->name(); }

  bool is_equivalent(const mx::Primitive& other) const override {
    return typeid(*this) == typeid(other);
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return op_->output_shapes(inputs);
  }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override { op_->eval_cpu(inputs, outputs); }
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override { op_->eval_gpu(inputs, outputs); }

 protected:
  mx::array with_batch_in_front(const mx::array& x, int axis) {
    return axis > 0 ? mx::moveaxis(x, axis, 0, stream()) : x;
  }

 private:
  const std::shared_ptr<mx::Primitive> op_;
};

// The result of one of MLX's ops, as that of an Op.
template <class Op>
mx::array replaced(const mx::array& result) {
  return mx::array(result.shape(), result.dtype(), std::make_shared<Op>(result.primitive_ptr()),
                   result.inputs());
}

// ---- matrix products ----------------------------------------------------------------------------

class MatrixProduct : public MlxOp {
 public:
  using MlxOp::MlxOp;

  // Without rows, columns or terms, MLX 0.32.4 writes to freed memory if the other factor is a
  // strided view (docs/mlx-bugs.md).
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    if (inputs[0].size() > 0 && inputs[1].size() > 0) {
      MlxOp::eval_cpu(inputs, outputs);
      return;
    }
    set_zeros(outputs[0], stream());
  }

  Arrays vjp(const Arrays& primals,
             const Arrays& cotangents,
             const Axes& argnums,
             const Arrays&) override {
    Arrays gradients;
    for (int i : argnums) {
      const mx::array other = mx::swapaxes(primals[1 - i], -1, -2, stream());
      gradients.push_back(i == 0 ? matrix_product(cotangents[0], other, stream())
                                 : matrix_product(other, cotangents[0], stream()));
    }
    return gradients;
  }

  // MLX adds the second term by addmm, whose vmap is the one that raises.
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const Axes& argnums) override {
    Arrays terms;
    for (size_t i = 0; i < argnums.size(); ++i) {
      terms.push_back(argnums[i] == 0 ? matrix_product(tangents[i], primals[1], stream())
                                      : matrix_product(primals[0], tangents[i], stream()));
    }
    return {terms.size() == 1 ? terms[0] : mx::add(terms[0], terms[1], stream())};
  }

  std::pair<Arrays, Axes> vmap(const Arrays& inputs, const Axes& axes) override {
    return {{matrix_product(with_batch_in_front(inputs[0], axes[0]),
                            with_batch_in_front(inputs[1], axes[1]), stream())},
            {0}};
  }
};

// ---- choices ------------------------------------------------------------------------------------

class Choice : public MlxOp {
 public:
  using MlxOp::MlxOp;

  Arrays vjp(const Arrays& primals,
             const Arrays& cotangents,
             const Axes& argnums,
             const Arrays&) override {
    const mx::array none = mx::zeros_like(cotangents[0], stream());
    Arrays gradients;
    for (int i : argnums) {
      gradients.push_back(i == 0 ? mx::zeros_like(primals[0], stream())
                                 : choose(primals[0], i == 1 ? cotangents[0] : none,
                                          i == 2 ? cotangents[0] : none, stream()));
    }
    return gradients;
  }

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const Axes& argnums) override {
    const mx::array none = mx::zeros_like(primals[1], stream());
    Arrays of = {none, none, none};
    for (size_t i = 0; i < argnums.size(); ++i) {
      of[argnums[i]] = tangents[i];
    }
    return {choose(primals[0], of[1], of[2], stream())};
  }

  std::pair<Arrays, Axes> vmap(const Arrays& inputs, const Axes& axes) override {
    return {
        {choose(with_batch_in_front(inputs[0], axes[0]), with_batch_in_front(inputs[1], axes[1]),
                with_batch_in_front(inputs[2], axes[2]), stream())},
        {0}};
  }
};

}  // namespace

mx::array matrix_product(const mx::array& a, const mx::array& b, mx::Stream stream) {
  if (a.ndim() == 1) {
    return mx::squeeze(matrix_product(mx::expand_dims(a, 0, stream), b, stream), -2, stream);
  }
  if (b.ndim() == 1) {
    return mx::squeeze(matrix_product(a, mx::expand_dims(b, 1, stream), stream), -1, stream);
  }
  const mx::array by_mlx = mx::matmul(a, b, stream);
  const std::string_view last = by_mlx.primitive().name();
  if (last == "Unflatten") {  // several axes of a, and a matrix b
    mx::Shape rows(a.shape().begin(), a.shape().end() - 1);
    const mx::array product = replaced<MatrixProduct>(by_mlx.inputs()[0]);
    return mx::unflatten(product, 0, std::move(rows), stream);
  }
  return replaced<MatrixProduct>(by_mlx);
}

mx::array choose(const mx::array& condition,
                 const mx::array& a,
                 const mx::array& b,
                 mx::Stream stream) {
  return replaced<Choice>(mx::where(condition, a, b, stream));
}

}  // namespace mlx_anvil
