"""Problems for ssd_scan's tests, and its definition in NumPy."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_anvil
from mlx_anvil import ssd_scan
from support import to_numpy
from tests.gated_delta.cases import FLOAT32, ROUNDED, assert_close, tolerance_of_states

ROWS = ("x", "dt", "B", "C", "z")  # arrays with steps
OPTIONAL = ("D", "z", "state", "dt_bias")
MODEL: dict[str, Any] = {"dt_softplus": True, "dt_limit": (0.001, 100.0)}


@dataclass
class Case:
    arrays: dict[str, mx.array]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **more: Any) -> tuple[mx.array, ...]:
        return ssd_scan(**{**self.arrays, **self.options, **more})

    def of_arrays(self, *values: mx.array) -> tuple[mx.array, ...]:
        return self.run(**dict(zip(self.arrays, values, strict=True)))

    def exact(self, **more: Any) -> list[np.ndarray]:
        return definition(**{**{name: to_numpy(x) for name, x in self.arrays.items()}, **self.options, **more})


def definition(
    x: np.ndarray,
    dt: np.ndarray,
    A: np.ndarray,
    B: np.ndarray,
    C: np.ndarray,
    D: np.ndarray | None = None,
    z: np.ndarray | None = None,
    state: np.ndarray | None = None,
    *,
    dt_bias: np.ndarray | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    lengths: Any = None,
    return_states: Any = None,
) -> list[np.ndarray]:
    """One step of one head after the other, in float64."""
    batch, steps, heads, dim = x.shape
    groups, columns = B.shape[2:]
    dt = dt if dt_bias is None else dt + dt_bias
    dt = np.logaddexp(dt, 0) if dt_softplus else dt
    dt = dt if dt_limit is None else np.clip(dt, *dt_limit)
    states = np.zeros((batch, heads, dim, columns)) if state is None else state.astype(np.float64)
    y, history = np.zeros(x.shape), np.zeros((batch, steps, *states.shape[1:]))
    for b in range(batch):
        length = steps if lengths is None else int(lengths[b])
        for t in range(steps):
            for h in range(heads if t < length else 0):
                group, step = h // (heads // groups), dt[b, t, h]
                s = np.exp(step * A[h]) * states[b, h] + np.outer(step * x[b, t, h], B[b, t, group])
                states[b, h] = s
                out = s @ C[b, t, group] + (0 if D is None else D[h] * x[b, t, h])
                y[b, t, h] = out if z is None else out * z[b, t, h] / (1 + np.exp(-z[b, t, h]))
            history[b, t] = states[b]
    results = [y, states]
    if return_states is not None:
        at = np.broadcast_to(np.array(return_states), (batch, np.array(return_states).shape[-1]))
        results.append(np.stack([history[b, at[b]] for b in range(batch)]))
    return results


def draw(
    steps: int,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (32, 24),
    dtype: mx.Dtype = mx.float32,
    *,
    batch: int = 1,
    with_arrays: tuple[str, ...] = OPTIONAL,
    dt: mx.Dtype = mx.float32,
    **options: Any,
) -> Case:
    """`heads` are the groups of B and C and the heads of x, `dims` are N and P. Rows of B and C have a length of about
    1, so that y has the size of the state."""
    groups, x_heads = heads
    columns, dim = dims
    rows, of_heads = (batch, steps, x_heads, dim), (batch, steps, x_heads)
    arrays = {
        "x": mx.random.normal(rows).astype(dtype),
        "dt": mx.random.uniform(0.05, 1.0, of_heads).astype(dt),
        "A": -mx.random.uniform(0.1, 1.5, (x_heads,)),
        **{name: (mx.random.normal((batch, steps, groups, columns)) / columns**0.5).astype(dtype) for name in "BC"},
    }
    more = {
        "D": mx.random.normal((x_heads,)),
        "z": mx.random.normal(rows).astype(dtype),
        "state": mx.random.normal((batch, x_heads, dim, columns)),
        "dt_bias": mx.random.normal((x_heads,)),
    }
    case = Case(arrays | {name: more[name] for name in with_arrays}, {**MODEL, **options})
    mx.eval(case.arrays)
    return case


def check_results(case: Case, slack: float = 1.0) -> tuple[mx.array, ...]:
    """`slack`: what the tolerances are multiplied by."""
    with mlx_anvil.trace() as trace:
        results, exact = case.run(), case.exact()
        mx.eval(results)
    assert len(results) == len(exact)
    dtype = case.arrays["x"].dtype
    assert results[0].dtype == dtype
    assert {x.dtype for x in results[1:]} == {mx.float32}
    of_states = tolerance_of_states(trace)
    tolerances = (FLOAT32 if dtype == mx.float32 else ROUNDED, of_states, of_states)
    for name, ours, wanted, tolerance in zip(("y", "state", "states"), results, exact, tolerances, strict=False):
        assert_close(name, ours, wanted, slack * tolerance)
    return results


def check_gradients(case: Case) -> None:
    """Along a random direction of each array, against the slope of the definition in float64."""
    names, arrays = list(case.arrays), list(case.arrays.values())
    cotangents = [mx.random.normal(x.shape).astype(x.dtype) for x in case.run()]
    gradients = mx.vjp(case.of_arrays, arrays, cotangents)[1]
    given, weights = {name: to_numpy(x) for name, x in case.arrays.items()}, [to_numpy(x) for x in cotangents]
    for name, array, gradient in zip(names, arrays, gradients, strict=True):
        assert gradient.dtype == array.dtype
        assert gradient.shape == array.shape
        exact = to_numpy(gradient)
        direction = np.sign(exact) + 0.1 * to_numpy(mx.random.normal(gradient.shape))  # of no small slope

        def terms(step: float, name: str = name, direction: np.ndarray = direction) -> list[np.ndarray]:
            results = definition(**{**given, name: given[name] + step * direction}, **case.options)
            return [x * w for x, w in zip(results, weights, strict=True)]

        def value(step: float) -> float:
            return sum(float(x.sum()) for x in terms(step))

        step = 1e-5
        # Steps below 0 make states grow, and the difference of large sums has few digits.
        rounding = np.finfo(np.float64).eps * sum(float(np.abs(x).sum()) for x in terms(0.0)) / step
        slope, ours = (value(step) - value(-step)) / (2 * step), float((exact * direction).sum())
        tolerance = 1e-5 if case.arrays["x"].dtype == mx.float32 else ROUNDED
        size = float(np.abs(exact * direction).sum())
        if name in ("A", "dt_bias"):  # sums of many rounded terms, which may cancel
            size = max(size, float(np.abs(to_numpy(gradients[names.index("dt")])).sum()))
        assert abs(slope - ours) <= tolerance * size + rounding + 1e-6, (name, slope, ours)
