#include "common/bind_op.h"
#include "common/errors.h"
#include "common/python_args.h"
#include "norm/after_sum.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

bool is_sigmoid(const char* op, nb::handle gate_activation) {
  std::string name;
  if (!nb::try_cast(gate_activation, name)) {
    throw_type_error(op, "gate_activation", gate_activation, "'silu' or 'sigmoid'");
  }
  if (name != "silu" && name != "sigmoid") {
    throw_value_error(op, "gate_activation is '" + name + "'; allowed: 'silu' or 'sigmoid'.");
  }
  return name == "sigmoid";
}

// The array in `value`, which the caller may give another node.
mx::array& to_mutable_array(const char* op, nb::handle value) {
  return const_cast<mx::array&>(to_array(op, "x", value));
}

nb::object to_python(const NormResult& result) {
  const auto& [y, h] = result;
  return h ? nb::object(nb::make_tuple(y, *h)) : nb::cast(y);
}

// Two overloads tell type checkers how a residual changes the result type.
#define MLX_ANVIL_RMS_NORM_SIGNATURE(residual, result)                                            \
  "def rms_norm(x: mlx.core.array, weight: mlx.core.array | None = None, eps: float = 1e-05, *, " \
  "residual: " residual                                                                           \
  ", gate: mlx.core.array | None = None, gate_activation: str = 'silu', "                         \
  "weight_offset: float = 0.0, "                                                                  \
  "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> " result

#define MLX_ANVIL_LAYER_NORM_SIGNATURE(residual, result)                           \
  "def layer_norm(x: mlx.core.array, weight: mlx.core.array | None = None, "       \
  "bias: mlx.core.array | None = None, eps: float = 1e-05, *, residual: " residual \
  ", "                                                                             \
  "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> " result

#define MLX_ANVIL_PAIR "tuple[mlx.core.array, mlx.core.array]"

constexpr const char* kRmsNormDoc =
    R"(Root mean square norm over the last axis, with optional residual and gate in one kernel.

Formula:
    ``h = x + residual``; ``y = h / sqrt(mean(h**2) + eps) * (weight_offset + weight) * silu(gate)``,
    omitting the terms of absent arguments

With ``residual``, one kernel computes ``y`` and ``h``. The norm uses ``h`` as returned, rounded to
its dtype. Statistics and arithmetic are float32, rounded once to the result's dtype. Inputs may
have any strides and are not copied, so the heads of q and k may be views.

One kernel computes the gradients of ``x``, ``residual`` and ``gate``. The weight's gradient is
summed in two passes and is deterministic. Forward mode and higher derivatives use a graph of MLX
ops. ``vmap`` works over any of the arrays; it adds rows.

Args:
    x (array): ``[..., n]``; float32, float16 or bfloat16.
    weight (array, optional): ``[n]``; float32, float16 or bfloat16. Its dtype does not affect the
        dtype of the result.
    eps (float): added to the mean of squares. Default: ``1e-5``.
    residual (array, optional): added to ``x`` first; same shape as ``x``.
    gate (array, optional): ``y`` is multiplied by ``silu(gate)``; same shape as ``x``.
    gate_activation (str): ``"silu"``, or ``"sigmoid"``, which multiplies by ``sigmoid(gate)``.
        Default: ``"silu"``.
    weight_offset (float): added to the weight. Use 1 for models that store weights minus 1, such as
        Gemma. Default: 0.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array or tuple[array, array]: ``y``, or ``(y, h)`` with a residual; the shape of ``x`` and the
    promoted dtype of ``x``, ``residual`` and ``gate``.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes do not match, ``eps`` is negative, ``gate_activation`` is unknown, a dtype is unsupported, or the stream is
        on a GPU and MLX has no GPU backend.

After Zhang and Sennrich 2019, "Root Mean Square Layer Normalization". Matches
``mx.fast.rms_norm``.
)";

constexpr const char* kLayerNormDoc =
    R"(Layer norm over the last axis, with an optional residual in the same kernel.

Formula:
    ``h = x + residual``; ``y = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias``, omitting the
    terms of absent arguments

Rounding, strides, gradients and ``vmap`` are as for ``rms_norm``. The variance is computed as the
mean square of ``h - mean(h)``, which does not cancel if the mean is large.

Args:
    x (array): ``[..., n]``; float32, float16 or bfloat16.
    weight (array, optional): ``[n]``, as for ``rms_norm``.
    bias (array, optional): ``[n]``, as for ``weight``.
    eps (float): added to the variance. Default: ``1e-5``.
    residual (array, optional): added to ``x`` first; same shape as ``x``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array or tuple[array, array]: ``y``, or ``(y, h)`` with a residual, as for ``rms_norm``.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: as for ``rms_norm``.

After Ba, Kiros and Hinton 2016, "Layer Normalization". Matches ``mx.fast.layer_norm``.
)";

const BindOp bind_norm([](nb::module_& m) {
  const auto rms_norm_of_python =
      [](nb::handle x, nb::handle weight, nb::handle eps, nb::handle residual, nb::handle gate,
         nb::handle gate_activation, nb::handle weight_offset, nb::handle stream) {
        constexpr const char* op = "rms_norm";
        const mx::array& x_array = to_array(op, "x", x);
        std::optional<mx::array> weights = to_optional_array(op, "weight", weight);
        NormOptions options;
        options.eps = to_float32(op, "eps", eps);
        options.weight_offset = to_float32(op, "weight_offset", weight_offset);
        options.residual = to_optional_array(op, "residual", residual);
        options.gate = to_optional_array(op, "gate", gate);
        options.gate_is_sigmoid = is_sigmoid(op, gate_activation);
        return to_python(rms_norm(x_array, std::move(weights), std::move(options),
                                  to_stream_or_device(op, stream)));
      };
  for (const char* signature : {MLX_ANVIL_RMS_NORM_SIGNATURE("None = None", "mlx.core.array"),
                                MLX_ANVIL_RMS_NORM_SIGNATURE("mlx.core.array", MLX_ANVIL_PAIR)}) {
    m.def("rms_norm", rms_norm_of_python, "x"_a.none(), "weight"_a = nb::none(),
          "eps"_a.none() = 1e-5, nb::kw_only(), "residual"_a = nb::none(), "gate"_a = nb::none(),
          "gate_activation"_a.none() = "silu", "weight_offset"_a.none() = 0.0,
          "stream"_a = nb::none(), nb::sig(signature), kRmsNormDoc);
  }

  const auto layer_norm_of_python = [](nb::handle x, nb::handle weight, nb::handle bias,
                                       nb::handle eps, nb::handle residual, nb::handle stream) {
    constexpr const char* op = "layer_norm";
    const mx::array& x_array = to_array(op, "x", x);
    std::optional<mx::array> weights = to_optional_array(op, "weight", weight);
    NormOptions options;
    options.bias = to_optional_array(op, "bias", bias);
    options.eps = to_float32(op, "eps", eps);
    options.residual = to_optional_array(op, "residual", residual);
    return to_python(layer_norm(x_array, std::move(weights), std::move(options),
                                to_stream_or_device(op, stream)));
  };
  for (const char* signature : {MLX_ANVIL_LAYER_NORM_SIGNATURE("None = None", "mlx.core.array"),
                                MLX_ANVIL_LAYER_NORM_SIGNATURE("mlx.core.array", MLX_ANVIL_PAIR)}) {
    m.def("layer_norm", layer_norm_of_python, "x"_a.none(), "weight"_a = nb::none(),
          "bias"_a = nb::none(), "eps"_a.none() = 1e-5, nb::kw_only(), "residual"_a = nb::none(),
          "stream"_a = nb::none(), nb::sig(signature), kLayerNormDoc);
  }

  // The norms of patched models: see norm/after_sum.h.
  m.def(
      "_rms_norm_after_sum",
      [](nb::handle x, nb::handle weight, nb::handle eps, nb::handle weight_offset,
         nb::handle stream) {
        constexpr const char* op = "rms_norm";
        mx::array& x_array = to_mutable_array(op, x);
        NormOptions options;
        options.eps = to_float32(op, "eps", eps);
        options.weight_offset = to_float32(op, "weight_offset", weight_offset);
        return norm_after_sum(/*centred=*/false, x_array, to_optional_array(op, "weight", weight),
                              std::move(options), to_stream_or_device(op, stream));
      },
      "x"_a.none(), "weight"_a.none(), "eps"_a.none(), "weight_offset"_a.none() = 0.0,
      "stream"_a = nb::none(),
      nb::sig("def _rms_norm_after_sum(x: mlx.core.array, weight: mlx.core.array | None, "
              "eps: float, weight_offset: float = 0.0, "
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"));
  m.def(
      "_layer_norm_after_sum",
      [](nb::handle x, nb::handle weight, nb::handle bias, nb::handle eps, nb::handle stream) {
        constexpr const char* op = "layer_norm";
        mx::array& x_array = to_mutable_array(op, x);
        NormOptions options;
        options.eps = to_float32(op, "eps", eps);
        options.bias = to_optional_array(op, "bias", bias);
        return norm_after_sum(/*centred=*/true, x_array, to_optional_array(op, "weight", weight),
                              std::move(options), to_stream_or_device(op, stream));
      },
      "x"_a.none(), "weight"_a.none(), "bias"_a.none(), "eps"_a.none(), "stream"_a = nb::none(),
      nb::sig("def _layer_norm_after_sum(x: mlx.core.array, weight: mlx.core.array | None, "
              "bias: mlx.core.array | None, eps: float, "
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"));
});

}  // namespace

}  // namespace mlx_anvil
