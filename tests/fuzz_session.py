"""``pytest --fuzz 30m``: which tests run, for how long each, and what the end of the run says. The tests are in
tests/fuzz."""

import faulthandler
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

QUICK_SECONDS = 0.8  # of one test in a plain run; every op has four
HANG_SECONDS = 300  # longer than any example takes
COUNT = "examples"


class Example(Protocol):
    def script(self) -> str: ...


def seconds(text: str) -> float:
    """Seconds of a duration such as "90s", "30m" or "8h"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match:
        raise ValueError(f"{text!r} is no duration; allowed: a number with s, m or h, such as 30m")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


class Run:
    """The examples of one test. The time limit ends with the first failure, which is then minimised."""

    def __init__(self, budget: float, *, long: bool, file: Path, stderr: int) -> None:
        self.long, self.file, self.stderr = long, file, stderr
        self.examples = 0
        self.failure: Exception | None = None  # the latest, which is the smallest in the end
        self.end = time.monotonic() + budget

    @property
    def over(self) -> bool:
        return not self.failure and time.monotonic() >= self.end

    @contextmanager
    def example(self, example: Example) -> Iterator[None]:
        """The script stays in a file while it runs, in case it kills or blocks the interpreter."""
        self.file.write_text(example.script())
        self.examples += not self.failure
        if faulthandler.is_enabled():
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=self.stderr)
        try:
            yield
        except Exception as error:
            self.failure = error
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


class FuzzSession:
    """A pytest plugin, active in every worker and in the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self.total: float | None = config.getoption("--fuzz")
        self.folder = config.rootpath / ".pytest_cache" / "fuzz"
        self.worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.stderr = os.dup(2)  # before it is captured
        self.budget = QUICK_SECONDS
        if self.worker == "main":
            for file in self.folder.glob("*.py"):
                file.unlink()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """With --fuzz these tests alone; without, on the CPU's kernels alone, for the simulator has no time for
        many."""
        if self.total is None and config.getoption("--backend") == "cpu":
            return
        left_out = [item for item in items if (item.get_closest_marker("fuzz") is None) == (self.total is not None)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
        if self.total is not None and items:
            self.budget = self.total * min(workers, len(items)) / len(items)

    @pytest.fixture
    def fuzz_run(self, request: pytest.FixtureRequest) -> Iterator[Run]:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{self.worker}.py"
        run = Run(self.budget, long=self.total is not None, file=file, stderr=self.stderr)
        yield run
        file.unlink(missing_ok=True)
        request.node.user_properties.append((COUNT, (request.node.callspec.params["name"], run.examples)))

    def pytest_report_header(self) -> str | None:
        if self.total is not None:
            return f"fuzz: {self.total:g} s; the example that runs: {self.folder.absolute()}/*.py"
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.worker != "main":
            return
        counts: Counter[str] = Counter()
        for reports in terminalreporter.stats.values():
            for report in reports:
                if getattr(report, "when", None) == "teardown":
                    counts.update({op: n for key, (op, n) in report.user_properties if key == COUNT})
        if self.total is not None:
            terminalreporter.section("examples of each op")
            for op, count in counts.items():
                terminalreporter.line(f"{count:8}  {op}")
        for file in sorted(self.folder.glob("*.py")):
            terminalreporter.section(f"ran when its process ended: {file}")
            terminalreporter.line(file.read_text())
