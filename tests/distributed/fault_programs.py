"""What the processes of test_faults.py run."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import mlx.core as mx

from mlx_anvil import distributed
from mlx_anvil.distributed import _check_ranks

FEW_SECONDS = 2.0
STEPS = 1000
STOPPED_SECONDS = 5


def steps_with_fault(fault: str, failing: int, timeout: float, stepping: bool = True) -> str:
    """Sums in a loop; one rank fails after a while. What a rank returns whose peer has failed: the error."""
    group = mx.distributed.init()
    failing_now = group.rank() == failing
    try:
        with distributed.watch(group, timeout=timeout) as watcher:
            for step in range(STEPS):
                if failing_now and step == 5:
                    print(f"pid {os.getpid()} fails at {time.monotonic()}", flush=True)
                    fail(fault)
                total = mx.distributed.all_sum(mx.ones(8), group=group)
                if stepping:
                    watcher.step()
                mx.eval(total)
                time.sleep(0.02)
    except RuntimeError as error:
        return str(error)
    return "normal end"


def fail(fault: str) -> None:
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            pid = os.getpid()
            subprocess.Popen(["sh", "-c", f"sleep {STOPPED_SECONDS}; kill -KILL {pid}"])
            os.kill(pid, signal.SIGSTOP)
        case "loop":
            while True:
                time.sleep(0)
        case "exit":
            sys.exit(3)
        case "exit 0":
            sys.exit(0)
        case "error":
            raise ValueError("no such batch")


def slow_but_well(silence: float, timeout: float) -> list[float]:
    """Nothing here is a fault. Returns the sums.

    Args:
        silence: the limit of the first block, in which ranks wait for longer, in calls of MLX.
        timeout: the limit of the second block, in which ranks take steps and end at unequal times.
    """
    group = mx.distributed.init()
    rank, size = group.rank(), group.size()
    sums = []
    with distributed.watch(group, timeout=silence):
        for index, wait in enumerate((mx.eval, lambda x: bytes(memoryview(x)), synchronize)):
            if index % size == rank:
                time.sleep(1.5 * silence)
            total = mx.distributed.all_sum(mx.array(1.0 + rank), group=group)
            wait(total)
            sums.append(total.item())
    with distributed.watch(group, timeout=timeout) as watcher:
        watcher.step()
        time.sleep(timeout / 3 * rank / size)
        total = mx.distributed.all_sum(mx.array(1.0 + rank), group=group)
        watcher.step()
        sums.append(total.item())
        time.sleep(timeout / 3 * rank / size)
    return sums


def synchronize(array: mx.array) -> None:
    mx.async_eval(array)
    mx.synchronize()


def unreachable() -> list[str]:
    """The errors of watches that cannot connect."""
    group = mx.distributed.init()
    errors = [caught(enter, timeout=0.0), caught(enter, timeout=5.0, address="localhost:no")]
    if group.rank() == group.size() - 1:
        socket.create_connection = refuse
    return [*errors, caught(enter, timeout=2.0, address="localhost")]


def enter(**options: Any) -> None:
    with distributed.watch(**options):
        pass


def refuse(*_: object, **__: object) -> NoReturn:
    raise ConnectionRefusedError


def differences() -> list[str]:
    """The errors of check_ranks in this process, for agreement and for each kind of difference."""
    group, check = mx.distributed.init(), distributed.check_ranks
    rank = group.rank()
    is_last = rank == group.size() - 1
    arrays = {"layers": [{"weight": mx.zeros((2, 3))}, {"weight": mx.zeros((3, 4))}]}
    shaped = {"layers": [{"weight": mx.zeros((2, 3 + is_last))}, {"weight": mx.zeros((3, 4))}]}
    typed = {"layers": [{"weight": mx.zeros((2, 3), mx.float16 if rank == 1 else mx.float32)}, arrays["layers"][1]]}
    missing = {"layers": arrays["layers"][: 1 + (rank == 0)]}
    many = {f"w{i}": mx.zeros((rank + 1,)) for i in range(20)}
    errors = [caught(check, arrays=arrays, batch_size=8, name="a")]
    errors += [caught(check, arrays=each) for each in (shaped, typed, missing, many)]
    errors.append(caught(check, batch_size=8 + rank // 2, rate=0.5))
    version = _check_ranks.version
    _check_ranks.version = lambda package: "0.1" if is_last and package == "mlx" else version(package)
    errors.append(caught(check))
    _check_ranks.version = version
    if rank == 0:
        sys.modules["mlx_lm"] = ModuleType("mlx_lm")  # imported in one process only: no fault
    return [*errors, caught(check), caught(check, batch_size=[8]), caught(check, arrays=[1])]


def caught(function: Callable[..., None], **options: Any) -> str:
    try:
        function(**options)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


def stall_together(timeout: float) -> None:
    """Each rank receives first: an error of the program, of no rank in particular."""
    group = mx.distributed.init()
    with distributed.watch(group, timeout=timeout) as watcher:
        watcher.step()
        mx.eval(mx.distributed.recv((8,), mx.float32, 1 - group.rank(), group=group))
