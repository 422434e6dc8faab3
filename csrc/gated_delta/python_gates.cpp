#include "common/bind_op.h"
#include "common/python_args.h"
#include "gated_delta/gates.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kGatesDoc =
    R"(The decays and rates of a gated delta rule, as models compute them, in one kernel.

Formula:
    ``g = exp(-exp(A_log) * softplus(a + dt_bias))``; with ``lower_bound``: ``g = exp(lower_bound *
    sigmoid(exp(A_log) * (a + dt_bias)))``; ``beta = sigmoid(b)``, twice that with ``allow_neg_eigval``

The arithmetic is float32 for every dtype, and so are the results, which ``gated_delta`` takes.
Kernels compute the gradients. Where ``g`` is 0 they are 0, also if ``exp(A_log)`` overflows; those of
``A_log`` and ``dt_bias`` have the same bits in every run. ``vmap`` over ``a`` and ``b`` adds rows. Over
the weights, or of their gradients, it uses a graph of MLX ops, and so do forward mode and second
derivatives.

Args:
    a (array): ``[..., H]``, or ``[..., H, D]`` for a factor per channel; float32, float16 or bfloat16.
    b (array): ``[..., H]``.
    A_log (array): ``[H]`` or ``[H, 1]``, the logarithm of each head's speed.
    dt_bias (array): ``[H]``, or ``[H, D]`` with channels.
    lower_bound (float, optional): the least log decay, such as -5. Default: ``None``, no bound.
    allow_neg_eigval (bool): ``beta`` up to 2, with which a step may turn a direction of the state
        around. Default: ``False``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array]: ``g`` with the shape of ``a``, and ``beta`` with that of ``b``; float32.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes do not match; a dtype is unsupported; ``lower_bound`` is not finite; the
        stream is on a GPU and MLX has no GPU backend.

Matches ``compute_g``, ``compute_lower_bound_g`` and the ``beta`` of ``gated_delta_update`` of mlx-lm.
)";

const BindOp bind_gated_delta_gates([](nb::module_& m) {
  m.def(
      "gated_delta_gates",
      [](nb::handle a, nb::handle b, nb::handle a_log, nb::handle dt_bias, nb::handle lower_bound,
         nb::handle allow_neg_eigval, nb::handle stream) {
        const auto of = [](const char* name, nb::handle x) -> const mx::array& {
          return to_array(kGatedDeltaGates, name, x);
        };
        GatesConfig config;
        if (!lower_bound.is_none()) {
          config.lower_bound =
              to_float32(kGatedDeltaGates, "lower_bound", lower_bound, "None, or a number");
        }
        config.rate_scale =
            to_bool(kGatedDeltaGates, "allow_neg_eigval", allow_neg_eigval) ? 2.0f : 1.0f;
        const auto [g, beta] =
            gated_delta_gates(of("a", a), of("b", b), of("A_log", a_log), of("dt_bias", dt_bias),
                              config, to_stream_or_device(kGatedDeltaGates, stream));
        return nb::make_tuple(g, beta);
      },
      "a"_a.none(), "b"_a.none(), "A_log"_a.none(), "dt_bias"_a.none(), nb::kw_only(),
      "lower_bound"_a = nb::none(), "allow_neg_eigval"_a.none() = false, "stream"_a = nb::none(),
      nb::sig("def gated_delta_gates(a: mlx.core.array, b: mlx.core.array, A_log: mlx.core.array, "
              "dt_bias: mlx.core.array, *, lower_bound: float | None = None, "
              "allow_neg_eigval: bool = False, stream: " MLX_ANVIL_STREAM_TYPE
              " = None) -> tuple[mlx.core.array, mlx.core.array]"),
      kGatesDoc);
});

}  // namespace

}  // namespace mlx_anvil
