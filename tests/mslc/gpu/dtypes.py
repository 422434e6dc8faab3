"""Arrays of the kernels' dtypes in NumPy, and comparisons with the exact result."""

from __future__ import annotations

import numpy as np


def to_bfloat(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


ENCODE = {"float": np.float32, "half": np.float16, "bfloat": to_bfloat}
DECODE = {"float": np.float64, "half": np.float64, "bfloat": lambda x: from_bfloat(x).astype(np.float64)}
EPSILON = {"float": 2.0**-24, "half": 2.0**-11, "bfloat": 2.0**-8}
PROJECT_NAME = {"float": "float32", "half": "float16", "bfloat": "bfloat16"}


def close(actual: np.ndarray, exact: np.ndarray, allowed: float) -> str:
    """The error against the largest value, and FAILED where it is above `allowed`."""
    error = float(np.abs(actual - exact).max() / np.abs(exact).max())
    return f"{'' if error <= allowed else 'FAILED '}error {error:.2e}, allowed {allowed:.1e}"


def equal(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    if not np.array_equal(actual, expected):
        place = tuple(np.argwhere(actual != expected)[0])
        count = int((actual != expected).sum())
        raise AssertionError(f"{what}: {count} differ, first at {place}: {actual[place]} for {expected[place]}")


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, causal: bool) -> np.ndarray:
    """[heads, length, head_dim]; kv heads shared by groups of query heads."""
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat(repeat, 0), v.repeat(repeat, 0)
    scores = np.einsum("hqd,hkd->hqk", q, k) * scale
    if causal:
        row, column = np.indices(scores.shape[1:])
        scores = np.where(column <= row + scores.shape[2] - scores.shape[1], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,hkd->hqd", weights / weights.sum(-1, keepdims=True), v)
