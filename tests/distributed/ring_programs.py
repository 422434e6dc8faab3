"""What the tests of ring attention run in each process. Every rank knows the whole arrays and compares its part."""

import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_anvil
from mlx_anvil.distributed import ring_attention


@dataclass(frozen=True)
class Case:
    """A call, and the sizes of its whole arrays."""

    batch: int = 1
    heads: tuple[int, int] = (4, 2)  # of q, of k
    part: int = 24  # rows of a rank
    dims: tuple[int, int] = (32, 32)  # of k, of v
    dtype: str = "float32"
    sinks: bool = False
    lengths: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def rows_of(rank: int, ranks: int, part: int, layout: str) -> np.ndarray:
    """The positions of a rank's rows."""
    if layout == "contiguous":
        return np.arange(rank * part, (rank + 1) * part)
    chunk = part // 2
    chunks = [np.arange(i * chunk, (i + 1) * chunk) for i in (rank, 2 * ranks - 1 - rank)]
    return np.concatenate(chunks)


def arrays_of(case: Case, ranks: int, seed: int) -> dict[str, mx.array]:
    """q, k, v, d_out, d_lse and perhaps sinks, of the whole sequence."""
    draw = np.random.default_rng(seed)
    length, (q_heads, kv_heads), (k_dim, v_dim) = case.part * ranks, case.heads, case.dims
    shapes = {
        "q": (q_heads, length, k_dim),
        "k": (kv_heads, length, k_dim),
        "v": (kv_heads, length, v_dim),
        "d_out": (q_heads, length, v_dim),
        "d_lse": (q_heads, length),
    }
    arrays = {name: mx.array(draw.standard_normal((case.batch, *s)).astype(np.float32)) for name, s in shapes.items()}
    if case.sinks:
        arrays["sinks"] = mx.array(draw.standard_normal(q_heads).astype(np.float32))
    return {name: x if name == "d_lse" else x.astype(getattr(mx, case.dtype)) for name, x in arrays.items()}


def lengths_of(case: Case, arrays: dict[str, mx.array]) -> mx.array:
    return mx.minimum(mx.array(case.lengths), arrays["q"].shape[2])


def whole(case: Case, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Results and gradients by one process."""
    options = {key: value for key, value in case.options.items() if key != "layout"}
    if case.lengths is not None:
        lengths = lengths_of(case, arrays)
        options |= {"lengths": lengths, "q_lengths": lengths}
    return with_gradients(mlx_anvil.flash_attention, arrays, options)


def with_gradients(attention: Any, arrays: dict[str, mx.array], options: dict[str, Any]) -> dict[str, mx.array]:
    names = [name for name in ("q", "k", "v", "sinks") if name in arrays]

    def function(*values: mx.array) -> list[mx.array]:
        given = dict(zip(names, values, strict=True))
        return list(attention(given.pop("q"), given.pop("k"), given.pop("v"), return_lse=True, **given, **options))

    cotangents = [arrays["d_out"], arrays["d_lse"]]
    results, gradients = mx.vjp(function, [arrays[name] for name in names], cotangents)
    named = dict(zip(("out", "lse"), results, strict=True))
    return named | {f"d_{name}": x for name, x in zip(names, gradients, strict=True)}


def part_of(x: mx.array, rows: np.ndarray) -> mx.array:
    return mx.contiguous(x[:, :, mx.array(rows)])


def errors(cases: list[Case], seed: int, simulated: bool = False) -> list[dict[str, tuple[float, float]]]:
    """For each case and result, the largest deviation of ring attention from float32 attention by one process, and that
    of attention by one process in the case's dtype. Both are relative to the largest number."""
    group = mx.distributed.init()
    found = []
    for case in cases:
        arrays = arrays_of(case, group.size(), seed)
        rows = rows_of(group.rank(), group.size(), case.part, case.options.get("layout", "contiguous"))
        truth = whole(case, {name: x.astype(mx.float32) for name, x in arrays.items()})
        peer = whole(case, arrays)
        own = {name: x if name == "sinks" else part_of(x, rows) for name, x in arrays.items()}
        lengths = {} if case.lengths is None else {"lengths": lengths_of(case, arrays)}
        with mlx_anvil.simulate(checked=True) if simulated else nullcontext():
            results = with_gradients(ring_attention, own, {"group": group, **case.options, **lengths})
            if "d_sinks" in results:  # each rank's is of its own queries
                results["d_sinks"] = mx.distributed.all_sum(results["d_sinks"].astype(mx.float32), group=group)
            mx.eval(results)
        found.append(
            {
                name: (
                    deviation(x, truth[name], name, rows),
                    deviation(part(peer[name], name, rows), truth[name], name, rows),
                )
                for name, x in results.items()
            }
        )
    return found


def part(x: mx.array, name: str, rows: np.ndarray) -> mx.array:
    return x if name == "d_sinks" else part_of(x, rows)


def deviation(x: mx.array, truth: mx.array, name: str, rows: np.ndarray) -> float:
    everything = np.array(truth)
    want, have = np.array(part(truth, name, rows)), np.array(x.astype(mx.float32))
    assert have.shape == want.shape, (name, have.shape, want.shape)
    infinite = np.isinf(want)  # the lse of rows that see no key
    assert (have[infinite] == want[infinite]).all(), name
    scale = np.abs(everything[np.isfinite(everything)]).max(initial=1e-30)
    return float(np.abs(have[~infinite] - want[~infinite]).max(initial=0) / scale)


def outputs_alone(seed: int, part_rows: int) -> tuple[int, int]:
    """The peak of MLX's memory during a call with gradients, and the bytes of a rank's own arrays."""
    group = mx.distributed.init()
    case = Case(heads=(2, 2), part=part_rows, dims=(16, 16))
    mx.random.seed(seed)
    shape = (case.batch, case.heads[0], case.part, case.dims[0])
    arrays = {name: mx.random.normal(shape) for name in ("q", "k", "v", "d_out")}
    arrays["d_lse"] = mx.zeros(shape[:3])
    mx.eval(arrays)
    mx.reset_peak_memory()
    results = with_gradients(ring_attention, arrays, {"group": group, "mask": "causal", "layout": "zigzag"})
    mx.eval(results)
    return mx.get_peak_memory(), sum(x.nbytes for x in [*arrays.values(), *results.values()])


def unlike_calls(options: list[dict[str, Any]]) -> str:
    """The error of a call that differs from that of another rank; each rank has its own options."""
    group = mx.distributed.init()
    own = dict(options[group.rank()])
    x = mx.zeros((1, 2, own.pop("length", 8), own.pop("head_dim", 16))).astype(getattr(mx, own.pop("dtype", "float32")))
    try:
        mx.eval(ring_attention(x, x, x, group=group, **own))
    except RuntimeError as error:
        return str(error)
    return ""


def killed_neighbour(victim: int) -> str:
    """The error of a rank whose neighbour ends between two calls."""
    group = mx.distributed.init()
    x = mx.random.normal((1, 2, 4096, 16))
    mx.eval(ring_attention(x, x, x, group=group))
    if group.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for _ in range(2):  # the second must not wait for a connection that is gone
        try:
            mx.eval(ring_attention(x, x, x, group=group))
        except RuntimeError as error:
            errors.append(str(error))
    return "\n".join(errors)
