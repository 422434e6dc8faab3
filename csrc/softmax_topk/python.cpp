#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
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
    ``scores = softmax(logits, axis=-1)``, ``sigmoid(logits)`` or ``sqrt(softplus(logits))``;
    ``indices`` are those of the k largest ``scores + e_score_correction_bias`` within the
    ``topk_group`` best of ``n_group`` groups; ``weights = scores[indices]``, divided by their sum
    with ``norm``, times ``routed_scaling_factor``

Every score increases with its logit. Without a bias the choice therefore compares the logits and
does not depend on how scores round; with one it compares the sums in float32. Ties go to the lowest
index. NaN ranks above infinity. The arithmetic is float32, rounded once to the dtype of the
weights.

With ``norm`` and softmax scoring, the softmax over all experts cancels, which leaves the softmax of
the k logits. ``norm=True`` therefore covers routers that renormalise (Qwen3-MoE) and routers that
apply the softmax after the choice (Mixtral, GPT-OSS). ``norm=False`` covers OLMoE and Qwen2-MoE.
The sum of other scores does not underflow, so it needs no epsilon.

The bias only ranks: the weights are the scores without it. Groups are of adjacent experts. A group
ranks by the sum of its two best scores plus biases (DeepSeek-V3), or by its best one
(``group_scoring="max"``, DeepSeek-V2).

As in MLX's softmax, a row whose largest logit is NaN or infinite gets NaN weights. With
``scoring="sigmoid"``, infinite logits get the weights of the limit, unless all chosen logits are
``-inf`` and ``norm`` is set.

Let g be the cotangents of the weights w, and ``dot = sum(g * w)``, both without the scaling factor,
which multiplies the gradient. The gradient in the logits is ``w * (g - dot)`` for chosen experts and
0 for the others. Sigmoids multiply it by ``1 - sigmoid(logit)``, ``sqrtsoftplus`` by
``sigmoid(logit) / (2 * softplus(logit))``; both omit dot if they are not normalised. With an
unnormalised softmax, the other experts get ``-dot * softmax(logits)``. One kernel computes the
gradient from the forward's indices, without another selection. The indices have no derivative, and
the bias enters only there: its gradient is 0, by definition (``mx.stop_gradient``). Forward mode and
higher derivatives use a graph of MLX ops. ``vmap`` adds rows.

Args:
    logits (array): ``[..., experts]``; float32, float16 or bfloat16. A non-contiguous view is
        copied first.
    k (int): number of experts to choose, from 1 to ``experts``, or to those in ``topk_group``
        groups. A ``k`` above 64, more than 4096 experts or more than 32 groups use a graph of MLX
        ops.
    norm (bool): normalise the weights of a row to sum to 1. Default: ``True``.
    scoring (str): ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``. Default: ``"softmax"``.
    sorted (bool): the best expert first, otherwise by ascending index. Default: ``True``.
    e_score_correction_bias (array, optional): ``[experts]``; float32, float16 or bfloat16. Default:
        ``None``.
    n_group (int): number of groups, a divisor of ``experts``. Default: ``1``.
    topk_group (int, optional): how many groups to choose from. Default: ``None``, all.
    group_scoring (str): ``"top2"`` or ``"max"``. Default: ``"top2"``.
    masked_score (float, optional): what replaces the score plus bias of an expert in another group:
        ``None`` or ``-inf``, which keep it from being chosen, or ``0``, as in most of mlx-lm's
        models. They differ only if a bias makes a sum negative. Default: ``None``.
    routed_scaling_factor (float): factor of the weights. Default: ``1.0``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array]: weights in the dtype of the logits, and uint32 indices; both ``[..., k]``.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: ``k``, ``n_group`` or ``topk_group`` is out of range, ``logits`` has no axis, the
        bias has another shape than ``[experts]``, a group of one expert is to have two best, a
        string or ``masked_score`` is unknown, the scaling factor is not finite, a dtype is
        unsupported, or the stream is on a GPU and MLX has no GPU backend.

Matches ``mx.softmax`` followed by ``mx.argpartition`` and ``mx.take_along_axis`` (Shazeer et al.
2017, "Outrageously Large Neural Networks"), and ``group_expert_select`` of mlx-lm (DeepSeek-AI
2024, "DeepSeek-V3 Technical Report").
)";

// Returns the position of the string among the allowed ones.
int to_choice(const char* argument,
              nb::handle value,
              const char* allowed,
              std::initializer_list<const char*> names) {
  std::string name;
  if (!nb::try_cast(value, name)) {
    throw_type_error(kSoftmaxTopk, argument, value, allowed);
  }
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) {
    throw_value_error(kSoftmaxTopk,
                      std::string(argument) + " is '" + name + "'; allowed: " + allowed + ".");
  }
  return static_cast<int>(found - names.begin());
}

RouterScoring to_scoring(nb::handle value) {
  constexpr RouterScoring kScorings[] = {RouterScoring::kSoftmax, RouterScoring::kSigmoid,
                                         RouterScoring::kSqrtSoftplus};
  return kScorings[to_choice("scoring", value, "'softmax', 'sigmoid' or 'sqrtsoftplus'",
                             {"softmax", "sigmoid", "sqrtsoftplus"})];
}

bool masks_with_zero(nb::handle value) {
  if (value.is_none()) {
    return false;
  }
  const float score = to_float32(kSoftmaxTopk, "masked_score", value, "a number or None");
  if (score != 0 && score != -std::numeric_limits<float>::infinity()) {
    throw_value_error(kSoftmaxTopk,
                      "masked_score is " + std::to_string(score) + "; allowed: None, -inf or 0.");
  }
  return score == 0;
}

const BindOp bind_softmax_topk([](nb::module_& m) {
  m.def(
      "softmax_topk",
      [](nb::handle logits, nb::handle k, nb::handle norm, nb::handle scoring, nb::handle sorted,
         nb::handle bias, nb::handle n_group, nb::handle topk_group, nb::handle group_scoring,
         nb::handle masked_score, nb::handle routed_scaling_factor, nb::handle stream) {
        RouterOptions options;
        const mx::array& x = to_array(kSoftmaxTopk, "logits", logits);
        options.chosen = to_int(kSoftmaxTopk, "k", k);
        options.norm = to_bool(kSoftmaxTopk, "norm", norm);
        options.scoring = to_scoring(scoring);
        options.sorted = to_bool(kSoftmaxTopk, "sorted", sorted);
        const std::optional<mx::array> b =
            to_optional_array(kSoftmaxTopk, "e_score_correction_bias", bias);
        options.groups = to_int(kSoftmaxTopk, "n_group", n_group);
        options.kept_groups =
            topk_group.is_none() ? options.groups
                                 : to_int(kSoftmaxTopk, "topk_group", topk_group, "an int or None");
        options.group_scoring =
            to_choice("group_scoring", group_scoring, "'top2' or 'max'", {"top2", "max"}) == 0
                ? GroupScoring::kSumOfTwo
                : GroupScoring::kMax;
        options.masks_with_zero = masks_with_zero(masked_score);
        options.scale = to_float32(kSoftmaxTopk, "routed_scaling_factor", routed_scaling_factor);
        auto [weights, indices] =
            softmax_topk(x, b, options, to_stream_or_device(kSoftmaxTopk, stream));
        return nb::make_tuple(weights, indices);
      },
      "logits"_a.none(), "k"_a.none(), nb::kw_only(), "norm"_a.none() = true,
      "scoring"_a.none() = "softmax", "sorted"_a.none() = true,
      "e_score_correction_bias"_a = nb::none(), "n_group"_a.none() = 1, "topk_group"_a = nb::none(),
      "group_scoring"_a.none() = "top2", "masked_score"_a = nb::none(),
      "routed_scaling_factor"_a.none() = 1.0, "stream"_a = nb::none(),
      nb::sig("def softmax_topk(logits: mlx.core.array, k: int, *, norm: bool = True, "
              "scoring: str = 'softmax', sorted: bool = True, "
              "e_score_correction_bias: mlx.core.array | None = None, n_group: int = 1, "
              "topk_group: int | None = None, group_scoring: str = 'top2', "
              "masked_score: float | None = None, routed_scaling_factor: float = 1.0, "
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> tuple[mlx.core.array, mlx.core.array]"),
      kDoc);
});

}  // namespace

}  // namespace mlx_anvil
