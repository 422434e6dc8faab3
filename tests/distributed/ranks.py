"""Runs a function in several processes of this machine that form a group of MLX's ring backend."""

import importlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_anvil.distributed import _local

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
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        command = [sys.executable, __file__, str(call), folder]
        ended = _local.run(command, ranks, seconds=seconds, environment=environment, folder=TESTS)
        return [_ended(Path(folder, str(rank)), process) for rank, process in enumerate(ended)]


def _ended(result: Path, process: _local.Ended) -> Ended:
    value = pickle.loads(result.read_bytes()) if result.exists() else None
    return Ended(process.status, value, process.output, process.seconds)


def _call(call: str, folder: str) -> None:
    sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]
    module, name, arguments = pickle.loads(Path(call).read_bytes())
    value = getattr(importlib.import_module(module), name)(*arguments)
    Path(folder, os.environ.get("MLX_RANK", "0")).write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    _call(*sys.argv[1:])
