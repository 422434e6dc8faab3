#include "common/bind_op.h"
#include "common/python_args.h"
#include "silu_gate/silu_gate.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kDoc =
    R"(The gate of SwiGLU: ``silu(gate) * up``, elementwise, in one kernel.

Formula:
    ``out = gate / (1 + exp(-gate)) * up``

Shapes broadcast, and dtypes promote by MLX's rules. The arithmetic is float32 for every dtype, and
is rounded once to the result's dtype. Inputs may have any strides and are not copied.

One fused kernel computes the gradients of both inputs, and another the forward-mode derivative.
Higher derivatives use a graph of MLX ops. ``vmap`` works over either or both inputs.

Args:
    gate (array): float32, float16 or bfloat16, of any shape.
    up (array): float32, float16 or bfloat16, of a shape that broadcasts with that of ``gate``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: the broadcast shape and the promoted dtype.

Raises:
    TypeError: an argument is not an ``mlx.core.array``, or ``stream`` is not a stream or device.
    ValueError: a dtype is unsupported, shapes do not broadcast, or the stream is on a GPU and MLX
        has no GPU backend.

Matches ``mlx.nn.silu(gate) * up`` (Shazeer 2020, "GLU Variants Improve Transformer").
)";

mx::array silu_gate_of_python(nb::handle gate, nb::handle up, nb::handle stream) {
  return silu_gate(to_array(kSiluGate, "gate", gate), to_array(kSiluGate, "up", up),
                   to_stream_or_device(kSiluGate, stream));
}

const BindOp bind_silu_gate([](nb::module_& m) {
  m.def("silu_gate", silu_gate_of_python, "gate"_a.none(), "up"_a.none(), nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def silu_gate(gate: mlx.core.array, up: mlx.core.array, *, "
                "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"),
        kDoc);
});

}  // namespace

}  // namespace mlx_anvil
