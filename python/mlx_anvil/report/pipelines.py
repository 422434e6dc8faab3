"""Builds the pipelines that the cases launch, one by one, and records time and limits of each."""

import time
from typing import Any

from mlx_anvil import _check, _ext
from mlx_anvil.report import cases
from mlx_anvil.report.section import Deadline, Outcome, Skipped


def _build(kernel: _ext._PlannedKernel, op: str) -> dict[str, Any]:
    row: dict[str, Any] = {"op": op, "kernel": kernel.name, "facts": {}, "error": ""}
    start = time.monotonic()
    try:
        row["facts"] = kernel.build()
    except Exception as error:
        row["error"] = str(error)
    row["seconds"] = time.monotonic() - start
    return row


def run(backend: str, quick: bool, deadline: Deadline) -> Outcome:
    """A finding is a pipeline that fails to build."""
    if backend == "cpu":
        raise Skipped("CPU kernels are compiled into the extension")
    rows: dict[str, dict[str, Any]] = {}
    not_run = 0
    with cases.running_on(backend):
        for case in cases.small(backend, quick) + cases.large(backend, quick):
            if deadline.is_over:
                not_run += 1
                continue
            results = _check.results_of(case.spec.function, case)(*_check.inputs(case))
            for kernel in _ext._plan_kernels(results):
                if kernel.name not in rows:
                    rows[kernel.name] = _build(kernel, case.spec.name)
    failed = sum(bool(row["error"]) for row in rows.values())
    seconds = sum(row["seconds"] for row in rows.values())
    summary = f"{len(rows) - failed} of {len(rows)} built in {seconds:.1f} s"
    if not_run:
        summary += f"; the time limit left out {not_run} cases"
    return Outcome(summary, failed, {"rows": list(rows.values()), "cases_not_run": not_run})
