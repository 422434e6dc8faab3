"""The tables of docs/distributed.md: how wrong the model is, what it assumes, and what it predicts.

python bench/distributed_tables.py      # prints them
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import click
from rich.console import Console

import distributed_cost as cost
import distributed_fit
from distributed_cost import Cost, Link, Machine
from distributed_public import LARGE, LINKS, SMALL, PublishedLink, machine
from op_tables import Results, markdown

COUNTS = (2, 4, 8, 16, 32, 64)
PAYS = 0.5  # of ideal
PROMPT, LONG, CONTEXT = 2048, 131072, 4096
Run = Callable[[Machine, Link, int], Cost]


@dataclass(frozen=True)
class Scheme:
    """A row of the predictions.

    Attributes:
        name: as the table has it.
        run: the cost of n machines.
        is_split: whether n machines share one machine's work. Otherwise each has as much as one alone.
        color: in the picture; none keeps it out.
    """

    name: str
    run: Run
    is_split: bool = True
    color: str = ""

    def speedup(self, link: PublishedLink, n: int, which: str = "expected") -> float | None:
        """Over one machine; None where the model cannot be split so far."""
        here, chosen = machine(link.machine), getattr(link, which)
        try:
            ratio = self.run(here, chosen, 1).seconds / self.run(here, chosen, n).seconds
        except ValueError:
            return None
        return ratio if self.is_split else n * ratio

    def pays_until(self, link: PublishedLink, which: str = "expected") -> int:
        """The most machines that reach half of the ideal speed-up; 1 if two do not."""
        most = 1
        for n in COUNTS:
            found = self.speedup(link, n, which)
            if found is None or found < PAYS * n:
                break
            most = n
        return most


def _ring(machine: Machine, link: Link, n: int, *, zigzag: bool, gradients: bool) -> Cost:
    return cost.ring_attention(machine, LARGE, link, n, LONG, zigzag=zigzag, gradients=gradients)


SCHEMES = (
    Scheme(
        "tensor-parallel decode, 4k context",
        lambda m, link, n: cost.tensor_parallel(m, LARGE, link, n, 1, CONTEXT),
        color="#0b6e4f",
    ),
    Scheme(
        "tensor-parallel prefill, 2k tokens",
        lambda m, link, n: cost.best_tensor_parallel(m, LARGE, link, n, PROMPT, PROMPT),
        color="#7fbf9e",
    ),
    Scheme(
        "decode over a sharded cache, 128k context",
        lambda m, link, n: cost.sharded_cache(m, LARGE, link, n, LONG),
        color="#e07a1f",
    ),
    Scheme("ring attention, 128k, contiguous", partial(_ring, zigzag=False, gradients=False)),
    Scheme("ring attention, 128k, zig-zag", partial(_ring, zigzag=True, gradients=False), color="#2f4b8f"),
    Scheme("ring attention with gradients, zig-zag", partial(_ring, zigzag=True, gradients=True)),
    Scheme(
        "sequence-parallel prefill, 128k tokens",
        lambda m, link, n: cost.sequence_parallel_prefill(m, LARGE, link, n, LONG),
    ),
    Scheme(
        "data-parallel step, 4k tokens each",
        lambda m, link, n: cost.data_parallel(m, SMALL, link, n, 4096),
        is_split=False,
        color="#a23b72",
    ),
    Scheme(
        "the same with ZeRO-1",
        lambda m, link, n: cost.data_parallel(m, SMALL, link, n, 4096, sharded=True),
        is_split=False,
    ),
    Scheme(
        "data-parallel step, 32k tokens each",
        lambda m, link, n: cost.data_parallel(m, SMALL, link, n, 32768),
        is_split=False,
    ),
    Scheme("pipelined decode, one sequence", lambda m, link, n: cost.pipeline_decode(m, LARGE, link, n, CONTEXT)),
    Scheme(
        "pipelined prefill, 32k tokens",
        lambda m, link, n: cost.pipeline_prefill(m, LARGE, link, n, 32768),
        color="#8d99ae",
    ),
)


def _speedup(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def speedups(_: Results) -> str:
    """Every scheme over every link, and how far it pays, by the expected, the slow and the fast link."""
    rows = []
    for scheme in SCHEMES:
        for link in LINKS:
            until = [scheme.pays_until(link, which) for which in ("expected", "slow", "fast")]
            spread = sorted(set(until))
            reach = f"{until[0]}" if len(spread) == 1 else f"{until[0]} ({spread[0]} to {spread[-1]})"
            figures = (_speedup(scheme.speedup(link, n)) for n in COUNTS)
            rows.append([scheme.name, link.name.split(",")[0], *figures, reach])
    return markdown(("scheme", "link", *map(str, COUNTS), "pays until"), rows)


def links(_: Results) -> str:
    """What the predictions assume of links."""
    rows = []
    for link in LINKS:
        figures = (
            (each.latency * 1e6, each.bandwidth / 1e9, each.call * 1e6)
            for each in (link.expected, link.fast, link.slow)
        )
        ranges = [f"{middle:.3g} ({low:.3g} to {high:.3g})" for middle, low, high in zip(*figures, strict=True)]
        rows.append([link.name, *ranges, f"latency: {link.latency_source}; bandwidth: {link.bandwidth_source}"])
    return markdown(("link, backend", "latency, us", "bandwidth, GB/s", "call, us", "from"), rows)


def machines(_: Results) -> str:
    """What the predictions assume of machines."""
    rows = []
    for name in dict.fromkeys(link.machine for link in LINKS):
        here = machine(name)
        cells = (here.memory / 1e9, here.flops / 1e12, here.attention_flops / 1e12, here.launch * 1e6)
        rows.append([name, *(f"{cell:.0f}" if cell >= 100 else f"{cell:.3g}" for cell in cells)])
    return markdown(("machine", "memory, GB/s", "products, TFLOP/s", "attention, TFLOP/s", "launch, us"), rows)


def fit(results: Results) -> str:
    """The errors of the fit, by what ran."""
    parameters, runs = distributed_fit.fitted_to(results)
    rows = []
    for (what, use), group in distributed_fit.groups(runs).items():
        counts = ", ".join(map(str, sorted({run.processes for run in group})))
        ratios = sorted(run.ratio(parameters) for run in group)
        error = f"{distributed_fit.error(group, parameters):.0%}"
        rows.append([what, use, counts, str(len(group)), error, f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
    return markdown(("run", "use", "processes", "runs", "typical error", "prediction / measured"), rows)


@click.command()
def main() -> None:
    """Prints the tables."""
    console, results = Console(width=200), distributed_fit.read()
    for table in (fit, links, machines, speedups):
        console.print(table(results), markup=False)
        console.print()


if __name__ == "__main__":
    main()
