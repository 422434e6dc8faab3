"""One section of the report, its outcome, and the deadline that all sections share."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "findings", "skipped", "failed", "running", "not run"]


class Skipped(Exception):
    """Raised by a section that does not apply to this machine; the text says why."""


class Deadline:
    """A point in time at which work must stop."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left; 0 after the deadline."""
        return max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> "Deadline":
        """A deadline at a fraction of the time left."""
        return Deadline(self.left * share)

    @property
    def is_over(self) -> bool:
        """True after the deadline."""
        return self.left == 0.0


@dataclass
class Outcome:
    """The result of a section.

    Attributes:
        summary: one line for the table at the top of the report.
        findings: number of wrong results; 0 is success.
        data: all results, as ``json.dumps`` accepts them.
    """

    summary: str
    findings: int
    data: dict[str, Any]


@dataclass
class Section:
    """One section. ``data`` is empty unless it finished."""

    name: str
    title: str
    status: Status = "not run"
    summary: str = ""
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)

    def run(self, function: Callable[[], Outcome]) -> None:
        """Calls the function, and stores its outcome or its traceback."""
        start = time.monotonic()
        try:
            outcome = function()
            self.status = "findings" if outcome.findings else "ok"
            self.summary, self.data = outcome.summary, outcome.data
        except Skipped as reason:
            self.status, self.summary = "skipped", str(reason)
        except Exception as error:
            self.status = "failed"
            self.summary = f"{type(error).__name__}: {error}".splitlines()[0]
            self.data = {"traceback": traceback.format_exc()}
        self.seconds = time.monotonic() - start
