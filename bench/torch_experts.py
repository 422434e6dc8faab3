"""PyTorch as a contestant of quantized_experts: a block of experts with dense weights, and one with its 4-bit product.

The pairs of token and expert are sorted once. Each expert that has rows then takes gate and up in one product, silu(gate)
* up, and down; the weighted rows are added to their tokens. That is the loop of transformers' Qwen3MoeSparseMoeBlock
without its search for every expert. Gate and up are one matrix, as in torch's grouped product, whose own loop on the CPU
is the second contestant where it takes the dtype.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

Blocks = dict[str, Callable[[], Any]]
GROUP = 64


def tensor(torch: Any, array: mx.array, dtype: Any) -> Any:
    """A copy of an array of MLX's."""
    return torch.from_numpy(np.array(array.astype(mx.float32))).to(dtype)


def contestants(
    torch: Any, x: mx.array, ids: mx.array, weights: mx.array, matrices: list[tuple[mx.array, ...]]
) -> Blocks:
    """Calls that return [tokens, D]. `matrices`: gate, up and down of MLX's 4-bit codes, scales and biases, groups of 64.

    Dense weights are what the codes stand for. PyTorch's 4-bit product takes bfloat16 only, and other codes.
    """
    dtype = torch.bfloat16 if x.dtype == mx.bfloat16 else torch.float32
    rows, of_tokens = tensor(torch, x, dtype), tensor(torch, weights, dtype)
    chosen = torch.from_numpy(np.array(ids).astype(np.int64))
    dense = [_dense(torch, matrix, dtype) for matrix in matrices]
    gate_up, down = torch.cat(dense[:2], dim=1), dense[2]
    linear = torch.nn.functional.linear
    blocks: Blocks = {
        "PyTorch, dense": lambda: _block(
            torch,
            rows,
            chosen,
            of_tokens,
            len(down),
            lambda e, r: linear(r, gate_up[e]),
            lambda e, r: linear(r, down[e]),
        )
    }
    if dtype == torch.bfloat16:
        blocks["PyTorch, grouped"] = lambda: _grouped(torch, rows, chosen, of_tokens, gate_up, down)
        blocks["PyTorch, 4 bits"] = _four_bits(torch, rows, chosen, of_tokens, gate_up, down)
    return {name: lambda call=call: _without_gradients(torch, call) for name, call in blocks.items()}


def _without_gradients(torch: Any, call: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return call()


def _dense(torch: Any, matrix: tuple[mx.array, ...], dtype: Any) -> Any:
    """Expert by expert, so that float32 weights of all of them are never kept twice."""
    out = None
    for e in range(matrix[0].shape[0]):
        one = mx.dequantize(*(part[e] for part in matrix), group_size=GROUP, bits=4)
        if out is None:
            out = torch.empty((matrix[0].shape[0], *one.shape), dtype=dtype)
        out[e] = tensor(torch, one, dtype)
    return out


def _sorted(torch: Any, ids: Any, experts: int) -> tuple[Any, Any]:
    """The order of the pairs by expert, and where each expert's end."""
    flat = ids.flatten()
    return torch.argsort(flat, stable=True), torch.cumsum(torch.bincount(flat, minlength=experts), 0)


def _gated(torch: Any, both: Any) -> Any:
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _summed(torch: Any, rows: Any, products: Any, order: Any, weights: Any) -> Any:
    k = weights.shape[-1]
    products = products * weights.flatten()[order, None]
    return torch.zeros_like(rows).index_add_(0, order // k, products)


def _block(
    torch: Any,
    rows: Any,
    ids: Any,
    weights: Any,
    experts: int,
    gate_up: Callable[[int, Any], Any],
    down: Callable[[int, Any], Any],
) -> Any:
    order, ends = _sorted(torch, ids, experts)
    own = rows[order // ids.shape[-1]]
    parts, first = [], 0
    for e, end in enumerate(ends.tolist()):
        if end > first:
            parts.append(down(e, _gated(torch, gate_up(e, own[first:end]))))
        first = end
    return _summed(torch, rows, torch.cat(parts), order, weights)


def _grouped(torch: Any, rows: Any, ids: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    order, ends = _sorted(torch, ids, len(down))
    ends = ends.to(torch.int32)
    own = rows[order // ids.shape[-1]]
    product = torch.nn.functional.grouped_mm
    hidden = _gated(torch, product(own, gate_up.transpose(-2, -1), offs=ends))
    return _summed(torch, rows, product(hidden, down.transpose(-2, -1), offs=ends), order, weights)


def _four_bits(torch: Any, rows: Any, ids: Any, weights: Any, gate_up: Any, down: Any) -> Callable[[], Any]:
    packed = [[_pack(torch, matrix) for matrix in side] for side in (gate_up, down)]
    product = torch.ops.aten._weight_int4pack_mm_for_cpu

    def of(side: int) -> Callable[[int, Any], Any]:
        return lambda e, r: product(r, packed[side][e][0], GROUP, packed[side][e][1])

    return lambda: _block(torch, rows, ids, weights, len(down), of(0), of(1))


def _pack(torch: Any, matrix: Any) -> tuple[Any, Any]:
    """Codes of 0 to 15, and of each group the scale and the value of code 8."""
    groups = matrix.float().reshape(len(matrix), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp(min=1e-6)
    codes = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.reshape(matrix.shape), 2)
    factors = torch.stack([scales, low + 8 * scales], dim=-1).transpose(0, 1).contiguous()
    return packed, factors.to(torch.bfloat16)
