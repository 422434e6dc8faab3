"""quantized_experts on an NVIDIA GPU: against mlx-lm's SwitchGLU in MLX ops, our dense product of as many rows, and
PyTorch's grouped product in bfloat16, whose rows are sorted already and weigh no sum."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from cuda_decoder import draw_quantized, normal
from cuda_timing import Row, compare, with_peers
from cuda_torch import grouped_experts
from mlx_anvil import quantized_experts, quantized_matmul, quantized_swiglu
from mlx_anvil._check import dtype_name

FORMAT: dict[str, Any] = {"group_size": 64, "bits": 4}
TOKENS = (1, 4, 16, 64, 512, 1024, 4096)
MOST_MLX_FLOPS = 5e11  # more take MLX tenths of a second
SORTED_PAIRS = 64  # as mlx-lm: from here on, pairs of token and expert are sorted by expert
Matrix = list[mx.array]


class Shape(NamedTuple):
    """Of a model's experts."""

    model: str
    experts: int
    chosen: int
    width: int
    hidden: int


SHAPES = (Shape("Qwen3-30B-A3B", 128, 8, 2048, 768), Shape("Mixtral-8x7B", 8, 2, 4096, 14336))


def draw_experts(count: int, outputs: int, columns: int, dtype: mx.Dtype) -> Matrix:
    matrices = [draw_quantized(outputs, columns, dtype) for _ in range(count)]
    stacked = [mx.stack(parts) for parts in zip(*matrices, strict=True)]
    mx.eval(stacked)
    return stacked


def composed(x: mx.array, ids: mx.array, weights: mx.array, gate: Matrix, up: Matrix, down: Matrix) -> mx.array:
    """What mlx-lm's SwitchGLU does, and the sum that its models write out."""
    chosen, inverse = ids.shape[-1], None
    rows, is_sorted = mx.expand_dims(x, (-2, -3)), ids.size >= SORTED_PAIRS
    if is_sorted:
        flat = ids.flatten()
        order = mx.argsort(flat)
        inverse = mx.argsort(order)
        rows, ids = rows.flatten(0, -3)[order // chosen], flat[order]

    def product(y: mx.array, matrix: Matrix) -> mx.array:
        return mx.gather_qmm(y, *matrix, rhs_indices=ids, sorted_indices=is_sorted, **FORMAT)

    gates = product(rows, gate)
    out = product(gates * mx.sigmoid(gates) * product(rows, up), down)
    if inverse is not None:
        out = mx.unflatten(out[inverse], 0, weights.shape)
    return (out.squeeze(-2) * weights[..., None]).sum(axis=-2)


def expert_rows(copy: float | None) -> Iterator[Row]:
    dtype = mx.bfloat16
    for shape in SHAPES:
        gate, up = (draw_experts(shape.experts, shape.hidden, shape.width, dtype) for _ in range(2))
        down = draw_experts(shape.experts, shape.width, shape.hidden, dtype)
        one = [[part[0] for part in matrix] for matrix in (gate, up, down)]
        expert_bytes = sum(part.nbytes for matrix in one for part in matrix)
        for tokens in TOKENS:
            x, scores = normal((tokens, shape.width), dtype), mx.random.normal((tokens, shape.experts))
            ids = mx.argsort(-scores, axis=-1)[:, : shape.chosen].astype(mx.int32)
            weights = mx.softmax(mx.take_along_axis(scores, ids, axis=-1), axis=-1).astype(dtype)
            pairs = mx.repeat(x, shape.chosen, axis=0)
            mx.eval(x, ids, weights, pairs)

            def dense(pairs: mx.array = pairs, one: list[Matrix] = one) -> mx.array:
                return quantized_matmul(quantized_swiglu(pairs, *map(tuple, one[:2]), **FORMAT), *one[2], **FORMAT)

            work = {"flops": 6.0 * pairs.shape[0] * shape.width * shape.hidden}
            contestants = {
                "ours": partial(quantized_experts, x, ids, weights, *map(tuple, (gate, up, down)), **FORMAT),
                "dense": dense,
            }
            if work["flops"] <= MOST_MLX_FLOPS:
                contestants["mlx"] = partial(composed, x, ids, weights, gate, up, down)
            if tokens == 1:
                work["bytes"] = shape.chosen * expert_bytes
            what = f"quantized_experts {shape.model} 4-bit {dtype_name(dtype)}, {tokens} tokens"
            row = compare(what, contestants, work=work, copy=copy)
            if tokens >= SORTED_PAIRS:
                peers = grouped_experts(shape.experts, pairs.shape[0], shape.width, shape.hidden)
                row = with_peers(row, peers)
            yield row
