"""What each process of communication.py does. Every function returns seconds per call, round by round."""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

import mlx_anvil

Rounds = list[float]
CHAIN_BYTES = 1 << 20  # up to this size a round is a chain of calls, as in the layers of a model
CHAIN = 8
GROUP_SIZE, BITS = 64, 4
ATTENTION_HEADS = 4  # of the calls that time attention
# About a layer of a Llama with 1 billion weights; 1 to 4 ranks divide the MLP into whole groups.
HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 2048, 4608, 16, 4, 64


def timed(run: Callable[[], Any], rounds: int, *, calls: int = 1) -> Rounds:
    """Seconds per call. A sum over all ranks before each round lets them start together."""
    run()
    seconds = []
    for _ in range(rounds):
        mx.eval(mx.distributed.all_sum(mx.ones(8)))
        begin = time.perf_counter()
        run()
        seconds.append((time.perf_counter() - begin) / calls)
    return seconds


def chained(call: Callable[[mx.array], mx.array | list[mx.array]], x: mx.array, calls: int) -> Callable[[], None]:
    """Calls that wait for each other, in one graph."""

    def run() -> None:
        y = x
        for _ in range(calls):
            y = mx.depends(x, call(y))
        mx.eval(y)

    return run


def exchange(group: mx.distributed.Group) -> Callable[[mx.array], list[mx.array]]:
    """Sends to the right neighbour while receiving from the left: each has its own stream, so neither waits for the
    other, and no order of the ranks can deadlock."""
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    out, into = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)

    def call(x: mx.array) -> list[mx.array]:
        sent = mx.distributed.send(x, right, group=group, stream=out)
        received = mx.distributed.recv_like(x, left, group=group, stream=into)
        # A receive has no inputs: in one graph, a later one may run first, and wait for what is never sent.
        mx.async_eval(sent, received)
        return [sent, received]

    return call


def transfers(sizes: list[int], rounds: int) -> dict[str, dict[int, Rounds]]:
    """Every transfer at every size in bytes."""
    group = mx.distributed.init()
    mx.set_cache_limit(1 << 30)  # as the ops do: else every large result is newly mapped memory
    calls: dict[str, Callable[[mx.array], Any]] = {
        "all_sum": lambda x: mx.distributed.all_sum(x, group=group),
        "all_gather": lambda x: mx.distributed.all_gather(x, group=group),
        "exchange": exchange(group),
    }
    found: dict[str, dict[int, Rounds]] = {name: {} for name in calls}
    for size in sizes:
        x = mx.random.normal((size // 4,))
        mx.eval(x)
        count = CHAIN if size <= CHAIN_BYTES else 1
        for name, call in calls.items():
            found[name][size] = timed(chained(call, x, count), rounds, calls=count)
    return found


def quantized(outputs: int, inputs: int) -> tuple[mx.array, ...]:
    arrays = mx.quantize(mx.random.normal((outputs, inputs)).astype(mx.bfloat16), group_size=GROUP_SIZE, bits=BITS)
    mx.eval(arrays)
    return tuple(arrays)


def rates(rounds: int) -> dict[str, dict[str, Any]]:
    """The times that the model's rates come from, with the work of a call: bytes read, or floating-point operations."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, run: Callable[[], Any], unit: str, work: float) -> None:
        found[name] = {"unit": unit, "work": work, "seconds": timed(lambda: mx.eval(run()), rounds)}

    matrix = quantized(MLP, HIDDEN)
    read = sum(part.nbytes for part in matrix)
    for rows in (1, 128):
        x = mx.random.normal((rows, HIDDEN)).astype(mx.bfloat16)
        mx.eval(x)
        unit, work = ("bytes", read) if rows == 1 else ("flops", 2 * rows * HIDDEN * MLP)
        product = lambda x=x: mlx_anvil.quantized_matmul(x, *matrix)  # noqa: E731
        add(f"quantized product, {rows} rows" if rows > 1 else "quantized product, 1 row", product, unit, work)
    weights = mx.random.normal((HIDDEN, 512)).astype(mx.float32)
    x = mx.random.normal((128, HIDDEN))
    mx.eval(weights, x)
    add("dense product, 128 rows", lambda: x @ weights, "flops", 2 * 128 * HIDDEN * 512)
    for length in (1024, 2048, 4096):
        q, k, v = (mx.random.normal((1, heads, length, HEAD_DIM)) for heads in (ATTENTION_HEADS, 1, 1))
        mx.eval(q, k, v)
        work = 4 * ATTENTION_HEADS * length**2 * HEAD_DIM
        add(f"attention, {length} tokens", lambda q=q, k=k, v=v: mlx_anvil.flash_attention(q, k, v), "flops", work)
        if length < 4096:
            gradient = lambda q=q, k=k, v=v: mx.vjp(mlx_anvil.flash_attention, [q, k, v], [q])  # noqa: E731
            add(f"attention with gradients, {length}", gradient, "flops", 3.5 * work)
    q = mx.random.normal((1, HEADS, 1, HEAD_DIM)).astype(mx.bfloat16)
    k, v = (mx.random.normal((1, KV_HEADS, 32768, HEAD_DIM)).astype(mx.bfloat16) for _ in range(2))
    mx.eval(q, k, v)
    add("decode over 32768 keys", lambda: mlx_anvil.flash_attention(q, k, v), "bytes", k.nbytes + v.nbytes)
    return found


def layers(tokens: int, count: int, rounds: int) -> dict[str, Rounds]:
    """Tensor-parallel layers: an MLP whose first product is split by outputs, the second by inputs, and their sum.

    "compute" leaves out the sum, and is timed while the other ranks compute as well.
    """
    group = mx.distributed.init()
    part = MLP // group.size()
    up, down = quantized(part, HIDDEN), quantized(HIDDEN, part)
    x = mx.random.normal((tokens, HIDDEN)).astype(mx.bfloat16)
    mx.eval(x)

    def stack(reduce: Callable[[mx.array], mx.array]) -> None:
        y = x
        for _ in range(count):
            y = reduce(mlx_anvil.quantized_matmul(mlx_anvil.quantized_matmul(y, *up), *down)) * 0.01
        mx.eval(y)

    whole = timed(lambda: stack(lambda y: mx.distributed.all_sum(y, group=group)), rounds)
    return {"layers": whole, "compute": timed(lambda: stack(lambda y: y), rounds)}


def ring(length: int, rounds: int) -> dict[str, Rounds]:
    """Attention over keys that go round: each hop sends a part on while the part before it is worked on.

    Results are not merged: this times what overlaps. "compute" leaves out the transfers.
    """
    group = mx.distributed.init()
    n = group.size()
    q, k, v = (mx.random.normal((1, heads, length // n, HEAD_DIM)) for heads in (ATTENTION_HEADS, 1, 1))
    mx.eval(q, k, v)
    pass_on = exchange(group)

    def hops(transfer: bool) -> None:
        keys, outs = mx.concatenate([k, v], axis=-1), []
        for hop in range(n):
            following = pass_on(keys) if transfer and hop < n - 1 else [keys, keys]
            outs += [mlx_anvil.flash_attention(q, *mx.split(keys, 2, axis=-1)), following[0]]
            mx.async_eval(outs[-2:])
            keys = following[1]
        mx.eval(outs)

    return {"ring": timed(lambda: hops(n > 1), rounds), "compute": timed(lambda: hops(False), rounds)}
