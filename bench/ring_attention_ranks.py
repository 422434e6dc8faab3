"""What bench/ring_attention.py runs in each process."""

from collections.abc import Callable
from functools import partial
from typing import Any

from harness import forget_peak, resident

import mlx.core as mx

import mlx_anvil
from mlx_anvil.bench.timing import seconds_of
from mlx_anvil.distributed import ring_attention

SHORTEST_SLICE, MOST_PIECES = 512, 16  # csrc/ring_attention/plan.cpp
Call = Callable[[], Any]


def measured(
    length: int, heads: tuple[int, int], dim: int, layout: str, rounds: int, times_one: bool
) -> dict[str, Any]:
    """For the result alone, and for the gradients: seconds of each round, and the peak of memory.

    ``length`` is that of the whole sequence. "One", if wanted, is :func:`mlx_anvil.flash_attention` of all of it, which every
    process computes at the same time.
    """
    group = mx.distributed.init()
    one = partial(mlx_anvil.flash_attention, mask="causal")
    ours = one
    if group.size() > 1:
        ours = partial(ring_attention, mask="causal", group=group, layout=layout)
    found = {}
    for what in ("result", "gradients"):
        function = with_gradients if what == "gradients" else alone
        mx.clear_cache()
        before = resident("VmRSS:")
        call = partial(function, ours, draw(length // group.size(), heads, dim))
        forget_peak()
        timed(call, group)
        peaks = mx.get_peak_memory(), resident("VmHWM:") - before
        calls = {"ours": call, "one": partial(function, one, draw(length, heads, dim))}
        if not times_one:
            del calls["one"]
        calls["transfers"] = partial(pass_round, group, length // group.size(), heads[1], dim, layout, what)
        seconds: dict[str, list[float]] = {label: [] for label in calls}
        for number in range(rounds):
            for label in list(calls)[:: -1 if number % 2 else 1]:
                seconds[label].append(timed(calls[label], group))
        found[what] = {"seconds": seconds, "peak": max(peaks), "mlx_peak": peaks[0]}
        calls.clear()  # with their arrays
        del call
    return found


def draw(length: int, heads: tuple[int, int], dim: int) -> list[mx.array]:
    """q, k, v and the gradient of the result."""
    arrays = [mx.random.normal((1, count, length, dim)) for count in (heads[0], heads[1], heads[1], heads[0])]
    mx.eval(arrays)
    return arrays


def alone(attention: Call, arrays: list[mx.array]) -> None:
    mx.eval(attention(*arrays[:3]))


def with_gradients(attention: Call, arrays: list[mx.array]) -> None:
    mx.eval(mx.vjp(lambda *x: attention(*x), arrays[:3], arrays[3:]))


def timed(call: Call, group: mx.distributed.Group) -> float:
    """Seconds of a call that all ranks begin together."""
    mx.eval(mx.distributed.all_sum(mx.zeros(1), group=group))
    return seconds_of(call)


def pass_round(group: mx.distributed.Group, part: int, heads: int, dim: int, layout: str, what: str) -> None:
    """The messages of a call, and nothing else: every piece goes round the ring, in float32."""
    if group.size() == 1:
        return
    slices = 2 if layout == "zigzag" else 1
    pieces = max(1, min(part // (slices * SHORTEST_SLICE), MOST_PIECES))
    piece = mx.zeros((part // pieces, heads, 2 * dim))
    hops = group.size() - 1
    if what == "gradients":  # those of the result, keys and values once more, and their gradients, which come home
        hops += 2 * group.size() - 1
    send, receive = streams()
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    for _ in range(pieces * hops):
        sent = mx.distributed.send(piece, right, group=group, stream=send)
        mx.eval(sent, mx.distributed.recv_like(piece, left, group=group, stream=receive))


_streams: list[mx.Stream] = []


def streams() -> list[mx.Stream]:
    """One for each direction, as ring_attention has them with MLX's ring backend."""
    if not _streams:
        _streams.extend([mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)])
    return _streams
