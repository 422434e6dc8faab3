"""Problems for flash_attention's tests, and the criterion for its results and gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

import support
from mlx_anvil import flash_attention
from support import GRADIENT_FACTOR, assert_same_bits, to_numpy
from tests.flash_attention.formulas import ROUNDING, Attention, attention

FLOAT32_TOLERANCE = 2e-5
OUTPUT_FACTOR, FLOOR = support.OUTPUT_FACTOR, support.FLOOR
FEATURES = ("none", "causal", "window", "window+causal", "softcap", "bool mask", "additive mask", "sinks")


@dataclass
class Case:
    q: mx.array
    k: mx.array
    v: mx.array
    d_out: mx.array
    options: dict[str, Any]

    @property
    def differentiable(self) -> dict[str, mx.array]:
        """Every array that has a gradient."""
        arrays = {"q": self.q, "k": self.k, "v": self.v}
        for name in ("mask", "sinks"):
            value = self.options.get(name)
            if isinstance(value, mx.array) and value.dtype != mx.bool_:
                arrays[name] = value
        return arrays

    def reference(self, **more: Any) -> Attention:
        return attention(self.q, self.k, self.v, self.d_out, **self.options, **more)


def draw(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dims: tuple[int, int],
    dtype: mx.Dtype,
    feature: str = "none",
    batch: int = 1,
) -> Case:
    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    q_len, kv_len = lengths
    q, k, v = (
        normal(batch, n, length, dim)
        for n, length, dim in ((heads[0], q_len, dims[0]), (heads[1], kv_len, dims[0]), (heads[1], kv_len, dims[1]))
    )
    options: dict[str, Any] = {}
    if "causal" in feature:
        options["mask"] = "causal"
    if "window" in feature:
        options["window_size"] = (kv_len // 3, kv_len // 5)
    if feature == "softcap":
        options["softcap"] = 1.5
    if feature == "bool mask":
        options["mask"] = mx.random.bernoulli(0.4, (heads[0], q_len, kv_len))
    if feature == "additive mask":
        options["mask"] = normal(batch, 1, q_len, kv_len)
    if feature == "sinks":
        options["sinks"] = normal(heads[0])
    case = Case(q, k, v, normal(batch, heads[0], q_len, dims[1]), options)
    mx.eval(case.q, case.k, case.v, case.d_out, list(case.differentiable.values()))
    return case


def gradients_of(
    case: Case, function: Callable[..., mx.array] = flash_attention
) -> tuple[mx.array, dict[str, mx.array]]:
    """The output, and the gradients by the name of the argument."""
    arrays = case.differentiable

    def of_arrays(*values: mx.array) -> mx.array:
        given = {**case.options, **dict(zip(arrays, values, strict=True))}
        return function(given.pop("q"), given.pop("k"), given.pop("v"), **given)

    outputs, gradients = mx.vjp(of_arrays, list(arrays.values()), [case.d_out])
    return outputs[0], dict(zip(arrays, gradients, strict=True))


def error_of(result: mx.array | np.ndarray, exact: np.ndarray) -> float:
    """Largest absolute deviation; values are of order one."""
    values = to_numpy(result) if isinstance(result, mx.array) else result.astype(np.float64)
    assert values.shape == exact.shape
    assert np.isfinite(values).all()
    return float(np.abs(values - exact).max()) if exact.size else 0.0


def assert_close(
    name: str,
    result: mx.array,
    exact: np.ndarray,
    composed: np.ndarray | None,
    factor: float,
    floor: float = FLOOR,
    *,
    terms: np.ndarray | None = None,
) -> None:
    """The limit of float32, or the FlashAttention criterion if there is a composed result. `terms` are sums of
    magnitudes, for results whose terms cancel and leave their rounding."""
    if composed is None:
        # Tensor cores cut sums off where float32 arithmetic rounds them.
        tolerance = FLOAT32_TOLERANCE * (2 if support.backend == "cuda" else 1)
        limit = tolerance * max(1.0, float(np.abs(exact).max(initial=0)))
    else:
        limit = factor * error_of(composed, exact) + floor
        limit += support.luck_of_few(result) * float(np.abs(exact if terms is None else terms).max(initial=0))
    error = error_of(result, exact)
    assert error <= limit, f"{name}: {error:.2e} is more than {limit:.2e}"


def assert_gradients_close(
    gradients: dict[str, mx.array], exact: Attention, composed: Attention | None, keys: int
) -> None:
    """By the name of the argument."""
    # With one key the scores have no gradient. Ours is what two equal sums over head_dim differ by, added up over the
    # queries; the composed one happens to be 0.
    floor = FLOOR if keys > 1 else 10 * FLOOR
    # With a sink beside it, one key has as many scores as there are queries: too few to compare largest errors.
    factor = GRADIENT_FACTOR if keys > 1 else 2 * GRADIENT_FACTOR
    for name, gradient in gradients.items():
        assert_close(
            f"gradient of {name}",
            gradient,
            exact.gradients[name],
            composed and composed.gradients[name],
            factor,
            floor,
            terms=exact.terms.get(name),
        )


def check(case: Case) -> None:
    exact = case.reference()
    rounding = ROUNDING.get(case.q.dtype)
    composed = case.reference(round_to=rounding) if rounding else None
    plain = flash_attention(case.q, case.k, case.v, **case.options)
    out, gradients = gradients_of(case)
    assert_same_bits(plain, out)  # with and without the log-sum-exp that a gradient needs
    assert_close("out", out, exact.out, composed and composed.out, OUTPUT_FACTOR)
    assert_gradients_close(gradients, exact, composed, case.k.shape[2])
    for name, gradient in gradients.items():
        assert gradient.dtype == case.differentiable[name].dtype
