"""Problems for selective_scan's tests, and the recurrence in float64."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_anvil import selective_scan
from mlx_anvil.reference.selective_scan import selective_scan as definition
from support import GRADIENT_FACTOR, assert_same_bits, to_numpy

OPTIONAL = ("D", "z", "state")
# Largest error over the largest magnitude: a few roundings of y, and of a sum over states and steps.
TOLERANCES = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


@dataclass
class Case:
    arrays: dict[str, mx.array]
    d_y: mx.array
    d_state: mx.array
    options: dict[str, Any] = field(default_factory=dict)

    def scan(self) -> tuple[mx.array, mx.array]:
        return selective_scan(**self.arrays, **self.options)

    @property
    def dtype(self) -> mx.Dtype:
        return self.arrays["x"].dtype


def draw(
    shape: tuple[int, int, int, int],
    dtype: mx.Dtype,
    optional: tuple[str, ...] = OPTIONAL,
    **options: Any,
) -> Case:
    """``shape`` is (batch, steps, channels, states)."""
    batch, steps, channels, states = shape
    rows = {name: mx.random.normal((batch, steps, channels)) for name in ("x", "z", "d_y")}
    dt = mx.random.uniform(-4.0 if options.get("dt_softplus") else 0.01, 0.5, (batch, steps, channels))
    arrays = {"x": rows["x"], "dt": dt, "A": -mx.random.uniform(0.1, 4.0, (channels, states))}
    arrays |= {name: mx.random.normal((batch, steps, states)) for name in "BC"}
    arrays |= {"D": mx.random.normal((channels,)), "z": rows["z"]}
    state = mx.random.normal((batch, channels, states))
    exact = {"A": arrays["A"], "D": arrays["D"], "state": state}
    arrays = {name: x.astype(dtype) for name, x in arrays.items()} | exact
    kept = {name: x for name, x in arrays.items() if name not in OPTIONAL or name in optional}
    return Case(kept, rows["d_y"].astype(dtype), mx.random.normal(state.shape), options)


def exact_scan(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence in float64."""
    given = {name: to_numpy(x).astype(np.float64) for name, x in case.arrays.items()}
    x, dt, rates, b, c = (given[name] for name in ("x", "dt", "A", "B", "C"))
    if case.options.get("dt_softplus"):
        dt = np.logaddexp(dt, 0)
    batch, steps, _ = x.shape
    lengths = case.options.get("lengths")
    lengths = np.full(batch, steps) if lengths is None else np.array(lengths)
    h = given.get("state", np.zeros((batch, *rates.shape)))
    y = np.zeros(x.shape)
    for t in range(steps):
        counts = (t < lengths)[:, None]
        step = dt[:, t, :, None]
        new = np.exp(step * rates) * h + step * x[:, t, :, None] * b[:, t, None]
        row = (new * c[:, t, None]).sum(-1) + given.get("D", 0.0) * x[:, t]
        if "z" in given:
            z = given["z"][:, t]
            row = row * z / (1 + np.exp(-z))
        y[:, t] = np.where(counts, row, 0)
        h = np.where(counts[..., None], new, h)
    return y, h


def assert_close(name: str, found: mx.array, exact: np.ndarray, tolerance: float) -> None:
    assert found.shape == exact.shape, name
    scale = np.abs(exact).max(initial=1e-6)
    error = np.abs(to_numpy(found).astype(np.float64) - exact).max(initial=0)
    assert error <= tolerance * scale, (name, error / scale)


def check_results(case: Case) -> tuple[mx.array, mx.array]:
    """Compares y and the state with the recurrence in float64. Returns them."""
    y, state = case.scan()
    assert (y.dtype, state.dtype) == (case.dtype, mx.float32)
    exact_y, exact_state = exact_scan(case)
    assert_close("y", y, exact_y, TOLERANCES[case.dtype])
    assert_close("state", state, exact_state, TOLERANCES[mx.float32])
    return y, state


def gradients(case: Case, function: Any, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    names = list(arrays)

    def scan(*values: mx.array) -> list[mx.array]:
        return list(function(**dict(zip(names, values, strict=True)), **case.options))

    cotangents = [case.d_y.astype(arrays["x"].dtype), case.d_state]
    return dict(zip(names, mx.vjp(scan, list(arrays.values()), cotangents)[1], strict=True))


def check_gradients(case: Case) -> dict[str, mx.array]:
    """Compares the gradients of all arrays with those of the definition in float32."""
    found = gradients(case, selective_scan, case.arrays)
    wide = {name: x.astype(mx.float32) for name, x in case.arrays.items()}
    exact = gradients(case, definition, wide)
    for name, gradient in found.items():
        assert gradient.dtype == case.arrays[name].dtype, name
        tolerance = GRADIENT_FACTOR * TOLERANCES[gradient.dtype]
        assert_close(f"gradient of {name}", gradient, to_numpy(exact[name]), tolerance)
    for name, again in gradients(case, selective_scan, case.arrays).items():
        assert_same_bits(again, found[name])
    return found
