"""trace() and strict(): scope, nesting, threads."""

import asyncio
import threading

import mlx.core as mx
import pytest

import mlx_anvil
import support
from support import kernel_names


def run_once() -> None:
    mx.eval(mlx_anvil.silu_gate(mx.ones((4,)), mx.ones((4,))))


def double_backward() -> None:
    x = mx.ones((4,))
    mx.eval(mx.grad(lambda a: mx.grad(lambda b: mlx_anvil.silu_gate(b, x).sum())(a).sum())(x))


def test_nothing_is_recorded_outside():
    run_once()
    with mlx_anvil.trace() as trace:
        pass
    run_once()
    assert trace.events == []


def test_records_what_is_evaluated_inside():
    lazy = mlx_anvil.silu_gate(mx.ones((4,)), mx.ones((4,)))
    with mlx_anvil.trace() as trace:
        mx.eval(lazy)
    (event,) = trace.events
    assert event.op == "silu_gate"
    assert kernel_names(trace) == ["silu_gate_forward_float32_flat"]
    assert not event.is_fallback
    if support.backend == "cpu":
        assert event.device == f"cpu ({mlx_anvil.info()['isa']})"
        assert event.grid == (0, 0, 0)
    else:
        assert event.device.partition(" ")[0] == support.backend  # "cuda (sm_90)" of a cubin
        assert event.grid == (1, 1, 1)
        assert event.threadgroup == (256, 1, 1)


def test_nested_blocks_each_see_their_own():
    with mlx_anvil.trace() as outer:
        run_once()
        with mlx_anvil.trace() as inner:
            run_once()
        run_once()
    assert len(inner.events) == 1
    assert len(outer.events) == 3


def test_closed_by_an_exception():
    with pytest.raises(KeyError), mlx_anvil.trace() as trace:
        raise KeyError
    run_once()
    assert trace.events == []


def test_other_threads_are_not_recorded():
    with mlx_anvil.trace() as trace:
        other = threading.Thread(target=lambda: mx.eval(mx.ones((2,)) + 1) or run_once())
        other.start()
        other.join()
    assert trace.events == []


def test_prints_as_a_table():
    with mlx_anvil.trace() as trace:
        run_once()
        double_backward()
    text = str(trace)
    assert "silu_gate_forward_float32_flat" in text
    assert "MLX ops" in text
    assert "the gradient of SiluGateBackward is a graph of MLX ops" in text


def test_strict_nests_and_ends():
    with mlx_anvil.strict():
        with mlx_anvil.strict():
            run_once()
        with pytest.raises(RuntimeError, match=r"^\[silu_gate\] strict\(\)"):
            double_backward()
    double_backward()


def test_strict_ends_after_its_own_error():
    with pytest.raises(RuntimeError, match="strict"), mlx_anvil.strict():
        double_backward()
    double_backward()


# ---- one block, one `with` -------------------------------------------------------------------------------------------

BLOCKS = [mlx_anvil.trace, mlx_anvil.strict, mlx_anvil.composed, mlx_anvil.simulate]
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)


@each_block
def test_entered_twice(block):
    if block is mlx_anvil.simulate and not mlx_anvil.info()["backends"]["simulator"]["usable"]:
        pytest.skip("no simulator")
    name = block.__name__
    error = rf"^\[{name}\] this block has been entered before; allowed: a new {name}\(\) for each `with`\.$"
    once = block()
    with once, pytest.raises(RuntimeError, match=error), once:
        pass
    with pytest.raises(RuntimeError, match=error), once:
        pass
    with block(), block():
        pass
    with mlx_anvil.trace() as trace:  # nothing of it is left
        mx.eval(mx.grad(lambda x: mlx_anvil.silu_gate(x, x).sum())(mx.ones((4,))))
        double_backward()
    assert trace.kernels
    assert trace.fallbacks


def test_as_a_decorator():
    @mlx_anvil.strict()
    def strictly():
        double_backward()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="strict"):
            strictly()
    double_backward()


def test_blocks_that_end_out_of_order():
    def block(manager):
        with manager as value:
            yield value

    first, second = block(mlx_anvil.trace()), block(mlx_anvil.trace())
    outer, inner = next(first), next(second)
    run_once()
    assert list(first) == []
    run_once()
    assert list(second) == []
    run_once()
    assert [len(outer.events), len(inner.events)] == [1, 2]


# ---- asyncio ---------------------------------------------------------------------------------------------------------


def test_tasks_do_not_record_each_other():
    async def task(count: int) -> mlx_anvil.Trace:
        with mlx_anvil.trace() as trace:
            for _ in range(count):
                await asyncio.sleep(0)
                run_once()
                await asyncio.sleep(0)
        return trace

    async def untraced() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
            run_once()

    async def main() -> list[mlx_anvil.Trace]:
        one, two, _ = await asyncio.gather(task(1), task(3), untraced())
        return [one, two]

    assert [len(trace.events) for trace in asyncio.run(main())] == [1, 3]


def test_strict_is_the_task_s_own():
    async def strictly(entered: asyncio.Event, done: asyncio.Event) -> None:
        with mlx_anvil.strict():
            entered.set()
            await done.wait()
            with pytest.raises(RuntimeError, match="strict"):
                double_backward()

    async def main() -> None:
        entered, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(strictly(entered, done))
        await entered.wait()
        double_backward()
        done.set()
        await task

    asyncio.run(main())


def test_a_block_reaches_what_is_started_inside_until_it_ends():
    async def main() -> mlx_anvil.Trace:
        ended = asyncio.Event()

        async def child() -> None:
            run_once()
            await ended.wait()
            run_once()

        with mlx_anvil.trace() as trace:
            task = asyncio.create_task(child())
            await asyncio.to_thread(run_once)
        ended.set()
        await task
        return trace

    assert len(asyncio.run(main()).events) == 2
