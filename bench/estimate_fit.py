"""Fits the model's parameters to published times and writes them beside these (estimate.py)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import log
from pathlib import Path

from mlx_anvil.mslc import estimation as model
from mlx_anvil.mslc.estimate_work import Work
from mlx_anvil.mslc.estimation import Parameters, Timing

DATA = Path(model.__file__).with_name("validation.json")
START = Parameters(memory=0.8, issue=0.9, overlap=4.0, latency=500.0, call_us=150.0)
LEAST, MOST = Parameters(0.3, 0.3, 1.0, 100.0, 5.0), Parameters(1.0, 1.0, 12.0, 800.0, 400.0)
# A load of device memory takes some hundred cycles, however the rest is fitted.
MOST_ERROR = 1.0  # of one time, as a logarithm: a time far off does not bend the rest


def loss(parameters: Parameters, timings: Sequence[Timing], works: dict[str, Work]) -> float:
    errors = (abs(log(model.ratio(timing, works, parameters))) for timing in timings)
    return sum(min(error, MOST_ERROR) for error in errors) / len(timings)


def fit(timings: Sequence[Timing], works: dict[str, Work]) -> Parameters:
    """Moves one parameter at a time while that helps, by smaller and smaller steps."""
    best, least, step = START, loss(START, timings, works), 0.3
    while step > 0.004:
        improved = False
        for name, value in asdict(best).items():
            for factor in (1 + step, 1 / (1 + step)):
                moved = min(max(value * factor, getattr(LEAST, name)), getattr(MOST, name))
                tried = replace(best, **{name: moved})
                found = loss(tried, timings, works)
                if found < least - 1e-9:
                    best, least, improved = tried, found, True
        if not improved:
            step /= 1.6
    return best


def read_timings() -> tuple[dict[str, Work], list[Timing]]:
    data = json.loads(DATA.read_text())
    works = {name: Work(**counts) for name, counts in data["works"].items()}
    return works, [Timing(**timing) for timing in data["timings"]]


def write(parameters: Parameters, works: dict[str, Work], timings: Sequence[Timing]) -> None:
    rounded = {name: float(f"{value:.4g}") for name, value in asdict(parameters).items()}
    counts = {name: {k: _short(v) for k, v in work.to_json().items()} for name, work in works.items()}
    published = [{k: v for k, v in asdict(t).items() if v not in ("", False)} for t in timings]
    lines = ["{", f'"parameters": {json.dumps(rounded)},', '"works": {']
    lines += [f"  {json.dumps(n)}: {json.dumps(c)}," for n, c in counts.items()]
    lines[-1] = lines[-1].removesuffix(",")
    lines += ["},", '"timings": [', *(f"  {json.dumps(t)}," for t in published)]
    lines[-1] = lines[-1].removesuffix(",")
    DATA.write_text("\n".join([*lines, "]", "}"]) + "\n")


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value
