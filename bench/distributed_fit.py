"""Fits the model of distributed_cost.py to the runs of communication.py, and says how wrong it is.

    python bench/distributed_fit.py      # prints the fit and its errors

Fitted: transfers of some sizes and process counts. Held out: other sizes, all of three processes, and the runs that
compute as well. Runs of more processes than cores are left out: there the scheduler decides.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log
from typing import Any

from harness import RESULTS, console_table

import click
from rich.console import Console

import communication_ranks as ranks
import distributed_cost as model
from distributed_cost import Link, Machine
from mlx_anvil.mslc.estimation import typical_error

Results = dict[str, Any]
NAME = "communication_cpu"
QUARTILE = "low"  # of the rounds: other programs of the machine add to a time, and are not in the model
HELD_SIZES = (64 << 10, 4 << 20)
HELD_PROCESSES = 3
MOST_ERROR = 1.0  # of one time, as a logarithm: a time far off does not bend the rest


@dataclass(frozen=True)
class Parameters:
    """Of processes on one machine, as those of a Link.

    Attributes:
        message: what `call` is of an exchange, whose two streams wait for each other.
        contention: 0 if each pair of processes has its own bandwidth, 1 if all share one.
    """

    latency: float = 10e-6
    bandwidth: float = 3e9
    call: float = 10e-6
    message: float = 50e-6
    local: float = 5e9
    two_ways: float = 1.5
    contention: float = 0.3

    def link(self, n: int) -> Link:
        bandwidth = self.bandwidth / (n / 2) ** self.contention
        return Link("local", self.latency, bandwidth, self.call, self.local, two_ways=self.two_ways)

    def exchange(self, n: int, size: float) -> float:
        return model.exchange(replace(self.link(n), call=self.message), n, size).seconds


LEAST = Parameters(1e-7, 1e8, 1e-7, 1e-7, 1e8, 1.0, 0.01)
MOST = Parameters(1e-3, 1e11, 1e-3, 1e-2, 1e11, 2.0, 1.0)
TRANSFERS: dict[str, Callable[[Parameters, int, float], float]] = {
    "all_sum": lambda p, n, size: model.all_reduce(p.link(n), n, size).seconds,
    "all_gather": lambda p, n, size: model.all_gather(p.link(n), n, size).seconds,
    "exchange": Parameters.exchange,
}


@dataclass(frozen=True)
class Run:
    """A measured time and its prediction."""

    what: str
    processes: int
    measured: float
    predicted: Callable[[Parameters], float]
    held: bool

    def ratio(self, parameters: Parameters) -> float:
        return self.predicted(parameters) / self.measured


def read() -> Results:
    results: Results = json.loads((RESULTS / f"{NAME}.json").read_text())
    return results


def _transfer(seconds: Callable[[Parameters, int, float], float], n: int, size: int, p: Parameters) -> float:
    return seconds(p, n, size)


def transfers(results: Results) -> list[Run]:
    runs = []
    for row in results["rows"]:
        if "bytes" not in row or row["processes"] > results["cores"]:
            continue
        n, size = row["processes"], row["bytes"]
        held = n == HELD_PROCESSES or size in HELD_SIZES
        predicted = partial(_transfer, TRANSFERS[row["what"]], n, size)
        runs.append(Run(row["what"], n, row["seconds"][QUARTILE], predicted, held))
    return runs


def machine(results: Results, processes: int) -> Machine:
    """The rates of one process while this many compute."""
    rates = {row["what"]: row["work"] / row["seconds"][QUARTILE] for row in results["rows"]
             if row["processes"] == processes and "work" in row}  # fmt: skip
    products = rates["rate: quantized product, 1 row"], rates["rate: quantized product, 128 rows"]
    return Machine("this machine", *products, rates["rate: attention, 2048 tokens"], 0.0)


def _layers(row: Results, here: Machine) -> Callable[[Parameters], float]:
    n, tokens = row["processes"], row["tokens"]
    weights = 2 * ranks.HIDDEN * ranks.MLP / n
    compute = model.products(here, weights, ranks.BITS / 8 + 4 / ranks.GROUP_SIZE, tokens)
    size = tokens * ranks.HIDDEN * 2
    return lambda p: row["layers"] * (compute + model.all_reduce(p.link(n), n, size).seconds)


def _ring(row: Results, here: Machine) -> Callable[[Parameters], float]:
    n, part = row["processes"], row["length"] // row["processes"]
    hop = 4 * ranks.ATTENTION_HEADS * part**2 * ranks.HEAD_DIM / here.attention_flops
    size = 2 * part * ranks.HEAD_DIM * 4
    return lambda p: hop + (n - 1) * max(hop, p.exchange(n, size))


def schemes(results: Results) -> list[Run]:
    """Runs that compute and communicate. None was used in the fit."""
    runs = []
    for row in results["rows"]:
        if row["what"] not in ("layers: layers", "ring: ring") or not 1 < row["processes"] <= results["cores"]:
            continue
        here = machine(results, row["processes"])
        is_ring = row["what"] == "ring: ring"
        name = (
            "ring of attention"
            if is_ring
            else f"tensor-parallel layers, {'decode' if row['tokens'] == 1 else 'prefill'}"
        )
        predicted = (_ring if is_ring else _layers)(row, here)
        runs.append(Run(name, row["processes"], row["seconds"][QUARTILE], predicted, True))
    return runs


def loss(parameters: Parameters, runs: Sequence[Run]) -> float:
    return sum(min(abs(log(run.ratio(parameters))), MOST_ERROR) for run in runs) / len(runs)


def fit(runs: Sequence[Run]) -> Parameters:
    """Moves one parameter at a time while that helps, by smaller and smaller steps."""
    best, step = Parameters(), 0.5
    least = loss(best, runs)
    while step > 0.01:
        improved = False
        for name in asdict(best):
            for factor in (1 + step, 1 / (1 + step)):
                moved = min(max(getattr(best, name) * factor, getattr(LEAST, name)), getattr(MOST, name))
                tried = Parameters(**{**asdict(best), name: moved})
                if (found := loss(tried, runs)) < least - 1e-9:
                    best, least, improved = tried, found, True
        if not improved:
            step /= 1.6
    return best


def fitted_to(results: Results) -> tuple[Parameters, list[Run]]:
    """The parameters, and every run with its prediction."""
    runs = transfers(results)
    return fit([run for run in runs if not run.held]), runs + schemes(results)


def error(runs: Iterable[Run], parameters: Parameters) -> float:
    """The typical factor by which predictions are off, minus 1."""
    return typical_error(run.ratio(parameters) for run in runs)


def groups(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """By what ran and how the run was used."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.what, "held out" if run.held else "fitted"), []).append(run)
    return found


@click.command()
def main() -> None:
    """Prints the fit and its errors."""
    console = Console()
    parameters, runs = fitted_to(read())
    console.print({name: float(f"{value:.3g}") for name, value in asdict(parameters).items()})
    table = console_table(
        "prediction / measured", words=("", "", "processes"), figures=("runs", "typical error", "worst")
    )
    for (what, use), group in groups(runs).items():
        counts = ", ".join(map(str, sorted({run.processes for run in group})))
        worst = max((run.ratio(parameters) for run in group), key=lambda r: abs(log(r)))
        table.add_row(what, use, counts, str(len(group)), f"{error(group, parameters):.0%}", f"{worst:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
