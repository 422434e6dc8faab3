// Products of quantized layers in a patched model: reads the layers' arrays without Python code.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <utility>
#include <vector>

#include "common/bind_op.h"
#include "common/block.h"
#include "common/python_args.h"
#include "common/simulate.h"
#include "quantized_matmul/primitive.h"
#include "quantized_matmul/python_matrix.h"
#include "quantized_matmul/quantized_matmul.h"
#include "quantized_matmul/shared_input.h"

namespace mlx_anvil {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Layers of one module, with one format.
class QuantizedLayers {
 public:
  // `layers` are weak references, so that the layers' functions may own this.
  QuantizedLayers(std::vector<nb::object> layers,
                  std::optional<int> group_size,
                  std::optional<int> bits,
                  std::string mode,
                  std::optional<int> activation_bits)
      : layers_(std::move(layers)),
        options_{group_size, bits, std::move(mode), activation_bits},
        shared_(checked_format("quantized_matmul", options_), layers_.size()) {}

  // The product of x with a layer's matrix; none if the layer's own method has to run: on a GPU,
  // and for what is an error.
  std::optional<mx::array> multiply(size_t layer, nb::handle module, nb::handle x) {
    const mx::Stream s = mx::to_stream({});
    if (for_gpu(s) || composing()) {
      return std::nullopt;
    }
    const mx::array* rows = nullptr;
    const std::optional<QuantizedMatrix> matrix = matrix_of(module);
    if (!matrix || !nb::try_cast(x, rows) || !rows) {
      return std::nullopt;
    }
    const auto other = [this](size_t i) { return matrix_of(layers_[i]()); };
    if (auto out = shared_.multiply(layer, *rows, *matrix, other, s)) {
      return out;
    }
    try {
      return quantized_matmul(*rows, *matrix, /*transpose=*/true, options_, s);
    } catch (const std::exception&) {  // the method raises its own error
      return std::nullopt;
    }
  }

 private:
  // `module` is a dict, as every mlx.nn.Module, or None.
  std::optional<QuantizedMatrix> matrix_of(nb::handle module) const {
    if (!PyDict_Check(module.ptr())) {
      return std::nullopt;
    }
    const auto item = [&](const nb::str& name) {
      const mx::array* array = nullptr;
      const nb::handle value = PyDict_GetItemWithError(module.ptr(), name.ptr());
      return value && nb::try_cast(value, array) ? array : nullptr;
    };
    const mx::array *const w = item(weight_), *const scales = item(scales_),
                           *const biases = item(biases_);
    if (!w || !scales) {
      return std::nullopt;
    }
    return QuantizedMatrix{*w, *scales, biases ? std::optional(*biases) : std::nullopt};
  }

  const std::vector<nb::object> layers_;
  const QuantizedOptions options_;
  const nb::str weight_{"weight"}, scales_{"scales"}, biases_{"biases"};
  SharedInput shared_;
};

const BindOp bind_quantized_layers([](nb::module_& m) {
  m.def(
      "_quantized_products",
      [](nb::handle x, nb::list matrices, std::optional<int> group_size, std::optional<int> bits,
         const std::string& mode) {
        constexpr const char* op = "quantized_matmul";
        const mx::array& rows = to_array(op, "x", x);
        const QuantizedFormat format = checked_format(op, {group_size, bits, mode});
        std::vector<QuantizedMatrix> all;
        for (nb::handle parts : matrices) {
          all.push_back(to_quantized_tuple(op, "matrix", parts));
          check_matrix(op, "", format, all.back(), columns_of(rows));
        }
        return apply_quantized_products(format, rows, std::move(all), mx::to_stream({}));
      },
      "x"_a, "matrices"_a, "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(),
      "mode"_a = "affine",
      nb::sig("def _quantized_products(x: mlx.core.array, matrices: list[tuple[mlx.core.array, "
              "...]], group_size: int | None = None, bits: int | None = None, mode: str = 'affine')"
              " -> list[mlx.core.array]"));
  nb::class_<QuantizedLayers>(m, "_QuantizedLayers")
      .def(nb::init<std::vector<nb::object>, std::optional<int>, std::optional<int>, std::string,
                    std::optional<int>>(),
           "layers"_a, "group_size"_a.none(), "bits"_a.none(), "mode"_a, "activation_bits"_a.none())
      .def("multiply", &QuantizedLayers::multiply, "layer"_a, "module"_a, "x"_a.none(),
           nb::sig("def multiply(self, layer: int, module: dict[str, object], x: object) -> "
                   "mlx.core.array | None"));
});

}  // namespace

}  // namespace mlx_anvil
