#include <iterator>
#include <optional>
#include <string>

#include "common/bind_op.h"
#include "common/errors.h"
#include "gated/python_args.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kDoc =
    R"(The gate of an MLP: ``activation(gate) * up``, elementwise, in one kernel.

Formula:
    ``out = activation(g) * u`` with ``g = gate`` and ``u = up``; with a limit,
    ``g = min(gate, limit)`` and ``u = clip(up, -limit, limit)``. The activations:

    - ``"silu"``: ``x / (1 + exp(-x))``
    - ``"gelu"``: ``x * (1 + erf(x / sqrt(2))) / 2``
    - ``"gelu_tanh"``: ``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``
    - ``"relu2"``: ``max(x, 0) ** 2``
    - ``"swiglu_oai"``: ``x / (1 + exp(-1.702 * x))``, and ``u + 1`` takes the place of ``u``

Shapes broadcast, and dtypes promote by MLX's rules. The arithmetic is float32 for every dtype, and
is rounded once to the result's dtype. Inputs may have any strides and are not copied.

One fused kernel computes the gradients of both inputs, and another the forward-mode derivative.
Where a clamp holds, a gradient is 0. Higher derivatives use a graph of MLX ops. ``vmap`` works over
either or both inputs.

Args:
    gate (array): float32, float16 or bfloat16, of any shape.
    up (array): float32, float16 or bfloat16, of a shape that broadcasts with that of ``gate``.
    activation (str): the name of an activation above. Default: ``"silu"``.
    limit (float, optional): bound of both inputs, finite and above 0. Default: ``None``, no bound;
        7.0 for ``"swiglu_oai"``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: the broadcast shape and the promoted dtype.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: ``activation`` is unknown, ``limit`` is not finite and above 0, a dtype is
        unsupported, shapes do not broadcast, or the stream is on a GPU and MLX has no GPU backend.

Matches ``mlx.nn.silu``, ``gelu``, ``gelu_approx`` and ``relu2``, times ``up`` (Shazeer 2020, "GLU
Variants Improve Transformer"), and ``swiglu_oai`` of mlx-lm.
)";

std::string allowed_activations() {
  std::string text;
  for (size_t i = 0; i < std::size(kActivations); ++i) {
    text += i == 0 ? "" : i + 1 < std::size(kActivations) ? ", " : " or ";
    text += std::string("'") + kActivations[i] + "'";
  }
  return text;
}

Activation to_activation(const char* op, nb::handle value) {
  std::string name;
  if (!nb::try_cast(value, name)) {
    throw_type_error(op, "activation", value, allowed_activations().c_str());
  }
  for (size_t i = 0; i < std::size(kActivations); ++i) {
    if (name == kActivations[i]) {
      return static_cast<Activation>(i);
    }
  }
  throw_value_error(op, "activation is '" + name + "'; allowed: " + allowed_activations() + ".");
}

mx::array gated_of_python(
    nb::handle gate, nb::handle up, nb::handle activation, nb::handle limit, nb::handle stream) {
  return gated(to_array(kGated, "gate", gate), to_array(kGated, "up", up),
               to_gate_options(kGated, activation, limit), to_stream_or_device(kGated, stream));
}

const BindOp bind_gated([](nb::module_& m) {
  m.def("gated", gated_of_python, "gate"_a.none(), "up"_a.none(), nb::kw_only(),
        "activation"_a.none() = "silu", "limit"_a = nb::none(), "stream"_a = nb::none(),
        nb::sig("def gated(gate: mlx.core.array, up: mlx.core.array, *, "
                "activation: str = 'silu', limit: float | None = None, "
                "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"),
        kDoc);
});

}  // namespace

GateOptions to_gate_options(const char* op, nb::handle activation, nb::handle limit) {
  return checked_gate(op, to_activation(op, activation),
                      limit.is_none()
                          ? std::nullopt
                          : std::optional(to_float32(op, "limit", limit, "None, or a number")));
}

}  // namespace mlx_anvil
