"""Rules for routers: the statements by which mlx-lm's models choose experts, and ``softmax_topk`` in their place.

``mlx_anvil_route`` is :func:`mlx_anvil.patching._routers.route`.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Iterator

import mlx.core as mx

from mlx_anvil.patching._rebind import Call
from mlx_anvil.patching._rules import Rule

OP = "softmax_topk"
SOFTMAX = Call("router", "softmax and argpartition", OP)
SIGMOID = Call("router", "sigmoid, bias and argpartition", OP)
GROUPS = Call("router", "scores, groups and argpartition", OP)


# Choices of the K largest of G, with -G or G, and stop_gradient in one of three places.
_CHOICES = (
    "I = mx.argpartition(G, kth=-K, axis=-1)[..., -K:]; I = mx.stop_gradient(I)",
    "I = mx.argpartition(-G, kth=K - 1, axis=-1)[..., :K]; I = mx.stop_gradient(I)",
    "I = mx.stop_gradient(mx.argpartition(-G, kth=K - 1, axis=-1)[..., :K])",
    "I = mx.stop_gradient(mx.argpartition(-G, kth=K - 1, axis=-1))[..., :K]",
    "I = mx.stop_gradient(mx.argpartition(G, kth=-self.A, axis=-1)[..., -self.A:])",
)
_NORMS = (
    "if N: S /= mx.sum(S, axis=-1, keepdims=True)",
    "if N: S = S / mx.sum(S, axis=-1, keepdims=True)",
    "if N: S = S / S.sum(axis=-1, keepdims=True)",
)


def _softmax() -> Iterator[Rule]:
    for choice in _CHOICES:
        k, first = ("self.A", "") if "self.A" in choice else ("K", "K = self.A")
        chosen = f"{first}\n{choice}\nS = mx.take_along_axis(G, I, axis=-1)"
        # Softmax of all, then the choice.
        for axis in ("-1", "1"):  # of OLMoE, which flattens the tokens
            before = f"P = mx.softmax(G, axis={axis}, precise=True)\n{chosen.replace('G', 'P')}"
            for norm in _NORMS:
                yield Rule(SOFTMAX, f"{before}\n{norm}", f"{first}\nI, S = mlx_anvil_route(G, {k}, N)")
            yield Rule(SOFTMAX, before, f"{first}\nI, S = mlx_anvil_route(G, {k}, False)")
        # The choice, then the softmax of the chosen.
        for softmax in ("mx.softmax(S, axis=-1, precise=True)", "mx.softmax(S, precise=True, axis=-1)"):
            after = f"{first}\nI, T = mlx_anvil_route(G, {k}, True)"
            yield Rule(SOFTMAX, f"{chosen}\nT = {softmax}", after)
        wide = f"{first}\nI, T = mlx_anvil_route(G.astype(mx.float32), {k}, True)"
        yield Rule(SOFTMAX, f"{chosen}\nT = mx.softmax(S.astype(mx.float32), axis=-1)", wide)


def _mlx_topk(a, k, axis=-1):
    """GPT-OSS's, which has a docstring."""
    partitioned_indices = mx.argpartition(a, kth=-k, axis=axis)
    top_k_indices = mx.stop_gradient(partitioned_indices[..., -k:])
    top_k_values = mx.take_along_axis(a, top_k_indices, axis=axis)
    return top_k_values, top_k_indices


def _others() -> Iterator[Rule]:
    yield Rule(
        SOFTMAX,
        "S, I = mlx_topk(G, k=K, axis=-1); T = mx.softmax(S, axis=-1, precise=True)",
        "I, T = mlx_anvil_route(G, K, True)",
        {"mlx_topk": _mlx_topk},
    )
    yield Rule(  # Gemma 4
        SOFTMAX,
        """
        I = mx.argpartition(G, kth=-K, axis=-1)
        I = mx.stop_gradient(I[..., -K:])
        S = mx.take_along_axis(G, I, axis=-1)
        S = mx.softmax(S, axis=-1)
        """,
        "I, S = mlx_anvil_route(G, K, True)",
    )
    yield Rule(  # ERNIE 4.5, which then divides by a sum of at least 1e-12
        SOFTMAX,
        """
        G = self.F(G.astype(mx.float32))
        K = self.A
        I = mx.stop_gradient(mx.argpartition(-G, kth=K - 1, axis=-1)[..., :K])
        S = mx.take_along_axis(G, I, axis=-1)
        """,
        "K = self.A; I, S = mlx_anvil_route(G.astype(mx.float32), K, False, self.F)",
    )
    yield Rule(  # Llama 4
        SIGMOID,
        """
        K = self.A
        I = mx.argpartition(-G, kth=K - 1, axis=-1)[..., :K]
        I = mx.stop_gradient(I)
        S = mx.take_along_axis(G, I, axis=-1)
        S = mx.sigmoid(S.astype(mx.float32)).astype(D)
        """,
        'K = self.A; I, S = mlx_anvil_route(G.astype(mx.float32), K, False, "sigmoid"); S = S.astype(D)',
    )
    yield Rule(  # MiniMax
        SIGMOID,
        """
        S = mx.sigmoid(G)
        O = S
        S = S + self.B
        K = self.A
        I = mx.argpartition(-S, kth=K - 1, axis=-1)[..., :K]
        I = mx.stop_gradient(I)
        S = mx.take_along_axis(O, I, axis=-1)
        S = S / (mx.sum(S, axis=-1, keepdims=True) + 1e-20)
        """,
        'K = self.A; I, S = mlx_anvil_route(G, K, True, "sigmoid", self.B)',
    )
    yield Rule(  # Klear
        SIGMOID,
        """
        O = mx.sigmoid(G)
        P = O + self.B.reshape((1, 1, -1))
        K = self.A
        I = mx.argpartition(-P, kth=K - 1, axis=-1)[..., :K]
        I = mx.stop_gradient(I)
        S = mx.take_along_axis(O, I, axis=-1)
        if N:
            S = S / mx.sum(S, axis=-1, keepdims=True)
        """,
        'K = self.A; I, S = mlx_anvil_route(G, K, N, "sigmoid", self.B)',
    )
    yield Rule(  # LFM2-MoE, which then divides by the sum plus 1e-6
        SIGMOID,
        """
        O = mx.sigmoid(G)
        K = self.A
        if self.H:
            P = O.astype(mx.float32) + self.B
            I = mx.argpartition(P, kth=-K, axis=-1)[..., -K:]
        else:
            I = mx.argpartition(O, kth=-K, axis=-1)[..., -K:]
        I = mx.stop_gradient(I)
        S = mx.take_along_axis(O, I, axis=-1)
        """,
        'K = self.A; I, S = mlx_anvil_route(G, K, False, "sigmoid", self.B if self.H else None)',
    )
    yield Rule(  # Laguna
        SIGMOID,
        """
        O = self.F(G)
        P = O + self.B
        I = mx.argpartition(-P, kth=self.A - 1, axis=-1)[..., :self.A]
        I = mx.stop_gradient(I)
        S = mx.take_along_axis(O, I, axis=-1)
        S = S / S.sum(axis=-1, keepdims=True)
        """,
        "I, S = mlx_anvil_route(G, self.A, True, self.F, self.B)",
    )
    yield Rule(  # LongCat-Flash
        SOFTMAX,
        """
        O = mx.softmax(G, axis=-1)
        P = O + self.B
        I = mx.argpartition(P, kth=-self.A, axis=-1)[..., -self.A:]
        I = mx.stop_gradient(I)
        S = mx.take_along_axis(O, I, axis=-1)
        if N:
            D = mx.sum(S, axis=-1, keepdims=True) + 1e-20
            S = S / D
        S = S * F
        """,
        'I, S = mlx_anvil_route(G, self.A, N, "softmax", self.B, factor=F)',
    )
    yield Rule(  # DeepSeek-V4.1
        SIGMOID,
        """
        if C == "sigmoid":
            O = mx.sigmoid(G)
        elif C == "softmax":
            O = mx.softmax(G, axis=-1)
        else:
            O = mx.sqrt(nn.softplus(G))
        P = O + self.B
        I = mx.argpartition(-P, K - 1, axis=-1)[..., :K]
        S = mx.take_along_axis(O, I, axis=-1)
        if N and K > 1:
            S = S / (mx.sum(S, axis=-1, keepdims=True) + 1e-20)
        _ = I, S * F
        """,
        """
        P = C if C in ("sigmoid", "softmax") else "sqrtsoftplus"
        _ = mlx_anvil_route(G, K, N and K > 1, P, self.B, factor=F)
        """,
    )


RULES = (*_softmax(), *_others())
