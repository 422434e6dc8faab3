"""Several processes of this machine that form a group of MLX's ring backend, for tests and benchmarks."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ended", "free_ports", "run"]


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        status: its exit status; negative for a signal.
        output: what it wrote to stdout and stderr.
        seconds: how long it ran.
    """

    status: int
    output: str
    seconds: float


def run(
    command: Sequence[str],
    ranks: int,
    *,
    seconds: float,
    environment: Sequence[Mapping[str, str]] | None = None,
    folder: Path | None = None,
) -> list[Ended]:
    """Runs a command in several processes. ``mx.distributed.init()`` gives each the group, ``MLX_RANK`` its number.

    Args:
        command: the program and its arguments.
        ranks: the number of processes. A single one has no ``MLX_RANK``.
        seconds: processes that still run then are killed.
        environment: more variables, for each rank.
        folder: where they run.
    """
    with tempfile.TemporaryDirectory() as outputs:
        hosts = Path(outputs, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
        processes: list[subprocess.Popen[bytes]] = []
        begin, ends = time.monotonic(), [seconds] * ranks
        try:
            for rank in range(ranks):
                own = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} if ranks > 1 else {}
                variables = {**os.environ, **own, **(environment[rank] if environment else {})}
                with Path(outputs, str(rank)).open("wb") as output:
                    started = subprocess.Popen(
                        command, env=variables, stdout=output, stderr=subprocess.STDOUT, cwd=folder
                    )
                processes.append(started)
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
        texts = [Path(outputs, str(rank)).read_text(errors="replace") for rank in range(ranks)]
    return [Ended(p.returncode, text, end) for p, text, end in zip(processes, texts, ends, strict=True)]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
