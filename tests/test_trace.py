"""trace() and strict(): scope, nesting, threads."""

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
