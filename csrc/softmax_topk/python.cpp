#include <string>

#include "common/bind_op.h"
#include "common/errors.h"
#include "common/python_args.h"
#include "softmax_topk/primitive.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kDoc =
    R"(Router of a mixture of experts: top k experts per row and their weights, in one kernel.

Formula:
    ``scores = softmax(logits, axis=-1)`` or ``sigmoid(logits)``; ``indices`` are those of the k
    largest logits; ``weights = scores[indices]``, divided by their sum with ``norm``

Both scores increase with the logit, so the choice compares the logits and does not depend on how
scores round. Ties go to the lowest index. NaN ranks above infinity. The arithmetic is float32,
rounded once to the dtype of the weights.

With ``norm`` and softmax scoring, the softmax over all experts cancels, which leaves the softmax of
the k logits. ``norm=True`` therefore covers routers that renormalise (Qwen3-MoE) and routers that
apply the softmax after the choice (Mixtral, GPT-OSS). ``norm=False`` covers OLMoE and Qwen2-MoE.
``scoring="sigmoid"`` is the scoring of DeepSeek-V3, without its expert groups and selection bias;
the sum of sigmoids does not underflow.

As in MLX's softmax, a row whose largest logit is NaN or infinite gets NaN weights. With
``scoring="sigmoid"``, infinite logits get the weights of the limit, unless all chosen logits are
``-inf`` and ``norm`` is set.

Let g be the cotangents of the weights w, and ``dot = sum(g * w)``. The gradient in the logits is
``w * (g - dot)`` for chosen experts and 0 for the others. Sigmoids multiply it by
``1 - sigmoid(logit)``, and unnormalised sigmoids omit dot. With an unnormalised softmax, the other
experts get ``-dot * softmax(logits)``. One kernel computes the gradient from the forward's indices,
without another selection. Forward mode and higher derivatives use a graph of MLX ops. ``vmap`` adds
rows.

Args:
    logits (array): ``[..., experts]``; float32, float16 or bfloat16. A non-contiguous view is
        copied first.
    k (int): number of experts to choose, from 1 to ``experts``. A ``k`` above 64, or more than 4096
        experts, use a graph of MLX ops.
    norm (bool): normalise the weights of a row to sum to 1. Default: ``True``.
    scoring (str): ``"softmax"`` or ``"sigmoid"``. Default: ``"softmax"``.
    sorted (bool): order each row by descending weight, otherwise by ascending index. Default:
        ``True``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array]: weights in the dtype of the logits, and uint32 indices; both ``[..., k]``.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: ``k`` is below 1 or above the number of experts, ``logits`` has no axis, ``scoring``
        is unknown, the dtype is unsupported, or the stream is on a GPU and MLX has no GPU backend.

Matches ``mx.softmax`` followed by ``mx.argpartition`` and ``mx.take_along_axis`` (Shazeer et al.
2017, "Outrageously Large Neural Networks").
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
