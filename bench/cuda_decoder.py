"""A decoder of an 8B model's shape with 4-bit weights, in our ops and in MLX's."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from cuda_overhead import host_seconds
from cuda_timing import Call, Row, busy_us, compare, launches, peak_bytes
from mlx_anvil import flash_attention, quantized_argmax, quantized_matmul, quantized_swiglu, rms_norm, rope_and_cache
from mlx_anvil._check import dtype_name

HALF_DTYPES = (mx.float16, mx.bfloat16)
GROUP_SIZE, BITS = 64, 4
LAYERS, WIDTH, HIDDEN, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 32, 4096, 14336, 128256, 32, 8, 128, 1024
ROPE_BASE = 500000.0


def normal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def draw_quantized(outputs: int, columns: int, dtype: mx.Dtype) -> list[mx.array]:
    """Random codes: what they stand for does not matter for the time, but a product keeps the size of numbers."""
    words = mx.random.randint(0, 2**31 - 1, (outputs, columns * BITS // 32)).astype(mx.uint32)
    scales = (mx.random.normal((outputs, columns // GROUP_SIZE)) * columns**-0.5 / 4.6).astype(dtype)
    parts = [words, scales, -8 * scales]
    mx.eval(parts)
    return parts


class Layer:
    """One layer, in our ops and in MLX's (for one token)."""

    def __init__(self, dtype: mx.Dtype):
        shapes = {"qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH), "o": (WIDTH, WIDTH), "gate": (HIDDEN, WIDTH)}
        shapes |= {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
        self.weights = {name: draw_quantized(*shape, dtype) for name, shape in shapes.items()}
        first = 0
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):  # views, as mlx-lm has three matrices
            end = first + heads * HEAD_DIM
            self.weights[name] = [part[first:end] for part in self.weights["qkv"]]
            mx.eval(self.weights[name])
            first = end
        self.norms = [mx.ones(WIDTH, dtype), mx.ones(WIDTH, dtype)]
        self.keys, self.values = (normal((1, KV_HEADS, CONTEXT, HEAD_DIM), dtype) for _ in range(2))

    def cached(self, k: mx.array, v: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """The cache up to the tokens' keys and values, which are written in place, as mlx-lm does it."""
        end = offset + k.shape[2]
        self.keys[..., offset:end, :] = k
        self.values[..., offset:end, :] = v
        return self.keys[..., :end, :], self.values[..., :end, :]

    def in_our_ops(self, x: mx.array, update: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """`update` is what the layer before adds to x, and likewise what is returned beside x; `offset`: tokens
        before."""
        length, end = len(x), offset + len(x)
        h, x = rms_norm(update, self.norms[0], residual=x)
        qkv = project(quantized_matmul, h, self.weights["qkv"])
        qkv = qkv.reshape(1, -1, 1, HEAD_DIM) if length == 1 else qkv.reshape(1, length, -1, HEAD_DIM).swapaxes(1, 2)
        q, self.keys, self.values = rope_and_cache(
            qkv, None, None, self.keys, self.values, HEAD_DIM, base=ROPE_BASE, offset=offset
        )
        keys, values = self.keys[..., :end, :], self.values[..., :end, :]
        attended = flash_attention(q, keys, values, mask=None if length == 1 else "causal")
        if length > 1:
            attended = attended.swapaxes(1, 2)
        attended = attended.reshape(length, WIDTH)
        h, x = rms_norm(project(quantized_matmul, attended, self.weights["o"]), self.norms[1], residual=x)
        hidden = quantized_swiglu(h, self.weights["gate"], self.weights["up"], group_size=GROUP_SIZE, bits=BITS)
        return x, project(quantized_matmul, hidden, self.weights["down"])

    def in_mlx_ops(self, x: mx.array) -> mx.array:
        def heads(name: str, count: int) -> mx.array:
            return project(mx.quantized_matmul, h, self.weights[name]).reshape(1, count, 1, HEAD_DIM)

        def rotated(x: mx.array) -> mx.array:
            return mx.fast.rope(x, HEAD_DIM, traditional=False, base=ROPE_BASE, scale=1.0, offset=CONTEXT - 1)

        h = mx.fast.rms_norm(x, self.norms[0], 1e-5)
        q, k = rotated(heads("q", HEADS)), rotated(heads("k", KV_HEADS))
        keys, values = self.cached(k, heads("v", KV_HEADS), CONTEXT - 1)
        attended = mx.fast.scaled_dot_product_attention(q, keys, values, scale=HEAD_DIM**-0.5).reshape(1, WIDTH)
        x = x + project(mx.quantized_matmul, attended, self.weights["o"])
        h = mx.fast.rms_norm(x, self.norms[1], 1e-5)
        gate, up = (project(mx.quantized_matmul, h, self.weights[name]) for name in ("gate", "up"))
        return x + project(mx.quantized_matmul, nn.silu(gate) * up, self.weights["down"])


def project(product: Callable[..., mx.array], x: mx.array, weights: list[mx.array]) -> mx.array:
    return product(x, *weights, transpose=True, group_size=GROUP_SIZE, bits=BITS)


def next_token(layers: list[Layer], norm: mx.array, head: list[mx.array], x: mx.array, offset: int) -> mx.array:
    """After the embedded tokens x, in our ops."""
    x, update = mx.zeros_like(x), x
    for layer in layers:
        x, update = layer.in_our_ops(x, update, offset)
    h, _ = rms_norm(update[-1:], norm, residual=x[-1:])
    return quantized_argmax(h, *head, group_size=GROUP_SIZE, bits=BITS)


def decoder_rows(copy: float | None) -> Iterator[Row]:
    for dtype in HALF_DTYPES:
        layers, head = [Layer(dtype) for _ in range(LAYERS)], draw_quantized(VOCABULARY, WIDTH, dtype)
        x = normal((1, WIDTH), dtype)

        norm = mx.ones(WIDTH, dtype)

        def mlx_token(layers: Any = layers, head: Any = head, x: mx.array = x, norm: mx.array = norm) -> mx.array:
            for layer in layers:
                x = layer.in_mlx_ops(x)
            return mx.argmax(project(mx.quantized_matmul, mx.fast.rms_norm(x, norm, 1e-5), head))

        contestants: dict[str, Call] = {
            "ours": partial(next_token, layers, norm, head, x, CONTEXT - 1),
            "mlx": mlx_token,
        }
        row = compare(
            f"decoder, 8B shape, 4-bit, one token, {dtype_name(dtype)}, context {CONTEXT}",
            contestants,
            work={},
            steps=8,
        )
        rates = {f"{label}_tokens_per_second": round(1e6 / row[f"{label}_us"], 1) for label in contestants}
        peaks = {f"{label}_peak_bytes": peak_bytes(call) for label, call in contestants.items()}
        counts = {f"{label}_launches": launches(call) for label, call in contestants.items()}
        # What bounds a token: the host, in Python and in evaluation, or the time in which the GPU runs kernels.
        busy = {f"{label}_busy_us": busy_us(call) for label, call in contestants.items()}
        for label, (python, evaluation) in host_seconds(contestants, calls=1, rounds=10).items():
            row |= {f"{label}_python_us": round(python * 1e6), f"{label}_eval_us": round(evaluation * 1e6)}
        yield row | rates | peaks | counts | busy
