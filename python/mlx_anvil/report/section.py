"""A section of the report: how it is run, what it leaves behind, and the time that all of them share."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "findings", "skipped", "failed", "running", "not run"]


class Skipped(Exception):
    """The section has nothing to do on this machine; the text says why."""


class Deadline:
    """When the report has to be done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; 0 when the time is up."""
        return max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> "Deadline":
        """An earlier one, that share of the time left from now."""
        return Deadline(self.left * share)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be started."""
        return self.left == 0.0


@dataclass
class Outcome:
    """What a section found.

    Attributes:
        summary: one line of the table at the head of the report.
        findings: how many of its results are wrong; 0 is success.
        data: all of it, as JSON can hold it.
    """

    summary: str
    findings: int
    data: dict[str, Any]


@dataclass
class Section:
    """One section; ``data`` is empty unless it ran to its end."""

    name: str
    title: str
    status: Status = "not run"
    summary: str = ""
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)

    def run(self, function: Callable[[], Outcome]) -> None:
        """Calls the function and keeps its outcome, or the traceback of its failure."""
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
