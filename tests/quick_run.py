"""A plain ``pytest`` takes minutes: it leaves out tests marked ``slow``, and of every test with many cases keeps a few,
drawn by the run's seed. ``pytest --all`` leaves out none, and neither does a run that selects tests: by a path, -k, -m,
--lf or --fuzz. ``pytest --rest``, with the same seed, runs what the plain one leaves out; with ``--cases N``, at most N
cases of each test function, a quarter as many of a slow one, and all of one marked ``every_case``. ``--one-of-alike``
keeps, of cases that differ only in parameters named by their ``alike`` marker, the one that the seed draws. On backends
other than the CPU, where a dtype is another kernel to compile, ``dtype`` is such a parameter of every test.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping

import pytest

from worker_shares import long_first

CASES = 2  # of one test function
SHARE_OF_SLOW = 4  # --rest --cases N runs N // SHARE_OF_SLOW cases of a slow one
COUNTS = "quick_run"  # in what a worker hands back


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run everything: no test is left out as slow or as one of many")
    parser.addoption("--rest", action="store_true", help="run what a plain run with this seed leaves out")
    parser.addoption("--one-of-alike", action="store_true", help="run one of the cases that the marker `alike` groups")
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help=f"of each test function (default: {CASES}, or all where tests are selected, or with --rest)",
    )


def choose_workers(config: pytest.Config) -> None:
    """One process for each core, unless the command line says how many, names one test, or the tests share a GPU."""
    option = config.option
    if not hasattr(option, "numprocesses") or hasattr(config, "workerinput"):
        return  # without pytest-xdist, or in one of its workers
    names_one = any("::" in argument for argument in config.args)
    if (
        option.numprocesses is None
        and option.backend in ("cpu", "simulator")
        and not (getattr(option, "usepdb", False) or names_one)
    ):
        option.numprocesses = "logical"
    if option.numprocesses and option.dist == "no":
        option.dist = "worksteal"  # neighbours in a file stay together: they share what its fixtures have built


def selects(config: pytest.Config) -> bool:
    """True if the command line selects tests."""
    option = config.option
    by_path = config.args_source == pytest.Config.ArgsSource.ARGS
    return bool(by_path or option.keyword or option.markexpr or getattr(option, "lf", False) or option.fuzz)


class QuickRun:
    """A pytest plugin, active in every worker and in the controller."""

    def __init__(self, config: pytest.Config, seed: str) -> None:
        self.config, self.seed = config, seed
        self.rest: bool = config.option.rest
        self.most: int | None = config.option.cases
        samples = self.rest or self.most is not None
        self.everything: bool = config.option.all or (not samples and selects(config))
        self.left_out = self.collected = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        alike = self.config.option.one_of_alike
        if alike and not self.rest:  # the rest is that of a plain run, for which all cases are drawn from
            self._leave_out(items, self._one_of_alike(items))
        if not self.everything:
            self._sample(items)
        if alike and self.rest:
            self._leave_out(items, self._one_of_alike(items))
        if self.rest and self.most is not None:
            whole = {item.nodeid for item in items if item.get_closest_marker("every_case")}
            slow = [item for item in items if item.get_closest_marker("slow")]
            quick = [item for item in items if not item.get_closest_marker("slow")]
            few = self._some_of_each(slow, max(1, self.most // SHARE_OF_SLOW))
            self._leave_out(items, whole | few | self._some_of_each(quick, self.most))
        if workers := getattr(self.config, "workerinput", {}).get("workercount", 0):
            items[:] = long_first(items, workers)

    def _sample(self, items: list[pytest.Item]) -> None:
        """Keeps the cases of a plain run, or with ``--rest`` the others."""
        quick = [item for item in items if item.get_closest_marker("slow") is None]
        kept = self._some_of_each(quick, CASES if self.rest else self.most or CASES)
        self._leave_out(items, {item.nodeid for item in items if (item.nodeid in kept) != self.rest})

    def _some_of_each(self, items: list[pytest.Item], most: int) -> set[str]:
        """Returns at most ``most`` cases of each test function. The seed chooses them."""
        functions: dict[str, list[str]] = defaultdict(list)
        for item in items:
            functions[item.nodeid.partition("[")[0]].append(item.nodeid)
        return {case for cases in functions.values() for case in sorted(cases, key=self._draw)[:most]}

    def _one_of_alike(self, items: list[pytest.Item]) -> set[str]:
        """The cases that run. Cases with equal values of all other parameters form a group."""
        groups: dict[object, list[str]] = defaultdict(list)
        draws: dict[str, tuple[int, int]] = {}
        everywhere = () if self.config.option.backend == "cpu" else ("dtype",)
        for item in items:
            marker = item.get_closest_marker("alike")
            names = (*everywhere, *(marker.args if marker else ()))
            values = item.callspec.params if hasattr(item, "callspec") else {}
            # Without the function's name, so that functions with the same parameters share compiled kernels.
            dtype = self._draw_dtype(values) if everywhere else 0
            draws[item.nodeid] = dtype, self._draw(item.nodeid.partition("[")[2])
            if values.keys().isdisjoint(names):
                groups[item.nodeid].append(item.nodeid)
            else:
                # By identity: every case has the objects of one list, and some of them cannot be hashed.
                others = tuple(sorted((name, id(value)) for name, value in values.items() if name not in names))
                groups[item.nodeid.partition("[")[0], others].append(item.nodeid)
        return {min(cases, key=draws.__getitem__) for cases in groups.values()}

    def _draw_dtype(self, values: Mapping[str, object]) -> int:
        """Draws one dtype for each quantized format. Group sizes do not count, because kernels read them as a
        parameter."""
        if "format" not in values:
            return 0
        dtype = str(values.get("dtype", "")).removeprefix("mlx.core.")
        return self._draw(f"{str(values['format']).rpartition('-g')[0]} {dtype}")

    def _leave_out(self, items: list[pytest.Item], kept: set[str]) -> None:
        left_out = [item for item in items if item.nodeid not in kept]
        self.collected = self.collected or len(items)
        self.left_out += len(left_out)
        self.config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in kept]

    def _draw(self, case: str) -> int:
        # A hash, because checksums are linear: with CRC-32 no seed draws certain cases.
        return int.from_bytes(hashlib.blake2s(f"{self.seed} {case}".encode(), digest_size=8).digest(), "big")

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[COUNTS] = self.left_out, self.collected

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Every worker has collected the same tests."""
        self.left_out, self.collected = getattr(node, "workeroutput", {}).get(COUNTS, (self.left_out, self.collected))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_out:
            terminalreporter.section("quick run" if not self.rest else "the rest of a quick run")
            terminalreporter.line(f"{self.left_out} of {self.collected} tests left out; `pytest --all` runs everything")
