"""``watch``: a process that dies, stops or stalls ends the others with an error that names it."""

import contextlib
import math
import os
import sys
import threading
import time
from types import TracebackType
from typing import Literal

import mlx.core as mx

from mlx_anvil.distributed._judge import Follower, Judge, Member
from mlx_anvil.distributed._side_channel import Channel, connect

_NAME = "[watch]"
STATUS = 75  # EX_TEMPFAIL of sysexits.h: try again, from the last checkpoint
# An exception that MLX raises because of a dead peer comes at about the time of the verdict, on either side of it.
_GRACE_SECONDS = 1.0
_FLUSH_SECONDS = 0.5
_LONGEST_SUMMARY = 300


class watch:
    """Watches the processes of a group: if one fails, all of them end, and say which one it was.

    Without it, a process whose peer has died or stopped may wait in ``mx.eval`` for ever. Each process runs a thread
    that exchanges heartbeats with rank 0 over TCP connections of its own, beside MLX's engine. A process has failed if

    - it died: noticed at once;
    - its threads do not run, for example because it was stopped or its machine is gone: nothing has been heard of it
      for ``timeout`` seconds;
    - its main thread is stuck, or waits for something that never comes: it has taken no :meth:`step` for ``timeout``
      seconds. The process with the fewest steps is named, and where its Python code is. This counts from the first step
      of any process on;
    - it leaves the ``with`` block by an exception.

    What the others do: each writes a line to stderr that names the failed process. If the main thread leaves the
    ``with`` block by an exception within a second, as it does where MLX reports a lost connection, that becomes a
    ``RuntimeError`` of this text. A main thread that waits in MLX cannot raise an exception: then the process ends, with
    exit status 75.

    Enter the block first: a process that fails before is not noticed.

    At the normal end of the ``with`` block a process waits until all have come to it, so that none is missed by the
    others. They have to come within ``timeout`` seconds of their last step, or of the first process there.

    Heartbeats need Python's global lock. ``mx.eval``, ``array.item``, ``array.tolist``, ``np.array(array)`` and
    ``mx.synchronize`` release it while they wait. Code that holds it for longer than ``timeout``, such as a long call
    into another C extension, looks like a stopped process.

    Args:
        group: the processes; the global group of ``mx.distributed.init()`` if None. All of them enter the block, at the
            same place in their communication. A group of one process is not watched.
        timeout: seconds. Longer than the slowest step, checkpoint or evaluation between two steps, the compilation of
            kernels included.
        address: where rank 0 listens, ``"host"`` or ``"host:port"``, if the others cannot reach it under the addresses
            that it finds itself. Connections are plain TCP, and a secret that the engine carries keeps strangers out.

    Raises:
        ValueError: ``timeout`` is not a positive number.
        RuntimeError: on entry, the processes cannot connect within ``timeout`` seconds; in the block, another process
            has failed.

    Example:
        >>> group = mx.distributed.init()
        >>> with mlx_anvil.distributed.watch(group, timeout=60) as watcher:
        ...     for batch in batches:
        ...         loss, gradients = loss_and_gradients(model, batch)
        ...         optimizer.update(model, gradients)
        ...         watcher.step()  # before the call that waits for the other processes
        ...         mx.eval(loss, model.parameters(), optimizer.state)
    """

    def __init__(
        self, group: mx.distributed.Group | None = None, *, timeout: float = 60.0, address: str | None = None
    ) -> None:
        if not 0 < timeout < math.inf:
            raise ValueError(f"{_NAME} timeout is {timeout}; allowed: a positive number of seconds.")
        self._group = group or mx.distributed.init()
        self._timeout = float(timeout)
        self._address = address
        self._member: Member | None = None
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._left = threading.Event()
        self._ends = 0.0  # when this process ends, after a verdict

    def step(self) -> None:
        """Says that this process makes progress. Call it once a step, before the call that waits for other processes.

        A process that calls it after waiting never gets ahead of one that is stuck, and the error names none.
        """
        if self._member:
            self._member.steps += 1

    def __enter__(self) -> "watch":
        if self._group.size() > 1:
            self._channel = connect(self._group, address=self._address, seconds=self._timeout, name=_NAME)
            kind: type[Member] = Follower if self._group.rank() else Judge
            self._member = kind(self._channel, self._group.rank(), self._timeout, threading.get_ident(), self._say)
            self._left.clear()
            self._thread = threading.Thread(target=self._run, name="mlx-anvil-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        member, thread = self._member, self._thread
        if not member or not thread:
            return False
        may_be_peer = isinstance(error, (RuntimeError, OSError))
        if error is None or (isinstance(error, SystemExit) and not error.code):
            member.finish()
            member.wait()
        elif not (may_be_peer and member.wait(_GRACE_SECONDS)):
            member.fail(_summary(error))
        self._left.set()
        thread.join(2 * _GRACE_SECONDS)
        if member.verdict and (error is None or may_be_peer):
            raise RuntimeError(self._text(member.verdict)) from error
        return False

    def _text(self, verdict: str) -> str:
        return f"{_NAME} {verdict}. This is rank {self._group.rank()} of {self._group.size()}."

    def _say(self, verdict: str) -> None:
        self._ends = time.monotonic() + _GRACE_SECONDS
        with contextlib.suppress(OSError, ValueError):  # no stderr
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{self._text(verdict)}\n".encode())

    def _run(self) -> None:
        """The thread: heartbeats until the block is left, or until the verdict."""
        member, channel = self._member, self._channel
        assert member
        assert channel
        try:
            member.run()
        finally:
            channel.close()
        if member.verdict and not self._left.wait(max(0.0, self._ends - time.monotonic())):
            # A flush waits while the main thread writes.
            flush = threading.Thread(target=sys.stdout.flush, daemon=True)
            flush.start()
            flush.join(_FLUSH_SECONDS)
            os._exit(STATUS)


def _summary(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0][:_LONGEST_SUMMARY]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
