"""The processes of a group as :class:`watch` sees them: rank 0 judges, the others report to it and hear its verdict."""

import selectors
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from mlx_anvil.distributed._exchange import has, listed
from mlx_anvil.distributed._side_channel import Channel, Message

_MOST_BEAT_SECONDS = 1.0
_MOST_TICK_SECONDS = 0.25
_CLOSING_SECONDS = 0.5


class Member(ABC):
    """This process. One thread calls :meth:`run`, the main thread the rest.

    Attributes:
        steps: how many the main thread has taken.
        verdict: which process has failed and how, or "".
    """

    def __init__(
        self, channel: Channel, rank: int, timeout: float, main_thread: int, say: Callable[[str], None]
    ) -> None:
        self.steps = 0
        self.verdict = ""
        self._channel, self._rank, self._timeout, self._main_thread = channel, rank, timeout, main_thread
        self._say = say
        self._finished, self._failure = False, ""
        self._over = threading.Event()
        self._heard = dict.fromkeys(channel.connections, time.monotonic())

    def finish(self) -> None:
        """This process has come to the end; :meth:`run` returns when all have, or after a verdict."""
        self._finished = True

    def fail(self, why: str) -> None:
        """This process has failed; :meth:`run` tells the others and returns."""
        self._failure = why

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until :meth:`run` has come to its end. True if there is a verdict."""
        self._over.wait(seconds)
        return bool(self.verdict)

    def run(self) -> None:
        """Exchanges messages until all processes have finished or one has failed."""
        beat = min(_MOST_BEAT_SECONDS, self._timeout / 5)
        tick = min(_MOST_TICK_SECONDS, beat)
        last = time.monotonic()
        said, ending = last - beat, (False, "")
        try:
            with selectors.DefaultSelector() as selector:
                for rank, connection in self._channel.connections.items():
                    selector.register(connection.socket, selectors.EVENT_READ, rank)
                while not self._over.is_set():
                    for key, _ in selector.select(tick):
                        self._receive(key.data)
                        if self._channel.connections[key.data].ended:
                            selector.unregister(key.fileobj)
                    now = time.monotonic()
                    if now - last > self._timeout / 2:  # this process could not listen; the others may be well
                        self._excuse(now - last, now)
                    last = now
                    if now - said >= beat or ending != (self._finished, self._failure):
                        said, ending = now, (self._finished, self._failure)
                        self._report()
                    self._judge(now)
                self._close(selector)
        finally:
            self._over.set()

    def _close(self, selector: selectors.BaseSelector) -> None:
        """Reads until the others close: a socket that is closed with unread data loses what it has sent last."""
        self._over.set()
        if self.verdict:  # at once: whoever started the processes may end this one next
            self._say(self.verdict)
        for connection in self._channel.connections.values():
            connection.end()
        end = time.monotonic() + _CLOSING_SECONDS
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(_MOST_TICK_SECONDS):
                connection = self._channel.connections[key.data]
                connection.receive()
                if connection.ended:
                    selector.unregister(key.fileobj)

    def _state(self) -> Message:
        frame = sys._current_frames().get(self._main_thread)
        place = f"{frame.f_code.co_name} at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown"
        return {"steps": self.steps, "place": place, "finished": self._finished, "failure": self._failure}

    def _receive(self, rank: int) -> None:
        messages = self._channel.connections[rank].receive()
        if messages:
            self._heard[rank] = time.monotonic()
        for message in messages:
            self._take(rank, message)

    def _excuse(self, seconds: float, now: float) -> None:
        """Does not count a time in which this process could not listen against the others."""
        for rank, heard in self._heard.items():
            self._heard[rank] = min(heard + seconds, now)

    def _name(self, rank: int) -> str:
        return str(self._channel.processes[rank])

    def _silence(self, rank: int, now: float) -> str:
        """What is wrong with the connection to a process, or ""."""
        if self._channel.connections[rank].ended:
            return f"{self._name(rank)} ended"
        if now - self._heard[rank] > self._timeout:
            return f"{self._name(rank)} has not answered for {now - self._heard[rank]:.1f} s"
        return ""

    @abstractmethod
    def _take(self, rank: int, message: Message) -> None: ...

    @abstractmethod
    def _report(self) -> None: ...

    @abstractmethod
    def _judge(self, now: float) -> None: ...


class Follower(Member):
    """A process other than rank 0."""

    def _take(self, rank: int, message: Message) -> None:
        if "verdict" in message and not self._failure:
            self.verdict = message["verdict"]
        if "verdict" in message or "all finished" in message:
            self._over.set()

    def _report(self) -> None:
        self._channel.connections[0].send(self._state(), droppable=not self._failure)

    def _judge(self, now: float) -> None:
        if not self._over.is_set() and (silence := self._silence(0, now)):
            self.verdict = "" if self._failure else silence
            self._over.set()


@dataclass
class _Progress:
    """The last report of a process, and when its number of steps last changed."""

    moved: float
    steps: int = 0
    place: str = "unknown"
    finished: bool = False
    failure: str = ""


class Judge(Member):
    """Rank 0."""

    def __init__(
        self, channel: Channel, rank: int, timeout: float, main_thread: int, say: Callable[[str], None]
    ) -> None:
        super().__init__(channel, rank, timeout, main_thread, say)
        self._progress = {each.rank: _Progress(time.monotonic()) for each in channel.processes}
        self._stepping = False

    def _take(self, rank: int, message: Message) -> None:
        progress = self._progress[rank]
        if message["steps"] != progress.steps:
            progress.moved = time.monotonic()
        progress.steps, progress.place = message["steps"], message["place"]
        progress.finished, progress.failure = message["finished"], message["failure"]

    def _excuse(self, seconds: float, now: float) -> None:
        super()._excuse(seconds, now)
        for progress in self._progress.values():
            progress.moved = min(progress.moved + seconds, now)

    def _report(self) -> None:
        for connection in self._channel.connections.values():
            connection.send({}, droppable=True)

    def _judge(self, now: float) -> None:
        self._take(self._rank, self._state())
        every = self._progress.values()
        if not self._stepping and any(each.steps or each.finished for each in every):
            self._stepping = True
            for progress in every:
                progress.moved = now
        # A process that died comes first: those that failed may have done so because of it.
        well = [rank for rank in self._channel.connections if not self._progress[rank].failure]
        verdict = next(filter(None, (self._silence(rank, now) for rank in well)), "")
        verdict = verdict or self._failed() or (self._stalled(now) if self._stepping else "")
        if verdict:
            # This process says why it failed itself, by its exception.
            self.verdict = "" if self._failure else verdict
            self._tell({"verdict": verdict})
        elif all(each.finished for each in every):
            self._tell({"all finished": True})

    def _failed(self) -> str:
        return next(
            (f"{self._name(rank)} failed: {each.failure}" for rank, each in self._progress.items() if each.failure), ""
        )

    def _stalled(self, now: float) -> str:
        """Names the processes with the fewest steps if they have taken none for the time limit."""
        running = {rank: each for rank, each in self._progress.items() if not each.finished}
        fewest = min((each.steps for each in running.values()), default=0)
        behind = [rank for rank, each in running.items() if each.steps == fewest]
        seconds = now - max((running[rank].moved for rank in behind), default=now)
        if seconds <= self._timeout:
            return ""
        since = f"no step for {seconds:.1f} s after step {fewest}"
        if len(behind) == len(self._progress):
            places = "; ".join(f"rank {rank} is in {running[rank].place}" for rank in behind)
            return f"all ranks have taken {since}: {places}"
        finished = [rank for rank, each in self._progress.items() if each.finished]
        if 0 < len(finished) <= len(behind):  # the few that have left early are the likelier cause
            names = ", ".join(map(self._name, finished))
            return f"{names} {has(finished)} left the block, and {listed(behind)} {has(behind)} taken {since}"
        names = ", ".join(f"{self._name(rank)}, in {running[rank].place}," for rank in behind)
        others = [rank for rank in self._progress if rank not in behind]
        return f"{names} {has(behind)} taken {since}, unlike {listed(others)}"

    def _tell(self, message: Message) -> None:
        """The last message to the others."""
        for connection in self._channel.connections.values():
            connection.send(message)
        self._over.set()
