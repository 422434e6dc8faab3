#include "causal_conv1d/causal_conv1d.h"
#include "common/bind_op.h"
#include "common/errors.h"
#include "common/python_args.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kDoc =
    R"(Depthwise causal convolution along time, with its state: the short convolution of linear attention.

Formula:
    ``y[b, t, c] = act(bias[c] + sum_w weight[c, w] * rows[b, t + w, c])``, where ``rows`` is the
    state followed by ``x`` along time, and ``act`` is ``silu(z) = z / (1 + exp(-z))`` or nothing.
    The new state is the last ``width - 1`` rows, which are the state of the next call.

Dtypes promote by MLX's rules. The arithmetic is float32 for every dtype, and is rounded once to the
result's dtype. ``x``, ``state`` and their gradients may be views: they are read in place if their
channels are adjacent.

With ``lengths``, sequence ``b`` has ``lengths[b]`` rows of ``x`` and padding after them, which is
never read. The new state is that of each sequence's own end. ``y`` is 0 in the padding, and so are
the gradients of ``x`` there.

One kernel computes the gradients of ``x`` and ``state``, and another adds up those of ``weight``
and ``bias`` in a fixed order. The cotangents of ``y`` and of the new state both count. Forward mode
and higher derivatives use a graph of MLX ops. ``vmap`` works over any of the arrays.

Args:
    x (array): ``[B, T, C]``; float32, float16 or bfloat16.
    weight (array): ``[C, width]``, width 2 to 8. The last tap is that of the current row. Layers of
        MLX have ``[C, width, 1]``: ``weight.squeeze(-1)``.
    bias (array, optional): ``[C]``. Default: ``None``.
    state (array, optional): ``[B, width - 1, C]``, the rows before ``x``. Default: ``None``, zeros.
    activation (str, optional): ``"silu"`` or ``None``. Default: ``"silu"``.
    lengths (array, optional): ``[B]`` integers. Values below 0 count as 0, and above ``T`` as
        ``T``. Default: ``None``, all of ``x``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array]: ``y``, ``[B, T, C]``, and the new state, ``[B, width - 1, C]``, in the
    promoted dtype.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes do not match, the width or ``activation`` is not among those above, a dtype
        is unsupported, or the stream is on a GPU and MLX has no GPU backend.

Matches ``nn.Conv1d(C, C, width, groups=C)`` of the concatenated rows, then ``nn.silu``, as in
mlx-lm's Mamba, Qwen3-Next and Kimi Linear (Gu and Dao 2023, "Mamba").
)";

std::optional<mx::array> to_optional_array(const char* name, nb::handle value) {
  return value.is_none() ? std::nullopt : std::optional(to_array(kCausalConv1d, name, value));
}

bool to_activation(nb::handle value) {
  if (value.is_none()) {
    return false;
  }
  std::string name;
  if (!nb::try_cast(value, name)) {
    throw_type_error(kCausalConv1d, "activation", value, "'silu' or None");
  }
  if (name != "silu") {
    throw_value_error(kCausalConv1d, "activation is '" + name + "'; allowed: 'silu' or None.");
  }
  return true;
}

nb::object causal_conv1d_of_python(nb::handle x,
                                   nb::handle weight,
                                   nb::handle bias,
                                   nb::handle state,
                                   nb::handle activation,
                                   nb::handle lengths,
                                   nb::handle stream) {
  const CausalConvInputs in = {to_array(kCausalConv1d, "x", x),
                               to_array(kCausalConv1d, "weight", weight),
                               to_optional_array("bias", bias), to_optional_array("state", state),
                               to_optional_array("lengths", lengths)};
  const auto [y, new_state] =
      causal_conv1d(in, to_activation(activation), to_stream_or_device(kCausalConv1d, stream));
  return nb::make_tuple(y, new_state);
}

const BindOp bind_causal_conv1d([](nb::module_& m) {
  m.def(
      "causal_conv1d", causal_conv1d_of_python, "x"_a.none(), "weight"_a.none(),
      "bias"_a = nb::none(), "state"_a = nb::none(), nb::kw_only(), "activation"_a.none() = "silu",
      "lengths"_a = nb::none(), "stream"_a = nb::none(),
      nb::sig("def causal_conv1d(x: mlx.core.array, weight: mlx.core.array, "
              "bias: mlx.core.array | None = None, state: mlx.core.array | None = None, *, "
              "activation: str | None = 'silu', lengths: mlx.core.array | None = None, "
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> tuple[mlx.core.array, mlx.core.array]"),
      kDoc);
});

}  // namespace

}  // namespace mlx_anvil
