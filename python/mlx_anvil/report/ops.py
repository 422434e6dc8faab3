"""Checks every op against its definition in float64, and times it beside MLX's."""

from collections.abc import Callable
from typing import Any

from mlx_anvil import _check
from mlx_anvil._check import Case
from mlx_anvil.report import cases
from mlx_anvil.report.section import Deadline, Outcome


def _checked(case: Case) -> dict[str, Any]:
    """Checks the case, without times."""
    with cases.running_on(case.backend):
        error, limit = _check.error_and_limit(case, _check.inputs(case))
    return {"error": error, "limit": limit, "passed": error <= limit}


def _timed(case: Case) -> dict[str, Any]:
    """Checks and times the case."""
    return _check.run_case(case).as_dict()


def _row(case: Case, function: Callable[[Case], dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "op": case.spec.name,
        "variant": case.spec.variant,
        "what": "gradient" if case.gradient else "forward",
        "dtype": _check.dtype_name(case.dtype),
        "shape": list(case.shape),
        "passed": False,
        "exception": "",
    }
    try:
        return row | function(case)
    except Exception as error:
        return row | {"exception": f"{type(error).__name__}: {error}"}


def run(backend: str, quick: bool, deadline: Deadline) -> Outcome:
    """A finding is an error above its limit, or an exception."""
    todo = [(case, _checked) for case in cases.small(backend, quick)]
    todo += [(case, _timed) for case in cases.large(backend, quick)]
    rows = []
    for case, function in todo:
        if deadline.is_over:
            break
        rows.append(_row(case, function))
    failed = sum(not row["passed"] for row in rows)
    summary = f"{len(rows) - failed} of {len(rows)} cases within limits"
    if len(rows) < len(todo):
        summary += f"; the time limit left out {len(todo) - len(rows)} cases"
    return Outcome(summary, failed, {"rows": rows, "cases_not_run": len(todo) - len(rows)})
