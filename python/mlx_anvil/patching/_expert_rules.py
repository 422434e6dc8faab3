"""Rules for the sum over a token's experts, and for a shared expert that is added to it.

``mlx_anvil_summed`` is :func:`mlx_anvil.patching._experts.summed`, ``mlx_anvil_block`` is ``block_and_shared`` there.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Iterator

from mlx_anvil.patching._rebind import Call
from mlx_anvil.patching._rules import Rule

SUM_OF_EXPERTS = Call("experts", "sum of experts", "quantized_experts")
SHARED_EXPERT = Call("experts", "sum of experts, and a shared expert", "quantized_experts")


def _of_bailing(expert_outputs, scores):
    return (expert_outputs * scores[..., None]).sum(axis=-2).astype(expert_outputs.dtype)


_SUM = "Y = self.M(X, I)\nY = (Y * W[..., None]).sum(axis=-2)"
# Each with the arguments of mlx_anvil_summed after X and I.
_SUMS = (
    (f"{_SUM}.astype(Y.dtype)", "W, True"),
    (f"{_SUM}.astype(Y.dtype)".replace("None]", "None].astype(mx.float32)"), "W.astype(mx.float32), True"),
    (f"{_SUM}.astype(D)", "W, D"),
    (_SUM, "W, False"),
    # GPT-OSS, Gemma 4, Llama 4 and Bailing
    ("Y = self.M(X, I); Y = Y * mx.expand_dims(W, axis=-1); Y = Y.sum(axis=-2)", "W, False"),
    ("C = mx.expand_dims(W, -1); Y = self.M(X, I); Y = (C * Y).sum(-2)", "W, False"),
    ("Y = self.M(X, I).squeeze(2)", "None"),
    ("Y = self.M(X, I); Y = aggregate_expert_outputs(Y, W)", "W, True"),
)
# What follows the sum Y, and further arguments. B is code without the name Y.
_SHARED = (
    ("E = B; E = mx.sigmoid(G) * E; _ = Y + E", "shared=B, gate=G"),  # Qwen2-MoE, Qwen3-Next
    ("if C: Y = Y + B", "shared=B if C else None"),  # DeepSeek, GLM-4-MoE and others
    ("if C:\n    E = B\n    Y = Y + E", "shared=B if C else None"),  # Hunyuan
    ("_ = Y + B", "shared=B"),  # Step 3.5, MiniMax M3, Llama 4
)


def _rules() -> Iterator[Rule]:
    for total, arguments in _SUMS:
        helpers = {"aggregate_expert_outputs": _of_bailing} if "aggregate" in total else None
        for shared, more in _SHARED:
            target = "_" if shared.startswith(("_", "E")) else "Y"
            after = f"{target} = mlx_anvil_summed(self.M, X, I, {arguments}, {more})"
            yield Rule(SHARED_EXPERT, f"{total}\n{shared}", after, helpers)
        before, _, last = total.rpartition("Y = ")
        if before:
            after = f"_ = mlx_anvil_summed(self.M, X, I, {arguments})"
            yield Rule(SUM_OF_EXPERTS, f"{before}_ = {last}", after, helpers)
    # Granite's hybrid adds them in the layer, outside of the block that sums.
    before = "A = self.block_sparse_moe(X); E = self.M(X); _ = A + E"
    yield Rule(SHARED_EXPERT, before, "_ = mlx_anvil_block(self.block_sparse_moe, X, self.M(X))")


SUM_RULES = tuple(_rules())
