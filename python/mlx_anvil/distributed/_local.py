"""Runs a function in several processes of this machine that form a group of MLX's ring backend.

Tests and benchmarks use it; programs are started by ``mlx.launch``.
"""

import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ONE_THREAD", "Ended", "free_ports", "results", "run"]

SECONDS = 120.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        status: its exit status; negative for a signal.
        result: what the function returned; None if it raised an exception or was killed.
        output: what the process wrote to stdout and stderr.
        seconds: how long it ran.
    """

    status: int
    result: Any
    output: str
    seconds: float


def results(function: Callable[..., Any], ranks: int, *arguments: Any, **options: Any) -> list[Any]:
    """What ``function(*arguments)`` returned in each process, in the order of the ranks.

    Raises:
        RuntimeError: a process did not succeed. The text is what it wrote.
    """
    ended = run(function, ranks, *arguments, **options)
    failed = [f"rank {rank} ended with {e.status}:\n{e.output}" for rank, e in enumerate(ended) if e.status]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [e.result for e in ended]


def run(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    seconds: float = SECONDS,
    environment: Mapping[str, str] | None = None,
    apart: bool = False,
) -> list[Ended]:
    """Runs a function of a module once in each process. Arguments and results are pickled: arrays are NumPy's.

    Args:
        function: ``mx.distributed.init()`` gives it the group; that of one process has the size 1.
        ranks: the number of processes.
        arguments: passed to the function.
        seconds: processes that still run then are killed.
        environment: more variables.
        apart: each process has cores of its own, an equal share of this one's. Only where the system allows it (Linux).
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((_module_of(function), function.__qualname__, arguments)))
        shares = _shares(ranks) if apart else []
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
        # The module and what it imports are found as here.
        common = {**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                own = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} if ranks > 1 else {}
                command = [sys.executable, "-m", __name__, str(folder), str(rank)]
                with (folder / f"output{rank}").open("wb") as output:
                    started = subprocess.Popen(command, env=common | own, stdout=output, stderr=subprocess.STDOUT)
                processes.append(started)
                if shares:
                    os.sched_setaffinity(started.pid, shares[rank])
            ends = _wait(processes, seconds)
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()
        return [_ended(folder, rank, process.returncode, ends[rank]) for rank, process in enumerate(processes)]


def _shares(count: int) -> list[list[int]]:
    """Neighbouring cores, which may be two threads of one, stay together."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // count
    return [cores[rank * each : (rank + 1) * each] for rank in range(count)] if each else []


def _module_of(function: Callable[..., Any]) -> str:
    """The name under which another process can import the function's module, also if that is the program."""
    if function.__module__ != "__main__":
        return function.__module__
    return Path(sys.modules["__main__"].__file__ or "").stem


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listened on a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[float]:
    """Waits until all have ended, but no longer than that. Returns how long each ran."""
    begin, ends = time.monotonic(), [seconds] * len(processes)
    running = set(range(len(processes)))
    while running and time.monotonic() - begin < seconds:
        for rank in list(running):
            if processes[rank].poll() is not None:
                running.remove(rank)
                ends[rank] = time.monotonic() - begin
        time.sleep(0.02)
    return ends


def _ended(folder: Path, rank: int, status: int, seconds: float) -> Ended:
    result = folder / f"result{rank}"
    value = pickle.loads(result.read_bytes()) if result.exists() else None
    return Ended(status, value, (folder / f"output{rank}").read_text(errors="replace"), seconds)


def _call(folder: Path, rank: str) -> None:
    module, name, arguments = pickle.loads((folder / "call").read_bytes())
    value = getattr(importlib.import_module(module), name)(*arguments)
    (folder / f"result{rank}").write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    _call(Path(sys.argv[1]), sys.argv[2])
