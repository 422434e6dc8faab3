#include <nanobind/stl/string.h>

#include "common/bind_op.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/python_args.h"
#include "gated/python_args.h"
#include "moe/experts.h"
#include "quantized_matmul/python_matrix.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kDoc =
    R"(The experts of a mixture of experts, from the output of the router to that of the block.

Formula:
    ``out[t] = sum over j of weights[t, j] * expert(ids[t, j], x[t])``, where ``expert(e, x) =
    activation(x @ Wg[e].T) * (x @ Wu[e].T) @ Wd[e].T``. ``residual`` and ``shared`` are added to
    that sum, ``shared`` times ``sigmoid(shared_gate)``.

The weights of experts that no token chose are not read. Tokens of one expert share a read of its
weights. On GPUs, pairs of token and expert are sorted for that, if there are enough of them. There
is no array of tokens x experts. Sums are float32.

Gradients flow to ``x``, ``weights``, the biases of the experts, ``residual``, ``shared``,
``shared_gate``, and (affine) the scales and biases of the matrices. Forward mode and ``vmap`` work over any of the arrays.

Args:
    x (array): ``[..., D]``; float32, float16 or bfloat16.
    ids (array): the experts of each token, ``[..., k]``, integers from 0 to E - 1. Negative ids
        count from the end. Values outside raise an error if they are known at the call; the
        kernels clamp them otherwise.
    weights (array, optional): the factors of the experts, ``[..., k]``; float32, float16 or
        bfloat16. ``None`` returns the outputs of the experts, without their sum.
    gate (tuple): ``(w, scales, biases)`` of Wg, or ``(w, scales)`` for modes without biases, as for
        ``quantized_matmul``; w is uint32 ``[E, H, D * bits / 32]``.
    up (tuple): the same for Wu, with the same shapes.
    down (tuple): the same for Wd, with w ``[E, N, H * bits / 32]``. In a model, N is D.
    activation (str): as for ``gated``. Default: ``"silu"``.
    limit (float, optional): as for ``gated``. Default: ``None``.
    group_size (int, optional): as for ``quantized_matmul``, the same for all matrices.
    bits (int, optional): likewise.
    mode (str): likewise.
    down_group_size (int, optional): of ``down``, if its format is another. Default: that of
        ``gate`` and ``up``.
    down_bits (int, optional): likewise.
    down_mode (str, optional): likewise.
    gate_bias (array, optional): added to the product with Wg, ``[E, H]``. Default: ``None``.
    up_bias (array, optional): the same for Wu, ``[E, H]``.
    down_bias (array, optional): the same for Wd, ``[E, N]``.
    residual (array, optional): added to the result, ``[..., N]``; it needs ``weights``, as do the
        following. Default: ``None``.
    shared (array, optional): the output of a shared expert, ``[..., N]``. Default: ``None``.
    shared_gate (array, optional): the logit of its gate, ``[..., 1]``. Default: ``None``, no gate.
    activation_bits (int, optional): as for ``quantized_matmul``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: ``[..., N]``, or ``[..., k, N]`` without ``weights``, in the promoted dtype of ``x``,
    ``residual``, ``shared`` and, in mode affine, scales and biases.

Raises:
    TypeError: an argument of the wrong type; ids that are not integers.
    ValueError: ids out of range; k above E; shapes that do not fit each other;
        any error of ``quantized_matmul`` for a matrix; an unknown ``activation``; a ``limit`` that
        is not finite and above 0.
)";

const mx::array& to_ids(nb::handle value) {
  const mx::array& ids = to_array(kQuantizedExperts, "ids", value);
  if (!mx::issubdtype(ids.dtype(), mx::integer)) {
    const std::string text =
        "ids has dtype " + to_text(ids.dtype()) + "; allowed: an integer dtype.";
    throw nb::type_error(op_message(kQuantizedExperts, text).c_str());
  }
  return ids;
}

std::optional<mx::array> to_optional_array(const char* argument, nb::handle value) {
  return value.is_none() ? std::nullopt
                         : std::optional(to_array(kQuantizedExperts, argument, value));
}

// The format of `down`: each part that is None is that of gate and up. With another mode, the
// defaults of that mode apply.
QuantizedOptions down_options(const QuantizedOptions& others,
                              nb::handle group_size,
                              nb::handle bits,
                              nb::handle mode) {
  QuantizedOptions own = to_quantized_options(
      kQuantizedExperts, group_size, bits,
      mode.is_none() ? nb::str(others.mode.c_str()) : nb::borrow(mode), "down_");
  if (own.mode == others.mode) {
    own.group_size = own.group_size ? own.group_size : others.group_size;
    own.bits = own.bits ? own.bits : others.bits;
  }
  own.activation_bits = others.activation_bits;
  return own;
}

const BindOp bind_quantized_experts([](nb::module_& m) {
  m.def(
      "quantized_experts",
      [](nb::handle x, nb::handle ids, nb::handle weights, nb::handle gate, nb::handle up,
         nb::handle down, nb::handle activation, nb::handle limit, nb::handle group_size,
         nb::handle bits, nb::handle mode, nb::handle down_group_size, nb::handle down_bits,
         nb::handle down_mode, nb::handle gate_bias, nb::handle up_bias, nb::handle down_bias,
         nb::handle residual, nb::handle shared, nb::handle shared_gate, nb::handle activation_bits,
         nb::handle stream) {
        const mx::array& x_array = to_array(kQuantizedExperts, "x", x);
        const mx::array& ids_array = to_ids(ids);
        std::optional<mx::array> weights_array = to_optional_array("weights", weights);
        ExpertMatrix gate_side = {to_quantized_tuple(kQuantizedExperts, "gate", gate),
                                  to_optional_array("gate_bias", gate_bias)};
        ExpertMatrix up_side = {to_quantized_tuple(kQuantizedExperts, "up", up),
                                to_optional_array("up_bias", up_bias)};
        ExpertMatrix down_side = {to_quantized_tuple(kQuantizedExperts, "down", down),
                                  to_optional_array("down_bias", down_bias)};
        ExpertOptions options;
        options.activation = to_gate_options(kQuantizedExperts, activation, limit);
        options.gate_and_up =
            to_quantized_options(kQuantizedExperts, group_size, bits, mode, activation_bits);
        options.down = down_options(options.gate_and_up, down_group_size, down_bits, down_mode);
        return quantized_experts(
            {x_array, ids_array, std::move(weights_array), std::move(gate_side), std::move(up_side),
             std::move(down_side), to_optional_array("residual", residual),
             to_optional_array("shared", shared), to_optional_array("shared_gate", shared_gate)},
            options, to_stream_or_device(kQuantizedExperts, stream));
      },
      "x"_a.none(), "ids"_a.none(), "weights"_a.none(), "gate"_a.none(), "up"_a.none(),
      "down"_a.none(), nb::kw_only(), "activation"_a.none() = "silu", "limit"_a = nb::none(),
      "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a.none() = "affine",
      "down_group_size"_a = nb::none(), "down_bits"_a = nb::none(), "down_mode"_a = nb::none(),
      "gate_bias"_a = nb::none(), "up_bias"_a = nb::none(), "down_bias"_a = nb::none(),
      "residual"_a = nb::none(), "shared"_a = nb::none(), "shared_gate"_a = nb::none(),
      "activation_bits"_a = nb::none(), "stream"_a = nb::none(),
      nb::sig("def quantized_experts(x: mlx.core.array, ids: mlx.core.array, "
              "weights: mlx.core.array | None, gate: tuple[mlx.core.array, ...], "
              "up: tuple[mlx.core.array, ...], down: tuple[mlx.core.array, ...], *, "
              "activation: str = 'silu', limit: float | None = None, " MLX_ANVIL_QUANTIZED_FORMAT
              "down_group_size: int | None = None, down_bits: int | None = None, "
              "down_mode: str | None = None, gate_bias: mlx.core.array | None = None, "
              "up_bias: mlx.core.array | None = None, down_bias: mlx.core.array | None = None, "
              "residual: mlx.core.array | None = None, shared: mlx.core.array | None = None, "
              "shared_gate: mlx.core.array | None = None, " MLX_ANVIL_ACTIVATION_BITS
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"),
      kDoc);
});

}  // namespace

}  // namespace mlx_anvil
