#include "common/matrix_product.h"

#include <memory>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "mlx/primitives.h"

namespace mlx_anvil {

namespace {

using Arrays = std::vector<mx::array>;

mx::array transposed(const mx::array& x, mx::Stream s) {
  return mx::swapaxes(x, -1, -2, s);
}

// Evaluates by MLX's primitive, which it holds: MLX does not export the class to derive from.
class Product : public mx::Primitive {
 public:
  explicit Product(std::shared_ptr<mx::Primitive> matmul)
      : mx::Primitive(matmul->stream()), matmul_(std::move(matmul)) {}

  // The name by which it is exported. It has no state, as MLX's has none.
  const char* name() const override { return "Matmul"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return typeid(*this) == typeid(other);
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return matmul_->output_shapes(inputs);
  }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    matmul_->eval_cpu(inputs, outputs);
  }
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    matmul_->eval_gpu(inputs, outputs);
  }

  Arrays vjp(const Arrays& primals,
             const Arrays& cotangents,
             const std::vector<int>& argnums,
             const Arrays&) override {
    Arrays gradients;
    for (int i : argnums) {
      gradients.push_back(
          i == 0 ? matrix_product(cotangents[0], transposed(primals[1], stream()), stream())
                 : matrix_product(transposed(primals[0], stream()), cotangents[0], stream()));
    }
    return gradients;
  }

  // MLX adds the second term by addmm.
  Arrays jvp(const Arrays& primals,
             const Arrays& tangents,
             const std::vector<int>& argnums) override {
    Arrays terms;
    for (size_t i = 0; i < argnums.size(); ++i) {
      terms.push_back(argnums[i] == 0 ? matrix_product(tangents[i], primals[1], stream())
                                      : matrix_product(primals[0], tangents[i], stream()));
    }
    return {terms.size() == 1 ? terms[0] : mx::add(terms[0], terms[1], stream())};
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs,
                                           const std::vector<int>& axes) override {
    const auto front = [&](size_t i) {
      return axes[i] > 0 ? mx::moveaxis(inputs[i], axes[i], 0, stream()) : inputs[i];
    };
    return {{matrix_product(front(0), front(1), stream())}, {0}};
  }

 private:
  const std::shared_ptr<mx::Primitive> matmul_;
};

}  // namespace

mx::array matrix_product(const mx::array& a, const mx::array& b, mx::Stream stream) {
  const mx::array by_mlx = mx::matmul(a, b, stream);
  const std::string_view last = by_mlx.primitive().name();
  if (last == "Unflatten") {  // several axes of a, and a matrix b
    mx::Shape rows(a.shape().begin(), a.shape().end() - 1);
    return mx::unflatten(matrix_product(by_mlx.inputs()[0].inputs()[0], b, stream), 0,
                         std::move(rows), stream);
  }
  if (last != "Matmul") {
    return by_mlx;
  }
  return mx::array(by_mlx.shape(), by_mlx.dtype(),
                   std::make_shared<Product>(by_mlx.primitive_ptr()), by_mlx.inputs());
}

}  // namespace mlx_anvil
