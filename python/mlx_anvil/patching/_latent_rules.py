"""Rules for multi-head latent attention: a decode in absorbed form, and ``mla_decode`` in its place.

The models compute the scores of the rope parts first and pass them as a mask. ``mlx_anvil_latent`` is
:func:`latent_attention`.
"""

from collections.abc import Iterator

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil.patching._rebind import Call
from mlx_anvil.patching._rules import Rule

NAME = "mlx_anvil_latent"  # of ``latent_attention``, in rules
LATENT_ATTENTION = Call("attention", "latent attention", "mla_decode")

_SCORES = """
S = (Q * self.A) @ K.swapaxes(-1, -2)
if M is not None:
    S = mx.where(M, S, mx.array(mx.finfo(S.dtype).min, S.dtype))
"""
_ATTENTION = "O = scaled_dot_product_attention(N, X, Y, cache=cache, scale=self.A, mask=S)"
_PROMPT = "X = self.E(C, transpose=False)\nY = self.U(C)"
_DECODE = "mlx_anvil_latent(self.E(N), Q, C, K, self.A, M)"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def _rules() -> Iterator[Rule]:
    # DeepSeek-V3 and most others: a prompt goes through the same statements.
    before = f"""
{_SCORES}
if L == 1:
    N = self.E(N)
    X = Y = C
else:
{_indented(_PROMPT)}
{_ATTENTION}
if L == 1:
    O = self.U(O)
"""
    after = f"""
if L == 1:
    O = self.U({_DECODE})
else:
{_indented(_SCORES)}
{_indented(_PROMPT)}
{_indented(_ATTENTION)}
"""
    yield Rule(LATENT_ATTENTION, before, after)
    # Mistral 4
    attention = "O = scaled_dot_product_attention(self.E(N), C, C, cache=cache, scale=self.A, mask=S)"
    yield Rule(LATENT_ATTENTION, f"{_SCORES}\n{attention}", f"O = {_DECODE}")


RULES = tuple(_rules())


def latent_attention(
    q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Attention of one query per sequence. ``mask`` is true where a key is visible."""
    seen = mask if mask is None else mask.astype(mx.bool_)
    return _ext.mla_decode(q_nope, q_rope, latent, k_rope, scale=scale, mask=seen)


def latent_attention_by_ops(
    q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """The same in MLX ops, for what ``mla_decode`` does not take."""
    scores = (q_rope * scale) @ k_rope.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    return mx.fast.scaled_dot_product_attention(q_nope, latent, latent, scale=scale, mask=scores)
