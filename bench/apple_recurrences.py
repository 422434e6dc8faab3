"""The table "Recurrences" of docs/apple-kernels.md: linear attention beside the kernels of mlx-lm and MLX.

    tools/agx/build.sh                  # once
    python bench/apple_recurrences.py   # some minutes; fetches two files of MLX's from GitHub
    python bench/plot.py                # writes the table

writes bench/results/apple_recurrences.json. Nothing is run on a GPU, and no time is measured: Mesa's compiler makes the
machine code of an M1 or M2, and the simulator says how often its parts run and what bytes are read and written. Layers
are those of Qwen3-Next (16 heads of k, 32 of v, of 128), Kimi Linear (32 heads of 128) and Mamba-2 2.7B (80 heads of 64,
128 states), in bfloat16. Of a prompt a few heads are simulated, which stand for all.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness import console_table, write_results

import click
import mlx.core as mx
from rich.console import Console

import apple_recurrence_launches as theirs
import mlx_anvil
from apple import simulated
from apple_mlx import needs_of
from apple_recurrence_launches import Launch, Pass
from mlx_anvil.mslc.estimate_work import combine_work

CHIP, STEPS = "M1", 1024
DIM, KEY_HEADS, HEADS = 128, 16, 32
SSD_HEADS, SSD_DIM, STATES = 80, 64, 128
CHANNELS, WIDTH = 8192, 4


@dataclass(frozen=True)
class Row:
    """A call of ours that is `scale` times smaller than the real one, and what others launch for the real one.

    `sizes` are bytes of the real arrays that do not grow with `scale`, by the kernels' names for them.
    """

    op: str
    what: str
    call: Callable[[], Any]
    peers: Mapping[str, Callable[[], Sequence[Launch | Pass]]]
    scale: float = 1
    sizes: Mapping[str, float] = field(default_factory=dict)


def _random(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.bfloat16)


# ---- gated_delta


def delta_arrays(steps: int, key_heads: int, heads: int, per_channel: bool) -> list[mx.array]:
    q, k = (_random(1, steps, key_heads, DIM) / 8 for _ in range(2))
    g = mx.random.uniform(0.5, 1, (1, steps, heads, DIM) if per_channel else (1, steps, heads))
    beta = mx.random.uniform(0, 1, (1, steps, heads)).astype(mx.bfloat16)
    return [q, k, _random(1, steps, heads, DIM), g, beta, mx.random.normal((1, heads, DIM, DIM))]


def normalized(steps: int) -> list[Launch | Pass]:
    """q and k as mlx-lm's `normalize_qk` makes them: an RMS norm and a product with a number for each."""
    size = steps * KEY_HEADS * DIM * 2
    return 2 * [theirs.rms_norm(steps * KEY_HEADS, DIM), Pass("scale", size, size)]


def delta_rows() -> list[Row]:
    rows = []
    for steps, per_channel, normalizes in (
        (1, False, False), (1, False, True), (1, True, False), (STEPS, False, False), (STEPS, True, False),
    ):  # fmt: skip
        key_heads, part = (HEADS, 1) if per_channel else (KEY_HEADS, 2)
        part = HEADS if steps == 1 else part
        arrays = delta_arrays(steps, key_heads, HEADS, per_channel)
        given = delta_arrays(steps, part * key_heads // HEADS, part, per_channel)
        eps = 1e-6 if normalizes else None
        before = normalized(steps) if normalizes else []

        def mlx_lm(arrays: Sequence[mx.array] = arrays, part: int = part, before: Any = before) -> Any:
            return [*before, theirs.of_mlx_lm("gated_delta", lambda m: m.gated_delta_kernel(*arrays), part)]

        def mlx(arrays: Sequence[mx.array] = arrays, part: int = part, before: Any = before) -> Any:
            return [*before, Pass("fill", 0, arrays[2].nbytes), theirs.gated_delta_update(arrays, part)]

        rows.append(
            Row("gated_delta", f"{_steps(steps)} per {'channel' if per_channel else 'head'}"
                f"{', normalised' if normalizes else ''}",
                lambda given=given, eps=eps: mlx_anvil.gated_delta(*given, normalize_eps=eps),
                {"mlx-lm": mlx_lm} | ({} if per_channel else {"MLX": mlx}), HEADS / part)
        )  # fmt: skip
    return rows


def _steps(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


# ---- ssd_scan


def ssd_arrays(steps: int, heads: int) -> dict[str, mx.array]:
    return {
        "x": _random(1, steps, heads, SSD_DIM), "dt": _random(1, steps, heads), "log": mx.random.normal((heads,)),
        "b": _random(1, steps, 1, STATES), "c": _random(1, steps, 1, STATES), "d": mx.ones((heads,)),
        "bias": mx.random.normal((heads,)), "state": mx.random.normal((1, heads, SSD_DIM, STATES)),
    }  # fmt: skip


def ssd_ours(a: Mapping[str, mx.array]) -> Any:
    options = {"dt_bias": a["bias"], "dt_softplus": True, "dt_limit": (0.001, 100.0)}
    return mlx_anvil.ssd_scan(a["x"], a["dt"], -mx.exp(a["log"]), a["b"], a["c"], a["d"], None, a["state"], **options)


def ssd_step() -> list[Launch | Pass]:
    a, numbers = ssd_arrays(1, SSD_HEADS), SSD_HEADS * 2
    names = ("x", "log", "b", "c", "d", "dt", "bias", "state")
    launch = theirs.of_mlx_lm(
        "ssm", lambda m: m.ssm_update_kernel(*(a[name] for name in names), (0.001, 100.0)), SSD_HEADS
    )
    return [Pass("compute_dt", 3 * numbers, 2 * numbers), launch]


def ssd_rows() -> list[Row]:
    """mlx-lm has a kernel for one token; for a prompt it has a graph of products and other ops of MLX's."""
    rows, part = [], 4
    for steps, heads in ((1, SSD_HEADS), (STEPS, part)):
        a = ssd_arrays(steps, heads)
        a["log"] = mx.array(a["log"])
        mx.eval(list(a.values()))
        peers = {"mlx-lm": ssd_step if steps == 1 else lambda: theirs.ssm_attn(STEPS, SSD_HEADS, SSD_DIM, STATES)}
        rows.append(
            Row("ssd_scan", _steps(steps), lambda a=a: ssd_ours(a), peers, SSD_HEADS / heads,
                dict.fromkeys("qk", steps * STATES * 2.0))
        )  # fmt: skip
    return rows


# ---- causal_conv1d, sigmoid_gate


def conv_rows() -> list[Row]:
    """Peer: the convolution of the state and x, as models call it, then SiLU."""
    rows = []
    for steps in (1, STEPS):
        part = CHANNELS if steps == 1 else CHANNELS // 8
        x, weight, state = _random(1, steps, part), _random(part, WIDTH), _random(1, WIDTH - 1, part)
        joined, kept = (steps + WIDTH - 1) * CHANNELS * 2, (WIDTH - 1) * CHANNELS * 2

        def peer(steps: int = steps, joined: int = joined, kept: int = kept) -> Any:
            conv = theirs.depthwise_conv1d(steps, CHANNELS, WIDTH)
            return [Pass("concatenate", joined, joined), Pass("state", kept, kept), conv, theirs.silu(steps * CHANNELS)]

        rows.append(
            Row("causal_conv1d", _steps(steps), lambda x=x, w=weight, s=state: mlx_anvil.causal_conv1d(x, w, None, s),
                {"MLX": peer}, CHANNELS / part)
        )  # fmt: skip
    return rows


def gate_rows() -> list[Row]:
    """A sigmoid and a product of MLX's: attention's gate of Qwen3-Next."""
    columns, rows = 4096, []
    for steps in (1, STEPS):
        part = min(steps, 8)
        x, gate = (_random(1, part, columns) for _ in range(2))
        rows.append(
            Row("sigmoid_gate", _steps(steps), lambda x=x, gate=gate: mlx_anvil.sigmoid_gate(x, gate),
                {"MLX": lambda n=steps * columns: theirs.sigmoid_product(n)}, steps / part)
        )  # fmt: skip
    return rows


FAMILIES: list[Callable[[], list[Row]]] = [delta_rows, ssd_rows, conv_rows, gate_rows]


# ---- counts


def _summary(launches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Totals of all launches, and what the kernel needs that issues most."""
    largest = max(launches, key=lambda launch: launch.get("issued", 0))
    totals = {name: sum(x.get(name, 0) for x in launches) for name in ("issued", "cycles", "bytes")}
    return totals | {name: largest[name] for name in ("registers", "spills", "threads")} | {"launches": list(launches)}


def _launch(work: Any, compiled: Any) -> dict[str, Any]:
    counts = {"kernel": work.kernel, "issued": round(work.instructions)}
    counts["cycles"] = round(max(work.simple, work.complex))
    missed = {"unexplained": round(work.unexplained, 2)} if work.unexplained > 0.1 else {}
    return counts | {"bytes": round(work.bytes_read + work.bytes_written)} | needs_of(compiled) | missed


def our_launches(row: Row) -> list[dict[str, Any]]:
    found = []
    for launch in simulated((row.call, ()), CHIP):
        assert launch, f"{row.op} leaves a part to MLX"
        key, threads, profile, compiled = launch
        work = combine_work(profile, compiled, threads, row.scale, row.sizes, laid_out=True)
        found.append(_launch(work, compiled) | {"kernel": key})
    return found


def their_launches(made: Sequence[Launch | Pass]) -> list[dict[str, Any]]:
    return [
        {"kernel": x.name, "bytes": round(x.read + x.written)} if isinstance(x, Pass) else _launch(*x.count())
        for x in made
    ]


@click.command()
@click.option("--only", default="", help="Part of a row's name: prints these rows and writes nothing.")
def main(only: str) -> None:
    """Counts, prints the table, writes its results."""
    mx.random.seed(0)
    found = []
    for row in (row for family in FAMILIES for row in family()):
        name = f"{row.op}, {row.what}"
        if only not in name:
            continue
        print(name, file=sys.stderr)
        ours = _summary(our_launches(row))
        peers = {who: _summary(their_launches(make())) for who, make in row.peers.items()}
        found.append({"op": row.op, "what": row.what, "dtype": "bfloat16", "ours": ours, "peers": peers})
    table = console_table(
        "instructions issued; MB, registers, spills: ours / theirs", words=("", "beside"),
        figures=("millions", "ratio", "MB", "registers", "spills"),
    )  # fmt: skip
    for row in found:
        for who, peer in row["peers"].items():
            ours = row["ours"]
            pairs = [f"{ours[name]} / {peer[name]}" for name in ("registers", "spills")]
            ratio = f"{ours['issued'] / peer['issued']:.2f}"
            megabytes = " / ".join(f"{x['bytes'] / 1e6:.3g}" for x in (ours, peer))
            table.add_row(f"{row['op']}, {row['what']}", who, f"{ours['issued'] / 1e6:.3g}", ratio, megabytes, *pairs)
    console = Console(width=80)
    console.print(table)
    if not only:
        console.print(write_results("apple_recurrences", found, model="counts; nothing was run on a GPU"))


if __name__ == "__main__":
    main()
