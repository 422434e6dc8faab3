#include "common/bind_op.h"
#include "common/python_args.h"
#include "silu_gate/silu_gate.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kOp = "silu_gate";

constexpr const char* kDoc =
    R"(SwiGLU's gate: ``silu(gate) * up``, elementwise, in one kernel.

Formula:
    ``out = gate / (1 + exp(-gate)) * up``

Shapes broadcast, and dtypes promote by MLX's rules. The arithmetic is float32 whatever the dtype,
rounded once to the result's dtype. Inputs of any strides are read in place.

Gradients of both inputs come from one fused kernel; so does the forward-mode derivative. Higher
derivatives go through a graph of MLX ops. ``vmap`` works over either or both inputs.

Args:
    gate (array): float32, float16 or bfloat16, of any shape.
    up (array): likewise, of a shape that broadcasts with that of ``gate``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: of the broadcast shape and the promoted dtype.

Raises:
    TypeError: an argument is not an ``mlx.core.array``, or ``stream`` is not a stream or device.
    ValueError: an unsupported dtype, shapes that do not broadcast, or a GPU stream where MLX has no
        GPU backend.

Matches ``mlx.nn.silu(gate) * up`` (Shazeer 2020, "GLU Variants Improve Transformer").
)";

mx::array silu_gate_of_python(nb::handle gate, nb::handle up, nb::handle stream) {
  return silu_gate(to_array(kOp, "gate", gate), to_array(kOp, "up", up),
                   to_stream_or_device(kOp, stream));
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
