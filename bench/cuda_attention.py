"""Attention on an NVIDIA GPU: against MLX's, and PyTorch's cuDNN and FlexAttention."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from harness import in_turn

import mlx.core as mx

from cuda_decoder import HALF_DTYPES, normal
from cuda_timing import Call, Row, compare, peak_bytes, with_peers
from cuda_torch import Shape, cudnn_attention_us, flex_attention_us
from mlx_anvil import flash_attention
from mlx_anvil._check import dtype_name

SHAPES = (Shape(1, 32, 8, 4096, 128), Shape(4, 16, 16, 2048, 64))
Features = dict[str, Any]
FEATURES: tuple[tuple[Shape, Features], ...] = (
    (Shape(1, 32, 8, 8192, 128), {"window_size": 1024}),
    (Shape(1, 32, 8, 4096, 128), {"softcap": 30.0}),
)


def composed_attention(
    q: mx.array, k: mx.array, v: mx.array, *, window_size: int | None = None, softcap: float | None = None
) -> mx.array:
    """Causal attention in MLX ops."""
    batch, _, length, dim = q.shape
    groups = (q * dim**-0.5).reshape(batch, k.shape[1], -1, length, dim)
    scores = groups @ k[:, :, None].swapaxes(-1, -2)
    if softcap:
        scores = softcap * mx.tanh(scores / softcap)
    positions = mx.arange(length)
    distance = positions[:, None] - positions[None]
    visible = (distance >= 0) & (distance < window_size) if window_size else distance >= 0
    scores = mx.where(visible, scores, mx.array(-float("inf"), scores.dtype))
    return (mx.softmax(scores, axis=-1, precise=True) @ v[:, :, None]).reshape(q.shape)


def draw_attention(shape: Shape, queries: int, dtype: mx.Dtype) -> list[mx.array]:
    q = normal((shape.batch, shape.heads, queries, shape.dim), dtype)
    return [q] + [normal((shape.batch, shape.kv_heads, shape.length, shape.dim), dtype) for _ in range(2)]


def pairs_seen(shape: Shape, *, causal: bool, window_size: int | None = None) -> float:
    """Pairs of a query and a key, over all heads. A window is causal."""
    keys = window_size or shape.length
    hidden = keys / 2 if causal else 0.0
    return shape.batch * shape.heads * (shape.length - hidden) * keys


def plain_rows() -> Iterator[Row]:
    attend = mx.fast.scaled_dot_product_attention
    for shape, dtype, mask in itertools.product(SHAPES, HALF_DTYPES, (None, "causal")):
        qkv = draw_attention(shape, shape.length, dtype)
        flops = 4.0 * shape.dim * pairs_seen(shape, causal=mask is not None)
        ours = partial(flash_attention, mask=mask)
        contestants: dict[str, Call] = {
            "ours": partial(ours, *qkv, return_lse=True),  # without lse, cuDNN would serve it
            "mlx": partial(attend, *qkv, scale=shape.dim**-0.5, mask=mask),
        }
        label = f"{dtype_name(dtype)} {shape} {mask or 'full'}"
        row = compare(f"attention {label}", contestants, work={"flops": flops})
        cudnn = partial(cudnn_attention_us, shape, dtype_name(dtype), causal=mask is not None)
        yield with_peers(row, cudnn(backward=False))
        d_out = normal(qkv[0].shape, dtype)

        def with_gradients(attend: Call, qkv: list[mx.array] = qkv, d_out: mx.array = d_out) -> Call:
            return partial(mx.vjp, attend, qkv, [d_out])

        contestants = {
            "ours": with_gradients(lambda *x, ours=ours: ours(*x, return_lse=True)[0]),
            "mlx": with_gradients(partial(attend, scale=shape.dim**-0.5, mask=mask)),
        }
        row = compare(f"attention forward and backward {label}", contestants, work={"flops": 3.5 * flops})
        yield with_peers(row, cudnn(backward=True))


def decode_rows(copy: float | None) -> Iterator[Row]:
    shape = Shape(1, 32, 8, 32768, 128)
    for dtype in HALF_DTYPES:
        sets = [draw_attention(shape, 1, dtype) for _ in range(3)]
        contestants = {
            "ours": in_turn([partial(flash_attention, *qkv) for qkv in sets]),
            "mlx": in_turn(
                [partial(mx.fast.scaled_dot_product_attention, *qkv, scale=shape.dim**-0.5) for qkv in sets]
            ),
        }
        what = f"decode {dtype_name(dtype)} {shape.heads}/{shape.kv_heads} heads of {shape.dim}, {shape.length} keys"
        yield compare(what, contestants, work={"bytes": sets[0][1].nbytes * 2}, copy=copy)


def attention_rows(copy: float | None) -> Iterator[Row]:
    yield from plain_rows()
    yield from decode_rows(copy)


def training_rows(copy: float | None) -> Iterator[Row]:
    for (shape, options), dtype in itertools.product(FEATURES, HALF_DTYPES):
        qkv = draw_attention(shape, shape.length, dtype)
        d_out = normal(qkv[0].shape, dtype)
        composed = partial(composed_attention, **options)
        functions = {"ours": partial(flash_attention, mask="causal", **options), "composed": composed}
        functions["compiled"] = mx.compile(composed)
        feature = ", ".join(f"{name}={value}" for name, value in options.items())
        label = f"{dtype_name(dtype)} {shape} causal, {feature}"
        pairs = pairs_seen(shape, causal=True, window_size=options.get("window_size"))
        for backward in (False, True):
            contestants: dict[str, Call] = {
                name: partial(mx.vjp, function, qkv, [d_out]) if backward else partial(function, *qkv)
                for name, function in functions.items()
            }
            what = f"attention {'forward and backward ' if backward else ''}{label}"
            row = compare(what, contestants, work={"flops": (14.0 if backward else 4.0) * shape.dim * pairs})
            row = with_peers(row, flex_attention_us(shape, dtype_name(dtype), backward=backward, **options))
            peaks = {f"{name}_peak_bytes": peak_bytes(call) for name, call in contestants.items()}
            yield row | peaks | {"times_peak": round(peaks["composed_peak_bytes"] / peaks["ours_peak_bytes"], 2)}
