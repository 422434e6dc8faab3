"""trace() and strict(): scope, nesting, threads."""

import asyncio
import itertools
import json
import re
import threading
import time

import mlx.core as mx
import pytest

import mlx_anvil
import support
from mlx_anvil._tables import Table
from mlx_anvil._trace import Event, _rows_of
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
    assert all(len(line) <= 80 for line in text.splitlines()), text
    launches, fallbacks = trace.kernels, trace.fallbacks
    assert fallbacks
    first = text.splitlines()[0]
    assert re.match(rf"{len(launches)} kernels? on ", first)
    assert first.endswith(f", {len(fallbacks)} fallback to MLX's ops; 1 op.")
    count = kernel_names(trace).count("silu_gate_forward_float32_flat")
    assert re.search(rf"^ +x {count}  silu_gate_forward_float32_flat", text, re.M)
    assert "  x 1  silu_gate: the gradient of SiluGateBackward is a graph of MLX ops" in text
    totals = text.partition("\nTotals\n")[2].splitlines()[1].split()
    assert totals[:3] == ["silu_gate", str(len(launches)), str(len(fallbacks))]


def test_a_wide_table_folds_the_names_of_kernels():
    table = Table("Kernels", ("", "kernel", "grid"), frozenset((0,)), {1: 30}, folds=True)
    table.rows += [("x 1", "k" * 100, "1 x 2 x 3"), "a remark " * 20]
    lines = list(table.lines(80))
    assert all(len(line) <= 80 for line in lines)
    assert sum(len(found) for line in lines for found in re.findall("k{2,}", line)) == 100
    assert " ".join(" ".join(lines).split()).count("a remark") == 20


def test_in_a_notebook():
    with mlx_anvil.trace() as trace:
        run_once()
    html = trace._repr_html_()
    assert html.startswith("<p>1 kernel on ")
    assert trace.kernels[0] in html
    assert html.count("<table>") == html.count("</table>") == 2


def test_times_are_those_of_the_kernels():
    gate = mx.ones((1024, 1024))
    with mlx_anvil.trace() as trace:
        before = time.perf_counter()
        for _ in range(3):
            mx.eval(mlx_anvil.silu_gate(gate, gate))
        total = time.perf_counter() - before
    starts = [event.start for event in trace.events]
    assert starts == sorted(starts)
    assert 0 <= starts[0] < starts[-1] <= total + 1
    seconds = [event.seconds for event in trace.events]
    if support.backend == "cpu":
        assert all(value > 0 for value in seconds)
        assert sum(seconds) <= total
        assert all(a.start + a.seconds <= b.start for a, b in itertools.pairwise(trace.events))
    else:
        assert seconds == [None] * 3


def test_saves_chrome_s_trace_events(tmp_path):
    with mlx_anvil.trace() as trace:
        run_once()
        double_backward()
    trace.save(tmp_path / "trace.json")
    body = json.loads((tmp_path / "trace.json").read_text())
    heads = [event for event in body["traceEvents"] if event["ph"] == "M"]
    events = [event for event in body["traceEvents"] if event["ph"] != "M"]
    assert [event["name"] for event in events] == [event.kernel or event.op for event in trace.events]
    rows = {event["tid"]: event["args"]["name"] for event in heads if event["name"] == "thread_name"}
    for event, recorded in zip(events, trace.events, strict=True):
        assert rows[event["tid"]] == ("fallbacks" if recorded.is_fallback else recorded.device)
        assert event["ts"] == pytest.approx(recorded.start * 1e6)
        if recorded.seconds is None:
            assert (event["ph"], event["s"]) == ("i", "t")
        else:
            assert event["ph"] == "X"
            assert event["dur"] == pytest.approx(recorded.seconds * 1e6)
    (fallback,) = (event for event in events if event["cat"] == "fallback")
    assert "SiluGateBackward" in fallback["args"]["reason"]


def test_slices_of_one_row_do_not_overlap():
    def event(start: float, seconds: float | None) -> Event:
        return Event("op", "kernel", "cpu", (0, 0, 0), (0, 0, 0), False, "", start=start, seconds=seconds)

    events = [event(0.0, 2.0), event(1.0, 3.0), event(2.0, 1.0), event(2.5, 0.1), event(5.0, 1.0), event(6.0, None)]
    assert _rows_of(events) == [1, 2, 1, 3, 1, 1]


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
