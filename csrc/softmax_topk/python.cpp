#include <string>

#include "common/bind_op.h"
#include "common/errors.h"
#include "common/python_args.h"
#include "softmax_topk/primitive.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kDoc =
    R"(The router of a mixture of experts: the k best experts of every row and their weights, in one
kernel.

Formula:
    ``scores = softmax(logits, axis=-1)`` or ``sigmoid(logits)``; ``indices`` are those of the k
    largest logits; ``weights = scores[indices]``, divided by their sum with ``norm``

The two scores grow with the logit, so the choice is by the logits themselves: it does not depend on
how scores round. Of equal logits the lowest index is chosen; NaN counts as larger than infinity.
Arithmetic is float32, rounded once to the dtype of the weights.

With ``norm`` the softmax over all experts cancels: what is left is the softmax of the k logits. So
``norm=True`` is both the router that renormalises (Qwen3-MoE) and the one that takes the softmax
after the choice (Mixtral, GPT-OSS); ``norm=False`` is OLMoE and Qwen2-MoE; ``scoring="sigmoid"`` is
that of DeepSeek-V3, without its groups and the bias of its choice. A sum of sigmoids is formed so
that it does not underflow.

As for MLX's softmax, a row whose largest logit is NaN or infinite has NaN for weights; with
``scoring="sigmoid"`` infinities have the weights of the limit, unless all that was chosen is
``-inf`` and ``norm`` is set.

Gradient in the logits, for cotangents g of the weights w, with ``dot = sum(g * w)``: ``w * (g -
dot)`` where an expert was chosen (times ``1 - sigmoid(logit)`` for sigmoids; without the dot where
they are not normalised), else 0, or ``-dot * softmax(logits)`` for a softmax that is not
normalised. It is one kernel, takes the indices of the forward and chooses nothing again. Forward
mode and higher derivatives go through a graph of MLX ops. ``vmap`` adds rows.

Args:
    logits (array): ``[..., experts]``; float32, float16 or bfloat16. A view that is not dense is
        copied first.
    k (int): experts to choose, from 1 to their number. More than 64, or of more than 4096, are
        chosen by a graph of MLX ops.
    norm (bool): whether the weights of a row sum to 1. Default: ``True``.
    scoring (str): ``"softmax"`` or ``"sigmoid"``. Default: ``"softmax"``.
    sorted (bool): whether the largest weight comes first; otherwise a row is in the order of its
        indices. Default: ``True``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    (array, array): weights, of the dtype of the logits, and indices, uint32; both ``[..., k]``.

Raises:
    TypeError: an argument of the wrong type.
    ValueError: a ``k`` below 1 or above the number of experts, logits without an axis, another
        ``scoring``, an unsupported dtype, a GPU stream where MLX has no GPU backend.

Matches ``mx.softmax``, ``mx.argpartition`` and ``mx.take_along_axis`` one after the other (Shazeer
et al. 2017, "Outrageously Large Neural Networks").
)";

RouterScoring to_scoring(nb::handle value) {
  std::string name;
  if (!nb::try_cast(value, name)) {
    throw_type_error(kSoftmaxTopk, "scoring", value, "'softmax' or 'sigmoid'");
  }
  if (name != "softmax" && name != "sigmoid") {
    throw_value_error(kSoftmaxTopk, "scoring is '" + name + "'; allowed: 'softmax' or 'sigmoid'.");
  }
  return name == "softmax" ? RouterScoring::kSoftmax : RouterScoring::kSigmoid;
}

const BindOp bind_softmax_topk([](nb::module_& m) {
  m.def(
      "softmax_topk",
      [](nb::handle logits, nb::handle k, nb::handle norm, nb::handle scoring, nb::handle sorted,
         nb::handle stream) {
        RouterOptions options;
        const mx::array& x = to_array(kSoftmaxTopk, "logits", logits);
        options.chosen = to_int(kSoftmaxTopk, "k", k);
        options.norm = to_bool(kSoftmaxTopk, "norm", norm);
        options.scoring = to_scoring(scoring);
        options.sorted = to_bool(kSoftmaxTopk, "sorted", sorted);
        auto [weights, indices] =
            softmax_topk(x, options, to_stream_or_device(kSoftmaxTopk, stream));
        return nb::make_tuple(weights, indices);
      },
      "logits"_a.none(), "k"_a.none(), nb::kw_only(), "norm"_a.none() = true,
      "scoring"_a.none() = "softmax", "sorted"_a.none() = true, "stream"_a = nb::none(),
      nb::sig("def softmax_topk(logits: mlx.core.array, k: int, *, norm: bool = True, "
              "scoring: str = 'softmax', sorted: bool = True, stream: " MLX_ANVIL_STREAM_TYPE
              " = None) -> tuple[mlx.core.array, mlx.core.array]"),
      kDoc);
});

}  // namespace

}  // namespace mlx_anvil
