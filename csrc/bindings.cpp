// The extension module: one m.def per op.
#include <nanobind/nanobind.h>

#include "common/python_args.h"
#include "common/python_support.h"
#include "flash_attention/arguments.h"
#include "norm/arguments.h"
#include "quantized_embedding/arguments.h"
#include "quantized_head/arguments.h"
#include "quantized_matmul/arguments.h"
#include "rope/arguments.h"
#include "silu_gate/silu_gate.h"
#include "softmax_topk/arguments.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlx_anvil;

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");  // registers the types of our signatures
  bind_support(m);

  m.def(
      "silu_gate",
      [](nb::handle gate, nb::handle up, nb::handle stream) {
        constexpr const char* op = "silu_gate";
        return silu_gate(to_array(op, "gate", gate), to_array(op, "up", up),
                         to_stream_or_device(op, stream));
      },
      "gate"_a.none(), "up"_a.none(), nb::kw_only(), "stream"_a = nb::none(),
      nb::sig("def silu_gate(gate: mlx.core.array, up: mlx.core.array, *, "
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"),
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
)");

  const auto flash_attention_of_python =
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle scale, nb::handle mask,
         nb::handle sinks, nb::handle window_size, nb::handle softcap, nb::handle return_lse,
         nb::handle stream) -> nb::object {
    constexpr const char* op = "flash_attention";
    auto [out, lse] =
        flash_attention(to_array(op, "q", q), to_array(op, "k", k), to_array(op, "v", v),
                        to_attention_options(scale, mask, sinks, window_size, softcap, return_lse),
                        to_stream_or_device(op, stream));
    return lse ? nb::object(nb::make_tuple(out, *lse)) : nb::cast(out);
  };
  // Twice, so that type checkers know what return_lse brings; the first takes every call.
  for (const char* signature : kFlashAttentionSignatures) {
    m.def("flash_attention", flash_attention_of_python, "q"_a.none(), "k"_a.none(), "v"_a.none(),
          nb::kw_only(), "scale"_a = nb::none(), "mask"_a = nb::none(), "sinks"_a = nb::none(),
          "window_size"_a = nb::none(), "softcap"_a = nb::none(), "return_lse"_a.none() = false,
          "stream"_a = nb::none(), nb::sig(signature), kFlashAttentionDoc);
  }

  bind_norm(m);
  bind_quantized_embedding(m);
  bind_quantized_head(m);
  bind_quantized_matmul(m);
  bind_rope(m);
  bind_softmax_topk(m);
}
