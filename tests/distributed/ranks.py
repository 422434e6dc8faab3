"""Runs a function in several processes of this machine that form a group of MLX's ring backend."""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
SECONDS = 120


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
    """What ``function(*arguments)`` returned in each process, in the order of the ranks. All have to succeed."""
    ended = run(function, ranks, *arguments, **options)
    failed = [f"rank {rank} ended with {e.status}:\n{e.output}" for rank, e in enumerate(ended) if e.status]
    assert not failed, "\n".join(failed)
    return [e.result for e in ended]


def run(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    seconds: float = SECONDS,
    environment: Sequence[dict[str, str]] | None = None,
) -> list[Ended]:
    """Runs a function of a module of this folder. Arguments and results are pickled: arrays are NumPy's.

    Args:
        function: called once in each process. ``mx.distributed.init()`` gives it the group.
        ranks: the number of processes.
        arguments: passed to the function.
        seconds: processes that still run then are killed.
        environment: more variables, for each rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        processes = []
        for rank in range(ranks):
            own = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} if ranks > 1 else {}
            own |= environment[rank] if environment else {}
            with Path(folder, f"output{rank}").open("wb") as output:
                command = [sys.executable, __file__, str(call), str(Path(folder, f"result{rank}"))]
                processes.append(
                    subprocess.Popen(command, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT, cwd=TESTS)
                )
        begin, ends = time.monotonic(), [seconds] * ranks
        try:
            running = set(range(ranks))
            while running and time.monotonic() - begin < seconds:
                for rank in list(running):
                    if processes[rank].poll() is not None:
                        running.remove(rank)
                        ends[rank] = time.monotonic() - begin
                time.sleep(0.02)
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()
        return [_ended(folder, rank, process.returncode, ends[rank]) for rank, process in enumerate(processes)]


def _ended(folder: str, rank: int, status: int, seconds: float) -> Ended:
    result = Path(folder, f"result{rank}")
    value = pickle.loads(result.read_bytes()) if result.exists() else None
    return Ended(status, value, Path(folder, f"output{rank}").read_text(errors="replace"), seconds)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _call(call: str, result: str) -> None:
    sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]
    module, name, arguments = pickle.loads(Path(call).read_bytes())
    value = getattr(importlib.import_module(module), name)(*arguments)
    Path(result).write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    _call(*sys.argv[1:])
