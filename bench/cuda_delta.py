"""The recurrences of linear attention on an NVIDIA GPU, beside mlx-lm's ops and the Triton kernels of
flash-linear-attention (FLA), if they can be imported."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import mlx.core as mx

from cuda_decoder import normal
from cuda_timing import Call, Row, compare, with_peers
from cuda_torch import kernel_microseconds
from gated_delta import DIM, HEADS
from mlx_anvil import gated_delta, ssd_scan

DTYPE = mx.bfloat16
Arrays = list[mx.array]


def draw(steps: int, per_channel: bool) -> Arrays:
    """Qwen3-Next's layer, or with a factor per channel Kimi Linear's."""
    key_heads, heads = HEADS[per_channel]
    q, k = (normal((1, steps, key_heads, DIM), DTYPE) for _ in range(2))
    g = mx.random.uniform(0.9, 1.0, (1, steps, heads, DIM) if per_channel else (1, steps, heads))
    beta = mx.random.uniform(0.0, 1.0, (1, steps, heads))
    arrays = [q, k, normal((1, steps, heads, DIM), DTYPE), g, beta, normal((1, heads, DIM, DIM), mx.float32)]
    mx.eval(arrays)
    return arrays


def ours(*arrays: mx.array) -> Arrays:
    return list(gated_delta(*arrays[:5], arrays[5], normalize_eps=1e-6))


def of_mlx_lm(*arrays: mx.array) -> Arrays:
    from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk

    q, k = normalize_qk(*arrays[:2], inv_scale=DIM**-0.5, eps=1e-6)
    return list(gated_delta_ops(q, k, *arrays[2:]))


def trained(op: Callable[..., Arrays], arrays: Arrays, cotangents: Arrays) -> Any:
    """The results, and all gradients."""
    return mx.vjp(op, arrays, cotangents)


def in_turn(arrays: Arrays, cotangents: Arrays | None = None) -> Call:
    """Calls of our op, with gradients if there are cotangents, of which each waits for the one before: the last kernel's
    result is the next q, as layers of a model wait for each other. Calls that do not would share the GPU."""
    q = arrays[0]

    def call() -> Any:
        nonlocal q
        given = [q, *arrays[1:]]
        results = ours(*given) if cotangents is None else trained(ours, given, cotangents)
        q = results[0][:, :, : q.shape[2]] if cotangents is None else results[1][0]
        return results

    return call


def fla_microseconds(steps: int, per_channel: bool, backward: bool) -> dict[str, float]:
    if find_spec("fla") is None or find_spec("torch") is None:
        return {}
    import torch
    import triton

    # The backward refuses to run with Triton before 3.7.1 on these GPUs, where results are wrong. Its time is of
    # interest all the same.
    triton.__version__ = "3.7.1"
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
    from torch.nn.functional import normalize

    def wide(heads: int) -> torch.Tensor:
        return torch.randn(1, steps, heads, DIM, device="cuda", dtype=torch.bfloat16)

    key_heads, heads = HEADS[per_channel]
    q, k = (normalize(wide(key_heads), dim=-1) for _ in range(2))
    v, beta = wide(heads), torch.rand(1, steps, heads, device="cuda").to(torch.bfloat16)
    log_g = -0.1 * torch.rand(1, steps, heads, *((DIM,) if per_channel else ()), device="cuda")
    op = chunk_kda if per_channel else chunk_gated_delta_rule
    given = [x.requires_grad_(backward) for x in (q, k, v, beta)]
    d_y = torch.randn_like(v)

    def call() -> Any:
        y, state = op(*given[:3], log_g, given[3], output_final_state=True)
        return torch.autograd.grad(y, given, d_y) if backward else (y, state)

    return {"fla": kernel_microseconds(call)}


def ssd_rows(copy: float | None) -> Iterator[Row]:
    """The layer of Mamba-2 2.7B."""
    steps, heads, dim, states = 4096, 80, 64, 128
    x, b, c = (normal((1, steps, *shape), DTYPE) for shape in ((heads, dim), (1, states), (1, states)))
    dt, A, D = mx.random.uniform(0.01, 0.1, (1, steps, heads)), -mx.random.uniform(1, 16, (heads,)), mx.ones(heads)
    arrays = [x, dt, A, b, c, D]
    mx.eval(arrays)

    def scan(*given: mx.array) -> Arrays:
        return list(ssd_scan(*given))

    cotangents = [mx.ones_like(y) for y in scan(*arrays)]
    work = {"bytes": 2 * x.nbytes}
    yield compare(f"ssd_scan, {steps} steps", {"ours": partial(scan, *arrays)}, work=work, copy=copy)
    calls: dict[str, Call] = {"ours": partial(trained, scan, arrays, cotangents)}
    yield compare(f"ssd_scan, {steps} steps, forward and backward", calls, work=work, copy=copy)


def delta_rows(copy: float | None) -> Iterator[Row]:
    for per_channel in (False, True):
        kind = "per channel" if per_channel else "per head"
        for steps in (1, 128, 1024, 4096):
            arrays = draw(steps, per_channel)
            calls: dict[str, Call] = {"ours": in_turn(arrays)}
            if steps <= 128:  # its graph has ten ops a step
                calls["mlx_lm"] = partial(of_mlx_lm, *arrays)
            work: dict[str, float] = {"bytes": 2 * (arrays[5].nbytes if steps == 1 else arrays[2].nbytes)}
            row = compare(f"gated_delta {kind}, {steps} steps", calls, work=work, copy=copy)
            yield with_peers(row, fla_microseconds(steps, per_channel, backward=False)) if steps >= 1024 else row
            if steps >= 1024:
                cotangents = [normal(x.shape, x.dtype) for x in ours(*arrays)]
                calls = {"ours": in_turn(arrays, cotangents)}
                row = compare(f"gated_delta {kind}, {steps} steps, forward and backward", calls, work=work, copy=copy)
                yield with_peers(row, fla_microseconds(steps, per_channel, backward=True))
    yield from ssd_rows(copy)
