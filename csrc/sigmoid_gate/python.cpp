#include "common/bind_op.h"
#include "common/python_args.h"
#include "sigmoid_gate/sigmoid_gate.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kDoc =
    R"(A gate on an output: ``x * sigmoid(gate)``, elementwise, in one kernel.

Formula:
    ``out = x / (1 + exp(-gate))``

Shapes broadcast, and dtypes promote by MLX's rules. The arithmetic is float32 for every dtype, and
is rounded once to the result's dtype. Inputs may have any strides and are not copied.

One fused kernel computes the gradients of both inputs, and another the forward-mode derivative.
Higher derivatives use a graph of MLX ops. ``vmap`` works over either or both inputs.

Args:
    x (array): float32, float16 or bfloat16, of any shape.
    gate (array): float32, float16 or bfloat16, of a shape that broadcasts with that of ``x``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: the broadcast shape and the promoted dtype.

Raises:
    TypeError: an argument is not an ``mlx.core.array``, or ``stream`` is not a stream or device.
    ValueError: a dtype is unsupported, shapes do not broadcast, or the stream is on a GPU and MLX
        has no GPU backend.

Matches ``x * mx.sigmoid(gate)`` (Qiu et al. 2025, "Gated Attention for Large Language Models").
)";

mx::array sigmoid_gate_of_python(nb::handle x, nb::handle gate, nb::handle stream) {
  return sigmoid_gate(to_array(kSigmoidGate, "x", x), to_array(kSigmoidGate, "gate", gate),
                      to_stream_or_device(kSigmoidGate, stream));
}

const BindOp bind_sigmoid_gate([](nb::module_& m) {
  m.def("sigmoid_gate", sigmoid_gate_of_python, "x"_a.none(), "gate"_a.none(), nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def sigmoid_gate(x: mlx.core.array, gate: mlx.core.array, *, "
                "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"),
        kDoc);
});

}  // namespace

}  // namespace mlx_anvil
