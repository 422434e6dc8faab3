"""The tables of ``python -m mlx_anvil``, and the sentence that closes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from mlx_anvil._check import Row
from mlx_anvil._cli import Columns, bytes_text, ratio_text, time_text


@dataclass(frozen=True)
class Summary:
    """All rows of one op on one backend.

    Attributes:
        op: Python name of the op.
        worst: the row whose error is the largest fraction of its limit.
        forward: the timed forward row; None if it failed before it was timed.
        gradient: the timed gradient row; None likewise.
    """

    op: str
    worst: Row
    forward: Row | None
    gradient: Row | None


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """One per backend and op, in this order. An op's times are those of the first row of its kind that has any."""
    found = []
    for backend, op in sorted(dict.fromkeys((row.backend, row.op) for row in rows)):
        group = [row for row in rows if (row.backend, row.op) == (backend, op)]
        timed = {row.what: row for row in reversed(group) if row.times is not None and row.represents_op}
        worst = max(group, key=lambda row: row.share)
        found.append(Summary(op, worst, timed.get("forward"), timed.get("gradient")))
    return found


def _figure(value: float) -> str:
    """``2.6e-3``."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _error(row: Row) -> Text:
    text = "raised" if row.exception else "nan" if row.error != row.error else _figure(row.error)
    return Text(text, style="green" if row.passed else "bold red")


def _limit(row: Row) -> str:
    return "-" if row.exception else _figure(row.limit)


def _speedup(row: Row | None) -> str:
    return ratio_text(row.times.speedup) if row is not None and row.times else "-"


def summary_table(rows: Sequence[Row]) -> Columns:
    """One row per op and backend."""
    table = Columns(("op", "on"), ("error", "limit", "ours", "MLX", "forward", "grad"))
    for summary in summaries(rows):
        forward, worst = summary.forward, summary.worst
        times = forward.times if forward is not None else None
        ran_on = forward.ran_on if forward is not None else worst.ran_on
        seconds = (time_text(times.ours), time_text(times.mlx)) if times else ("-", "-")
        ratios = _speedup(forward), _speedup(summary.gradient)
        table.row(summary.op, ran_on or worst.backend, _error(worst), _limit(worst), *seconds, *ratios)
    return table


def full_table(rows: Sequence[Row]) -> Columns:
    """One row per case, under headings that name the op, the shape of its inputs and the backend."""
    table = Columns(("", "dtype"), ("error", "limit", "ours", "MLX", "speed-up", "memory"))
    previous = None
    for row in rows:
        name = f"{row.op}/{row.variant}" if row.variant else row.op
        where = row.backend if row.ran_on in ("", row.backend) else f"{row.ran_on} on {row.backend}"
        title = f"{name}  {'x'.join(map(str, row.shape))}  {where}"
        if title != previous:
            table.heading(title)
        previous = title
        cells = ("-", "-", "-", "-")
        if row.times:
            t = row.times
            cells = (time_text(t.ours), time_text(t.mlx), ratio_text(t.speedup), bytes_text(t.peak_memory))
        table.row(f"  {row.what}", row.dtype, _error(row), _limit(row), *cells)
    return table


def notes(show_all: bool) -> list[str]:
    """What the columns of the tables mean."""
    relative = "error: relative to the largest magnitude of the result"
    if show_all:
        return [f"{relative}. speed-up: time of MLX's ops over ours."]
    return [
        f"{relative}; of all dtypes, shapes and variants, the one nearest to its limit.",
        "ours, MLX: time of a forward call, float32 on a CPU and bfloat16 on a GPU.",
        "forward, grad: time of MLX's ops over ours, for a call and for its gradient.",
    ]


def closing(rows: Sequence[Row]) -> str:
    """One sentence: did everything pass, which op gains most, and what to do next."""
    failed = [row for row in rows if not row.passed]
    if failed:
        ops = ", ".join(dict.fromkeys(row.op for row in failed))
        raised = next((f"; {row.op} raised {row.exception}" for row in failed if row.exception), "")
        return f"FAILED: {len(failed)} of {len(rows)} results, of {ops}{raised}. Every result of these ops:"
    passed = f"Passed: all {len(rows)} results are within their limits"
    timed = [(row.times.speedup, row) for row in rows if row.times]
    if not timed:
        return passed + "."
    speedup, best = max(timed, key=lambda pair: pair[0])
    times = ratio_text(speedup).removesuffix("x")
    gain = f"{best.op} gains most, {times} times as fast as MLX ({best.what}, {best.backend})"
    return f"{passed}; {gain}; next, use the ops in a model: mlx_anvil.patch(model)."


def command_again(rows: Sequence[Row], seed: int) -> str:
    """The command that shows every row of the failed ops, with the same inputs; empty if all passed."""
    ops = dict.fromkeys(row.op for row in rows if not row.passed)
    return f"python -m mlx_anvil --all {' '.join(f'--op {op}' for op in ops)} --seed {seed}" if ops else ""
