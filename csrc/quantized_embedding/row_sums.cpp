#include "quantized_embedding/row_sums.h"

#include <memory>
#include <utility>
#include <vector>

#include "common/errors.h"
#include "common/plan.h"
#include "common/vmap_axis.h"
#include "quantized_embedding/quantized_embedding.h"

namespace mlx_anvil {

namespace {

mx::array add_rows(const mx::array& table, const mx::array& ids, const mx::array& x, mx::Stream s);

// MLX's scatter_add() along the first axis. MLX (0.32.4) gives it no forward-mode derivative and no
// shapes for compile(shapeless=True). Inputs: a table [rows, K], ids [n], x [n, 1, K].
class RowSums : public FusedPrimitive {
 public:
  using FusedPrimitive::FusedPrimitive;

  const char* op() const override { return kQuantizedEmbedding; }
  const char* kind() const override { return "RowSums"; }

  Arrays compose(const Arrays& inputs) override {
    return {mx::scatter_add(inputs[0], inputs[1], inputs[2], 0, stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape()};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    scatter_primitive(inputs)->eval_cpu(inputs, outputs);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (planning()) {
      outputs[0].set_data(planned_memory());
    } else if (stream().device == mx::Device::gpu) {
      scatter_primitive(inputs)->eval_gpu(inputs, outputs);
    } else {  // inside simulate()
      eval_cpu_kernels(inputs, outputs);
    }
  }

 protected:
  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    mx::array sum = mx::zeros_like(primals[0], stream());
    for (size_t i = 0; i < argnums.size(); ++i) {
      require_float(argnums[i]);
      sum = argnums[i] == 0 ? mx::add(sum, tangents[i], stream())
                            : add_rows(sum, primals[1], tangents[i], stream());
    }
    return {sum};
  }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    Arrays gradients;
    for (int i : argnums) {
      require_float(i);
      gradients.push_back(
          i == 0 ? cotangents[0]
                 : mx::expand_dims(mx::take(cotangents[0], primals[1], 0, stream()), 1, stream()));
    }
    return gradients;
  }

  // The tables of the elements become one table, and each element's ids point into its own part.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::Stream s = stream();
    const int count = vmap_length(inputs, axes);
    Arrays all;
    for (size_t i = 0; i < inputs.size(); ++i) {
      all.push_back(repeated_over_vmap(inputs[i], axes[i], 0, count, s));
    }
    const int rows = all[0].shape(1), columns = all[0].shape(2), n = all[1].shape(1);
    const mx::array own = mx::where(mx::less(all[1], mx::array(0), s),
                                    mx::add(all[1], mx::array(rows), s), all[1], s);
    const mx::array first =
        mx::multiply(mx::arange(0, count, 1, mx::int64, s), mx::array(int64_t{rows}), s);
    const mx::array ids = mx::add(own, mx::expand_dims(first, 1, s), s);
    const mx::array table =
        add_rows(mx::reshape(all[0], {count * rows, columns}, s), mx::reshape(ids, {count * n}, s),
                 mx::reshape(all[2], {count * n, 1, columns}, s), s);
    return {{mx::reshape(table, {count, rows, columns}, s)}, {0}};
  }

 private:
  std::shared_ptr<mx::Primitive> scatter_primitive(const Arrays& inputs) {
    return compose(inputs)[0].primitive_ptr();
  }

  static void require_float(int argument) {
    if (argument == 1) {
      throw_value_error(kQuantizedEmbedding, "no gradient in ids, which holds integers.");
    }
  }
};

mx::array add_rows(const mx::array& table, const mx::array& ids, const mx::array& x, mx::Stream s) {
  return output_of(std::make_shared<RowSums>(s), table.dtype(), {table, ids, x});
}

}  // namespace

mx::array sum_rows(const mx::array& x, const mx::array& ids, int rows, mx::Stream s) {
  return add_rows(mx::zeros({rows, x.shape(-1)}, x.dtype(), s), ids, mx::expand_dims(x, 1, s), s);
}

}  // namespace mlx_anvil
