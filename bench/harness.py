"""What the benchmarks of this folder share beyond :mod:`mlx_anvil.bench`: files of results that name the commit."""

import json
import subprocess
from pathlib import Path
from typing import Any

from mlx_anvil.bench.results import machine
from mlx_anvil.bench.timing import Timing, as_json, in_turn, measure, ratio

__all__ = ["RESULTS", "Timing", "as_json", "in_turn", "measure", "ratio", "write_results"]

RESULTS = Path(__file__).parent / "results"


def _commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"


def write_results(name: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    """Writes ``bench/results/<name>.json``: the machine, then what ``more`` says, then a line for each row."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    head = {"machine": machine() | {"commit": _commit()}, **more}
    parts = "".join(f'"{key}": {json.dumps(value, indent=1)},\n' for key, value in head.items())
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{{\n{parts}"rows": [\n{lines}\n]\n}}\n')
    return path
