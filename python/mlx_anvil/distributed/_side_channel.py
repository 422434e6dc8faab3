"""TCP connections beside MLX's engine: rank 0 to each other process. They carry lines of JSON, and never block."""

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlx.core as mx

from mlx_anvil.distributed._exchange import gather_bytes, has, listed

Message = dict[str, Any]
_CONNECT_SECONDS = 3.0
_LONGEST_LINE = 1 << 16


@dataclass
class Process:
    """A process of the group, as it is named in messages."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass
class Connection:
    """Messages to and from one process. Nothing here waits.

    Attributes:
        ended: the other process has closed its end, or no longer exists.
    """

    socket: socket.socket
    ended: bool = False
    _received: bytearray = field(default_factory=bytearray)
    _unsent: bytearray = field(default_factory=bytearray)

    def send(self, message: Message, *, droppable: bool = False) -> None:
        """Sends a message, or keeps what the other process does not yet take: nothing if it is droppable."""
        if not (droppable and self._unsent):
            self._unsent += json.dumps(message).encode() + b"\n"
        try:
            while self._unsent and not self.ended:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True

    def receive(self) -> list[Message]:
        """The messages that have come."""
        try:
            while data := self.socket.recv(1 << 16):
                self._received += data
            self.ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Nothing more is sent. The other process sees it once it has read everything."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)


@dataclass
class Channel:
    """The processes of a group and the connections of this one, by rank: rank 0 has all, the others that to rank 0."""

    processes: list[Process]
    connections: dict[int, Connection]

    def close(self) -> None:
        for connection in self.connections.values():
            connection.socket.close()


def connect(group: mx.distributed.Group, *, address: str | None, seconds: float, name: str) -> Channel:
    """Connects the processes. The engine carries the address of rank 0 and a secret, so it works with every backend.

    Args:
        address: where rank 0 listens, ``"host"`` or ``"host:port"``; None: on all of its addresses.
        seconds: the limit until all processes are connected.
        name: begins the text of errors.

    Raises:
        ValueError: the address of rank 0 is not one of its own.
        RuntimeError: not all processes could connect. Raised in all of them.
    """
    rank = group.rank()
    own = {"host": socket.gethostname(), "pid": os.getpid()}
    described = [json.loads(each) for each in gather_bytes(json.dumps(own).encode(), group)]
    processes = [Process(index, each["host"], each["pid"]) for index, each in enumerate(described)]
    listener, problem = None, ""
    offer: Message = {}
    if rank == 0:
        try:
            listener, offer = _listen(address, group.size())
        except (OSError, ValueError) as error:
            problem = f"cannot listen at {address or 'any address'}: {error}"
    offer = json.loads(gather_bytes(json.dumps(offer).encode(), group)[0])
    connections: dict[int, Connection] = {}
    try:
        if listener:
            connections = _accept(listener, group.size(), offer["token"], time.monotonic() + seconds)
        elif offer:
            with contextlib.suppress(OSError):
                connections = {0: _reach(offer, rank, processes[rank].host == processes[0].host, seconds)}
    finally:
        if listener:
            listener.close()
    if missing := [index for index in range(1, group.size()) if listener and index not in connections]:
        problem = f"{listed(missing)} {has(missing)} not connected within {seconds:.1f} s"
    elif offer and rank and not connections:
        problem = f"cannot reach rank 0 at {' or '.join(offer['hosts'])}, port {offer['port']}"
    problems = [each.decode() for each in gather_bytes(problem.encode(), group)]
    failed = [index for index, each in enumerate(problems) if each]
    if failed:
        for connection in connections.values():
            connection.socket.close()
        first = problems[failed[0]]
        raise RuntimeError(f"{name} {listed(failed)}: {first}; allowed: an address= of rank 0 that all can reach.")
    return Channel(processes, connections)


def _listen(address: str | None, size: int) -> tuple[socket.socket, Message]:
    """A listening socket, and what the others need to find it."""
    if address is None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        both = family == socket.AF_INET6
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=size)
        hosts = _own_addresses()
    else:
        parts = urlsplit(f"//{address}")
        if not parts.hostname:
            raise OSError("allowed: host or host:port")
        family = socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET
        listener = socket.create_server((parts.hostname, parts.port or 0), family=family, backlog=size)
        hosts = [parts.hostname]
    return listener, {"hosts": hosts, "port": listener.getsockname()[1], "token": secrets.token_hex(16)}


def _own_addresses() -> list[str]:
    """Addresses and names by which other machines may reach this one, the likeliest first."""
    hosts: list[str] = []
    # MLX's ring and JACCL are told addresses that the machines have in common.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        nodes = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text(encoding="utf-8"))
        hosts += [each.rpartition(":")[0].strip("[]") for each in nodes[0]]
    with contextlib.suppress(OSError, LookupError):
        hosts.append(os.environ["MLX_JACCL_COORDINATOR"].rpartition(":")[0])
    # Nothing is sent: connecting a UDP socket only looks up the address of the route.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        hosts.append(probe.getsockname()[0])
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        hosts += [str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys([host for host in hosts if host] + [name]))


def _reach(offer: Message, rank: int, same_host: bool, seconds: float) -> Connection:
    """Tries the addresses of rank 0 in turn. Only rank 0 knows the right answer to the token."""
    end = time.monotonic() + seconds
    hosts = (["127.0.0.1", "::1"] if same_host else []) + offer["hosts"]
    problem = OSError("no address")
    for host in dict.fromkeys(hosts):
        left = min(_CONNECT_SECONDS, end - time.monotonic())
        if left <= 0:
            break
        try:
            link = socket.create_connection((host, offer["port"]), timeout=left)
        except OSError as error:
            problem = error
            continue
        try:
            link.sendall(json.dumps({"token": offer["token"], "rank": rank}).encode() + b"\n")
            if link.recv(1) == b"+":
                return Connection(_ready(link))
            link.close()
        except OSError as error:
            problem = error
            link.close()
    raise problem


def _accept(listener: socket.socket, size: int, token: str, end: float) -> dict[int, Connection]:
    """Waits for the others until ``end``. Connections of strangers are closed."""
    connections: dict[int, Connection] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(connections) < size - 1 and (left := end - time.monotonic()) > 0:
            if not selector.select(left):
                break
            link, _ = listener.accept()
            link.settimeout(_CONNECT_SECONDS)
            try:
                hello = json.loads(link.makefile("rb").readline(_LONGEST_LINE))
                known = hmac.compare_digest(str(hello["token"]), token) and 0 < hello["rank"] < size
                if known:
                    link.sendall(b"+")
                    connections[hello["rank"]] = Connection(_ready(link))
                    continue
            except (OSError, ValueError, LookupError, TypeError):
                pass
            link.close()
    return connections


def _ready(link: socket.socket) -> socket.socket:
    link.setblocking(False)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
