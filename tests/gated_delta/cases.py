"""Problems for gated_delta's tests, and its definition in NumPy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_anvil
from mlx_anvil import gated_delta
from support import kernel_names, to_numpy

ARRAYS = ("q", "k", "v", "g", "beta", "state")
# Relative to the largest number of a result. The second is of 16-bit q, k and v: their rounding is in both, so that
# what is left is that of y, or of a gradient.
FLOAT32, ROUNDED = 2e-6, 2.0**-7
PAIRS = 2.0**-16  # states, where matrix units multiply pairs of bfloat16; per channel both operands are pairs


@dataclass
class Case:
    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arrays(self) -> list[mx.array]:
        given = [getattr(self, name) for name in ARRAYS]
        return given if self.state is not None else given[:-1]

    def run(self, *arrays: mx.array, **more: Any) -> tuple[mx.array, ...]:
        return gated_delta(*(arrays or self.arrays), **self.options, **more)

    def exact(self, **more: Any) -> list[np.ndarray]:
        return definition(*map(to_numpy, self.arrays), **{**self.options, **more})


def definition(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray | None = None,
    *,
    return_states: Any = None,
    lengths: Any = None,
    normalize_eps: float | None = None,
) -> list[np.ndarray]:
    """One product of a matrix and a vector after the other, in float64."""
    batch, steps, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    states = np.zeros((batch, heads, value_dim, key_dim)) if state is None else state.copy()
    y = np.zeros(v.shape)
    history = np.zeros((batch, steps, *states.shape[1:]))
    for b in range(batch):
        length = steps if lengths is None else int(lengths[b])
        for t in range(steps):
            for head in range(heads):
                if t < length:
                    own_q, own_k = (x[b, t, head // (heads // key_heads)] for x in (q, k))
                    if normalize_eps is not None:
                        own_q, own_k = (x / np.sqrt(x @ x + normalize_eps) for x in (own_q, own_k))
                        own_q = own_q / np.sqrt(key_dim)
                    s = states[b, head] * g[b, t, head]
                    s = s + beta[b, t, head] * np.outer(v[b, t, head] - s @ own_k, own_k)
                    states[b, head] = s
                    y[b, t, head] = s @ own_q
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
    per_channel: bool = False,
    gates: mx.Dtype = mx.float32,
    with_state: bool = True,
    **options: Any,
) -> Case:
    """`heads` and `dims` are those of k and of v. Keys have a length of about 1, as normalised ones do."""
    key_heads, value_heads = heads
    key_dim, value_dim = dims
    of_keys, of_gates = (batch, steps, key_heads, key_dim), (batch, steps, value_heads)
    q, k = (mx.random.normal(of_keys) / key_dim**0.5 for _ in range(2))
    v = mx.random.normal((*of_gates, value_dim))
    g = mx.random.uniform(0.6, 1.0, (*of_gates, key_dim) if per_channel else of_gates)
    beta = mx.random.uniform(0.0, 1.0, of_gates)
    state = mx.random.normal((batch, value_heads, value_dim, key_dim)) if with_state else None
    case = Case(*(x.astype(dtype) for x in (q, k, v)), *(x.astype(gates) for x in (g, beta)), state, options)
    mx.eval(case.arrays)
    return case


def assert_close(name: str, result: mx.array, exact: np.ndarray, tolerance: float) -> None:
    assert result.shape == exact.shape
    error = np.abs(to_numpy(result) - exact).max(initial=0.0)
    limit = tolerance * max(np.abs(exact).max(initial=0.0), 1e-3)
    assert error <= limit, f"{name}: {error:.2e} is more than {limit:.2e}"


def check_gradients_of_pairs(run: Callable[..., tuple[mx.array, ...]], arrays: list[mx.array]) -> None:
    """Beside those of float32 arrays: errors are about twice those of rounding the results to bfloat16."""
    cotangents = [mx.random.normal(x.shape).astype(x.dtype) for x in run(*arrays)]
    gradients = mx.vjp(run, arrays, cotangents)[1]
    wide = [[x.astype(mx.float32) for x in given] for given in (arrays, cotangents)]
    for ours, exact in zip(gradients, mx.vjp(run, *wide)[1], strict=True):
        if exact.ndim > 1:  # not a sum over all steps, whose terms may cancel
            assert_rounded(to_numpy(ours), to_numpy(exact))


def assert_rounded(ours: np.ndarray, exact: np.ndarray) -> None:
    """What products of bfloat16 may be off: rounding alone gives a quarter of this in the mean, and they half of it."""
    error = ours - exact
    assert np.abs(error).max() <= 2 * ROUNDED * np.abs(exact).max()
    assert np.square(error).mean() <= ROUNDED**2 * np.square(exact).mean()


def takes_pairs(trace: mlx_anvil.Trace) -> bool:
    """Whether matrix units multiplied bfloat16. Gradients then have operands of 8 bits, and states of 16."""
    return any("_pairs_" in name for name in kernel_names(trace))


def tolerance_of_states(trace: mlx_anvil.Trace) -> float:
    if not takes_pairs(trace):
        return FLOAT32
    return 2 * PAIRS if any("_channels_" in name for name in kernel_names(trace)) else PAIRS


def check_results(case: Case, slack: float = 1.0) -> tuple[mx.array, ...]:
    """`slack`: what the tolerances are multiplied by."""
    with mlx_anvil.trace() as trace:
        results, exact = case.run(), case.exact()
        mx.eval(results)
    state = tolerance_of_states(trace)
    assert len(results) == len(exact)
    assert results[0].dtype == case.q.dtype
    assert {x.dtype for x in results[1:]} == {mx.float32}
    tolerances = (FLOAT32 if case.q.dtype == mx.float32 else ROUNDED, state, state)
    for name, ours, wanted, tolerance in zip(("y", "state", "states"), results, exact, tolerances, strict=False):
        assert_close(name, ours, wanted, slack * tolerance)
    return results


def check_gradients(case: Case, slack: float = 1.0) -> None:
    """Along a random direction of each array, against the slope of the definition in float64."""
    cotangents = [mx.random.normal(x.shape).astype(x.dtype) for x in case.run()]
    with mlx_anvil.trace() as trace:
        gradients = mx.vjp(case.run, case.arrays, cotangents)[1]
        mx.eval(gradients)
    given, weights = [to_numpy(x) for x in case.arrays], [to_numpy(x) for x in cotangents]
    for i, gradient in enumerate(gradients):
        assert gradient.dtype == case.arrays[i].dtype
        assert gradient.shape == case.arrays[i].shape
        exact = to_numpy(gradient)
        direction = np.sign(exact) + 0.1 * to_numpy(mx.random.normal(gradient.shape))  # of no small slope

        def value(step: float, i: int = i, direction: np.ndarray = direction) -> float:
            moved = [x + step * direction if j == i else x for j, x in enumerate(given)]
            results = definition(*moved, **case.options)
            return sum(float((x * w).sum()) for x, w in zip(results, weights, strict=True))

        step = 1e-5
        slope, ours = (value(step) - value(-step)) / (2 * step), float((exact * direction).sum())
        is_exact = gradient.dtype == mx.float32 and not takes_pairs(trace)
        tolerance = 1e-5 if is_exact else ROUNDED
        size = float(np.abs(exact * direction).sum())
        assert abs(slope - ours) <= slack * tolerance * size + 1e-6, (ARRAYS[i], slope, ours)
