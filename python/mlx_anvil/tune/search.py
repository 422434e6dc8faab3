"""Measures the values of a choice, each only if its results are right, and selects one."""

import math
import statistics
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

import mlx_anvil
from mlx_anvil import _ext, _tuning
from mlx_anvil.bench.timing import measure
from mlx_anvil.tune.candidates import LIMITS, Candidates, Workload

# A value has to be so much better than the default. Medians of a quiet machine repeat within 2 %.
WORTH = 0.97
# What stands for seconds in the simulator.
COUNTED = ("device_lines", "barriers", "collectives", "matrix_multiplies")


@dataclass(frozen=True)
class Row:
    """One behaviour of one workload.

    Attributes:
        label: of the workload.
        values: those of the choice that behave so.
        cost: seconds, or counts in the simulator; NaN if the result was wrong.
        relative: ``cost`` by that of the default's behaviour.
        error: of the result, relative to its largest magnitude.
        limit: the largest error allowed.
    """

    label: str
    values: tuple[int, ...]
    cost: float
    relative: float
    error: float
    limit: float

    @property
    def right(self) -> bool:
        """True if the result is within its limit."""
        return self.error <= self.limit


@dataclass
class Found:
    """What was found about a choice.

    Attributes:
        name: as in the file.
        default: its value before.
        chosen: the best value; the default if none is better by 3 %.
        gain: geometric mean of how much faster the chosen value is, over the calls that it changes.
        wrong: values with wrong results.
        rows: what was measured.
    """

    name: str
    default: int
    chosen: int
    gain: float
    wrong: list[int]
    rows: list[Row] = field(default_factory=list)


class Tuner:
    """Tries values of choices on one device. Use it as a ``with`` block: the file that exists is ignored inside.

    Args:
        backend: of ``_cli.chosen_backends``, or ``"simulator"``.
        chip: that the simulator presents itself as.
        rounds: of each measurement.
    """

    def __init__(self, backend: str, chip: str | None = None, rounds: int = 9) -> None:
        self.simulated = backend == "simulator"
        self._chip = chip
        self._rounds = rounds
        self._forced: dict[str, int] = {}
        self._blocks = ExitStack()

    def __enter__(self) -> "Tuner":
        _ext._set_choices_file(lambda key: {})
        self._blocks.callback(_tuning.forget)
        self._blocks.callback(self._force, {})
        self._blocks.enter_context(mx.stream(getattr(mx, self._device_name)))
        if self.simulated:
            self._blocks.enter_context(mlx_anvil.simulate(chip=self._chip))
        return self

    def __exit__(self, *error: object) -> None:
        self._blocks.close()

    @property
    def key(self) -> str:
        """The device's name in the file."""
        return _ext._choices_key(self._device_name)

    @property
    def _device_name(self) -> str:
        return "cpu" if self.simulated else "gpu"

    def search(self, candidates: Candidates) -> Found:
        """Measures every value of a choice, and selects one."""
        default = _ext._choices(self._device_name)[candidates.name]
        values = sorted({*candidates.values, default})
        rows = [
            row
            for workload in candidates.workloads(self.simulated)
            for row in self._rows(candidates, workload, values, default)
        ]
        wrong = sorted({value for row in rows if not row.right for value in row.values})
        scores = {
            value: math.exp(statistics.fmean(math.log(row.relative) for row in rows if value in row.values))
            for value in values
            if value not in wrong
        }
        best = min(scores, key=lambda value: (scores[value], value != default), default=default)
        # A threshold may change few of the calls: its gain is that of these.
        changed = [row.relative for row in rows if best in row.values and default not in row.values]
        gain = 1 / math.exp(statistics.fmean(map(math.log, changed))) if changed else 1.0
        if default in scores and gain * WORTH < 1:
            best, gain = default, 1.0
        return Found(candidates.name, default, best, gain, wrong, rows)

    def _force(self, values: dict[str, int]) -> None:
        """Makes launches use these values. That takes microseconds, so only changes are passed on."""
        if values != self._forced:
            _ext._force_choices(values)
            self._forced = values

    def _rows(self, candidates: Candidates, workload: Workload, values: list[int], default: int) -> Iterator[Row]:
        behaviours: dict[Hashable, list[int]] = {}
        for value in values:
            behaviours.setdefault(candidates.behaviour(value, workload.size), []).append(value)
        call = workload.make()
        with mlx_anvil.composed():  # the op's definition in MLX ops, in float32
            expected = call()
            mx.eval(expected)

        def run(values: list[int]) -> mx.array:
            self._force({candidates.name: values[0]})
            result = call()
            mx.eval(result)
            return result

        limit = LIMITS[expected.dtype]
        errors = {key: error_of(run(alike), expected) for key, alike in behaviours.items()}
        right: dict[Hashable, Callable[[], Any]] = {
            key: partial(run, alike) for key, alike in behaviours.items() if errors[key] <= limit
        }
        del expected
        costs = self._counts(right) if self.simulated else self._times(right)
        usual = costs.get(candidates.behaviour(default, workload.size))
        for key, alike in behaviours.items():
            cost, relative = math.nan, math.nan
            if key in costs:
                cost = statistics.median(costs[key])
                relative = statistics.median(a / b for a, b in zip(costs[key], usual or costs[key], strict=True))
            yield Row(workload.label, tuple(alike), cost, relative, errors[key], limit)

    def _times(self, contestants: dict[Hashable, Callable[[], Any]]) -> dict[Hashable, list[float]]:
        """Seconds of each round, interleaved."""
        keys = {str(index): key for index, key in enumerate(contestants)}
        timings = measure({label: contestants[key] for label, key in keys.items()}, rounds=self._rounds)
        return {key: timings[label].rounds for label, key in keys.items()}

    def _counts(self, contestants: dict[Hashable, Callable[[], Any]]) -> dict[Hashable, list[float]]:
        """In place of seconds: 128-byte lines of device memory, barriers, SIMD-group operations and products."""
        counts: dict[Hashable, list[float]] = {}
        for key, run in contestants.items():
            with mlx_anvil.simulate(profiled=True, chip=self._chip) as profiles:
                run()
            metrics = [profile.metrics() for profile in profiles]
            counts[key] = [float(sum(each[name] or 0 for each in metrics for name in COUNTED))]
        return counts


def error_of(result: mx.array, expected: mx.array) -> float:
    """The largest deviation, relative to the largest magnitude; infinite if it is no number."""
    wide = expected.astype(mx.float32)
    difference = float(mx.abs(result.astype(mx.float32) - wide).max().item())  # type: ignore[arg-type]
    scale = float(mx.abs(wide).max().item())  # type: ignore[arg-type]
    return difference / max(scale, 1e-30) if math.isfinite(difference) else math.inf
