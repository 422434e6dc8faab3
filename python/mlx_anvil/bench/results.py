"""Result files of ``python -m mlx_anvil bench``: ``--save`` writes them, ``--compare`` reads them."""

import json
import platform
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import mlx_anvil
from mlx_anvil.bench.timing import Timing, as_json, ratio, ratio_quartiles

# Increase the version when a reader of older files would misread newer ones.
SCHEMA = "mlx_anvil.bench/1"


class ResultsError(ValueError):
    """The file is not a result file, or this version cannot read it."""


@dataclass(frozen=True)
class Row:
    """One measurement. The rounds of ``ours`` and ``mlx`` ran interleaved."""

    suite: str
    name: str
    backend: str
    dtype: str
    shape: str
    ours: Timing
    mlx: Timing

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies the row across runs."""
        return (self.suite, self.name, self.backend, self.dtype, self.shape)

    @property
    def speedup(self) -> float:
        """Median over the rounds of MLX's time over ours."""
        return ratio(self.mlx, self.ours)

    @property
    def speedup_quartiles(self) -> tuple[float, float]:
        """First and third quartile of the same ratios."""
        return ratio_quartiles(self.mlx, self.ours)


@dataclass(frozen=True)
class Results:
    """The rows of one run, and the machine that it ran on."""

    machine: dict[str, Any]
    rows: list[Row]


def machine() -> dict[str, Any]:
    """``mlx_anvil.info()``, the CPU model and the date."""
    facts: dict[str, Any] = dict(mlx_anvil.info())
    facts["cpu_model"] = _cpu_model()
    facts["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def as_text(results: Results) -> str:
    """The results as JSON, with one line per row."""
    rows = [
        asdict(row) | {"ours": as_json(row.ours), "mlx": as_json(row.mlx), "speedup": round(row.speedup, 3)}
        for row in results.rows
    ]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = f'"schema": "{SCHEMA}",\n"machine": {json.dumps(results.machine, indent=1)}'
    return f'{{\n{head},\n"rows": [\n{lines}\n]\n}}\n'


def save(results: Results, path: Path) -> None:
    """Writes a result file."""
    path.write_text(as_text(results))


def load(path: Path) -> Results:
    """Reads a file that :func:`save` wrote.

    Raises:
        ResultsError: the file is not JSON, has another schema, or lacks a field.
    """
    try:
        body = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ResultsError(f"{path} is not JSON: {error}") from error
    schema = body.get("schema") if isinstance(body, dict) else None
    if schema != SCHEMA:
        raise ResultsError(f"{path} has schema {schema!r}; allowed: {SCHEMA!r}, which `bench --save` writes.")
    try:
        return Results(body["machine"], [_row(row) for row in body["rows"]])
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} has a missing or invalid field: {error!r}") from error


def _row(row: dict[str, Any]) -> Row:
    names = {name: str(row[name]) for name in ("suite", "name", "backend", "dtype", "shape")}
    ours, mlx = (Timing.of([float(value) for value in row[label]["rounds"]]) for label in ("ours", "mlx"))
    return Row(**names, ours=ours, mlx=mlx)
