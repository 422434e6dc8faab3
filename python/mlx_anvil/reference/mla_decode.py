"""mla_decode: its definition in MLX ops, and its entries in the registry."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference.flash_attention import flash_attention


def mla_decode(
    q_nope: mx.array,
    q_rope: mx.array,
    latent: mx.array,
    k_rope: mx.array,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    lengths: mx.array | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    return_lse: bool = False,
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention of one key head: keys are the latents and their rope parts side by side, values the latents.

    ``q_nope`` is ``[batch, H, Lq, R]``, ``q_rope`` ``[batch, H, Lq, P]``, ``latent`` ``[batch, 1, Lk, R]`` and
    ``k_rope`` ``[batch, 1, Lk, P]``. Arguments and results are those of ``flash_attention``.
    """
    q, k = (mx.concatenate(parts, axis=-1) for parts in ([q_nope, q_rope], [latent, k_rope]))
    return flash_attention(
        q,
        k,
        latent,
        scale=scale,
        mask=mask,
        lengths=lengths,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
    )


# ---- a shape is (batch, heads, q length, kv length, rank, rope dim) --------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, heads, q_len, kv_len, rank, rope_dim = shape
    q = [mx.random.normal((batch, heads, q_len, dim)) for dim in (rank, rope_dim)]
    k = [mx.random.normal((batch, 1, kv_len, dim)) for dim in (rank, rope_dim)]
    return [x.astype(dtype) for x in (*q, *k)]


def _inputs_with_bias(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, heads, q_len, kv_len, *_ = shape
    mask = mx.random.normal((batch, 1, q_len, kv_len)).astype(dtype)
    return [*_inputs(shape, dtype), mask, mx.random.normal((heads,)).astype(dtype)]


def _with_bias(attention: Callable[..., Any]) -> Callable[..., mx.array]:
    """The op as a function of all its arrays, with a softcap."""

    def function(*arrays: mx.array, **options: Any) -> mx.array:
        mask, sinks = arrays[4:]
        return cast(mx.array, attention(*arrays[:4], scale=0.2, mask=mask, sinks=sinks, softcap=3.0, **options))

    return function


# Without numbers that are not finite: the definition joins the two parts of a key.
_SPECIAL_VALUES = (0.0, -0.0, 30.0)
_SHAPES = (
    (1, 1, 1, 1, 1, 1),
    (0, 2, 3, 5, 8, 2),
    (2, 2, 0, 5, 8, 2),
    (1, 2, 3, 0, 4, 3),
    (1, 5, 3, 70, 72, 8),
    (1, 3, 17, 33, 36, 5),
    (2, 3, 5, 31, 6, 3),
    (2, 3, 11, 19, 6, 3),
)


def _spec(variant: str, *, shapes: tuple[tuple[int, ...], ...], **options: Any) -> OpSpec:
    has_bias = not options
    options = options or {}
    return OpSpec(
        name="mla_decode",
        variant=variant,
        function=_with_bias(_ext.mla_decode) if has_bias else partial(_ext.mla_decode, **options),
        reference=_with_bias(mla_decode) if has_bias else cast(Callable[..., mx.array], partial(mla_decode, **options)),
        make_inputs=_inputs_with_bias if has_bias else _inputs,
        arguments=("q_nope", "q_rope", "latent", "k_rope", *(("mask", "sinks") if has_bias else ())),
        operands=("q_nope", "q_rope", "latent", "k_rope"),
        contract_shapes=_SHAPES,
        check_shapes=shapes,
        float32_tolerance=2e-5,
        special_values=_SPECIAL_VALUES,
    )


SPECS = (
    _spec("", shapes=((2, 5, 1, 131, 40, 6), (1, 16, 1, 2048, 512, 64)), scale=0.1),
    _spec("causal", shapes=((1, 3, 5, 67, 72, 8), (1, 16, 4, 512, 512, 64)), scale=0.1, mask="causal"),
    _spec("bias", shapes=((1, 4, 7, 70, 24, 8), (1, 16, 4, 256, 512, 64))),
)
