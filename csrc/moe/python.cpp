#include <optional>
#include <string>

#include "common/bind_op.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/python_args.h"
#include "moe/moe.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kPermuteDoc =
    R"(Sorts the tokens of a mixture of experts by expert, ready for grouped products.

A pair is a token with one of its k experts, numbered as in ``ids``, read row by row. The sort is
stable, so the result is deterministic.

Formula:
    ``order = argsort(ids.flatten())``; ``rows[place] = x[order[place] // k]``;
    ``inverse[order[place]] = place``; ``offsets[e]`` is the number of ids below e

The rows of expert e are ``rows[offsets[e]:offsets[e + 1]]``. The expert of each row, which
``gather_quantized_matmul`` and ``mx.gather_qmm`` take as ``rhs_indices``, is
``ids.flatten()[order]``. ``moe_combine`` takes ``inverse``.

Negative ids count from the last expert. Ids out of range raise an error if their values are known
when the op is called: on the CPU, if the array has been evaluated. Otherwise they clamp to the
first or last expert, and no memory outside the arrays is read.

The gradient of a token is the sum of those of its k rows, in float32 and in order: one kernel, the
sum of ``moe_combine``. Forward mode copies tangents as the op copies rows. The integers have no
derivative. ``vmap`` sorts each element on its own, in the same launches.

Args:
    x (array): ``[..., columns]``; float32, float16 or bfloat16.
    ids (array): ``[..., k]``, with the axes of ``x`` before the last; any integer dtype.
    num_experts (int): number of experts, at least 1. More than 4096 use a graph of MLX ops.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array, array, array]: ``rows [pairs, columns]`` in the dtype of ``x``; and int32
        ``offsets [num_experts + 1]``, ``order [pairs]`` and ``inverse``, which has the shape of
        ``ids``.

Raises:
    TypeError: an argument has the wrong type; ids that are not integers.
    ValueError: shapes that do not match, ``num_experts`` below 1, an id out of range, a dtype that
        is unsupported, or a GPU stream if MLX has no GPU backend.

Matches the sort of mlx-lm's ``SwitchGLU`` (``_gather_sort``).
)";

constexpr const char* kCombineDoc =
    R"(Sums the experts' results of each token, with their weights, in one kernel.

Formula:
    ``out[t] = sum(weights[t, j] * y[inverse[t, j]] for j in range(k))``
    ``+ residual[t] + sigmoid(shared_gate[t]) * shared[t]``

Sums are float32, in this order, and round once. ``shared`` is the result of an expert that all
tokens share; without ``shared_gate`` it is added as it is.

Gradients in ``y``, ``weights``, ``shared`` and ``shared_gate`` come from one kernel, which reads
each row once. That of ``residual``, and of ``shared`` without a gate, is the cotangent. Forward mode
is at most two of the same sums; the gate's part is a graph of MLX ops, and so are second
derivatives. ``vmap`` adds tokens.

Args:
    y (array): ``[pairs, columns]``: a row for each pair of a token and an expert, sorted by expert.
        float32, float16 or bfloat16.
    weights (array, optional): ``[..., k]``, the routing weights of each token, pairs in all.
        ``None`` sums the rows as they are.
    inverse (array): the row of each pair, as ``moe_permute`` returns it: integers of the shape of
        ``weights``, or ``[pairs]``. Each row must occur once. If the values are known when the op
        is called (on the CPU, if the array has been evaluated), others raise an error; otherwise
        they clamp, and the gradient in ``y`` is undefined.
    residual (array, optional): ``[..., columns]``, added. Default: ``None``.
    shared (array, optional): ``[..., columns]``, added behind its gate. Default: ``None``.
    shared_gate (array, optional): ``[..., 1]``, the logit of the gate. Default: ``None``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: ``[..., columns]``, in the promoted dtype of ``y``, ``residual`` and ``shared``. Weights
        and gate do not change it.

Raises:
    TypeError: an argument has the wrong type; an inverse that is not integers.
    ValueError: shapes that do not match, rows that occur twice or do not exist, a gate without
        ``shared``, a dtype that is unsupported, or a GPU stream if MLX has no GPU backend.

Matches the end of a block of experts in mlx-lm's models (``_scatter_unsort``, then
``(y * scores[..., None]).sum(axis=-2)``).
)";

const mx::array& to_integers(const char* op, const char* argument, nb::handle value) {
  const mx::array& x = to_array(op, argument, value);
  if (!mx::issubdtype(x.dtype(), mx::integer)) {
    const std::string text =
        std::string(argument) + " has dtype " + to_text(x.dtype()) + "; allowed: an integer dtype.";
    throw nb::type_error(op_message(op, text).c_str());
  }
  return x;
}

std::optional<mx::array> to_optional(const char* argument, nb::handle value) {
  if (value.is_none()) {
    return std::nullopt;
  }
  return to_array(kMoeCombine, argument, value);
}

const BindOp bind_moe([](nb::module_& m) {
  m.def(
      "moe_permute",
      [](nb::handle x, nb::handle ids, nb::handle num_experts, nb::handle stream) {
        const mx::array& tokens = to_array(kMoePermute, "x", x);
        const mx::array& integers = to_integers(kMoePermute, "ids", ids);
        const int64_t experts = to_int(kMoePermute, "num_experts", num_experts);
        const MoePermuted out =
            moe_permute(tokens, integers, experts, to_stream_or_device(kMoePermute, stream));
        return nb::make_tuple(out.rows, out.offsets, out.order, out.inverse);
      },
      "x"_a.none(), "ids"_a.none(), "num_experts"_a.none(), nb::kw_only(), "stream"_a = nb::none(),
      nb::sig("def moe_permute(x: mlx.core.array, ids: mlx.core.array, num_experts: int, *, "
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> tuple[mlx.core.array, "
              "mlx.core.array, mlx.core.array, mlx.core.array]"),
      kPermuteDoc);
  m.def(
      "moe_combine",
      [](nb::handle y, nb::handle weights, nb::handle inverse, nb::handle residual,
         nb::handle shared, nb::handle shared_gate, nb::handle stream) {
        const mx::array& rows = to_array(kMoeCombine, "y", y);
        MoeCombineTerms terms;
        terms.weights = to_optional("weights", weights);
        const mx::array& places = to_integers(kMoeCombine, "inverse", inverse);
        terms.residual = to_optional("residual", residual);
        terms.shared = to_optional("shared", shared);
        terms.shared_gate = to_optional("shared_gate", shared_gate);
        return moe_combine(rows, places, terms, to_stream_or_device(kMoeCombine, stream));
      },
      "y"_a.none(), "weights"_a.none(), "inverse"_a.none(), nb::kw_only(),
      "residual"_a = nb::none(), "shared"_a = nb::none(), "shared_gate"_a = nb::none(),
      "stream"_a = nb::none(),
      nb::sig("def moe_combine(y: mlx.core.array, weights: mlx.core.array | None, "
              "inverse: mlx.core.array, *, residual: mlx.core.array | None = None, "
              "shared: mlx.core.array | None = None, shared_gate: mlx.core.array | None = None, "
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"),
      kCombineDoc);
});

}  // namespace

}  // namespace mlx_anvil
