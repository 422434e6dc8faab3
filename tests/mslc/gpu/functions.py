"""Functions of the standard library: Metal expressions with NumPy references."""

from __future__ import annotations

import numpy as np

# ---- transcendental functions: (allowed ulp, reference in float64, argument ranges)

_EVERYWHERE = (1e-38, 3e38, "log")
_TURN = (-100.0, 100.0, "linear")


def _of_pi(function):
    def reference(x):
        turns = x - 2 * np.round(x / 2)
        whole = np.round(2 * turns)
        return function(np.pi * (turns - whole / 2), whole.astype(int) % 4)

    return reference


def _sin_quadrant(angle, quadrant):
    value = np.where(quadrant % 2 == 1, np.cos(angle), np.sin(angle))
    return np.where(quadrant >= 2, -value, value)


def _cos_quadrant(angle, quadrant):
    return _sin_quadrant(angle, (quadrant + 1) % 4)


# The bounds are those of table 8.1 of the MSL specification (Metal 4): single precision without fast math.
UNARY = {
    "acos": (4, np.arccos, [(-1, 1, "linear")]),
    "acosh": (4, np.arccosh, [(1, 3e38, "log"), (1, 2, "linear")]),
    "asin": (4, np.arcsin, [(-1, 1, "linear"), (1e-38, 1, "log")]),
    "asinh": (4, np.arcsinh, [_EVERYWHERE, (-5, 5, "linear")]),
    "atan": (5, np.arctan, [_EVERYWHERE, (-5, 5, "linear")]),
    "atanh": (5, np.arctanh, [(-0.9999, 0.9999, "linear"), (1e-38, 0.99, "log")]),
    "cos": (4, np.cos, [_TURN, _EVERYWHERE]),
    "cosh": (4, np.cosh, [(-89, 89, "linear")]),
    "cospi": (4, _of_pi(_cos_quadrant), [_TURN, (1e-8, 1e7, "log")]),
    "exp": (4, np.exp, [(-87, 88.7, "linear"), (1e-8, 1, "log")]),
    "exp10": (4, lambda x: 10.0**x, [(-37.5, 38.5, "linear")]),
    "exp2": (4, np.exp2, [(-125, 127.9, "linear")]),
    "log": (4, np.log, [_EVERYWHERE, (0.5, 2, "linear")]),
    "log10": (4, np.log10, [_EVERYWHERE, (0.5, 2, "linear")]),
    "log2": (4, np.log2, [_EVERYWHERE, (0.5, 2, "linear")]),
    "rsqrt": (0.5, lambda x: 1 / np.sqrt(x), [_EVERYWHERE]),
    "sin": (4, np.sin, [_TURN, _EVERYWHERE]),
    "sinh": (4, np.sinh, [(-89, 89, "linear"), (1e-38, 1, "log")]),
    "sinpi": (4, _of_pi(_sin_quadrant), [_TURN, (1e-8, 1e7, "log")]),
    "sqrt": (0.5, np.sqrt, [_EVERYWHERE]),
    "tan": (6, np.tan, [_TURN, _EVERYWHERE]),
    "tanh": (5, np.tanh, [(-10, 10, "linear"), (1e-38, 1, "log")]),
    "tanpi": (6, lambda x: UNARY["sinpi"][1](x) / (UNARY["cospi"][1](x) + 0.0), [(-10, 10, "linear")]),
}
BINARY = {
    "atan2": (6, np.arctan2, [(-10, 10, "linear")], [(-10, 10, "linear")]),
    "fmod": (0, np.fmod, [(-1e6, 1e6, "linear"), _EVERYWHERE], [(-10, 10, "linear"), _EVERYWHERE]),
    "pow": (16, np.power, [(1e-3, 1e3, "log"), (0.9, 1.1, "linear")], [(-12, 12, "linear"), (-500, 500, "linear")]),
}
ODD_OR_EVEN = ("sin", "cos", "tan", "asinh", "atan", "sinh", "tanh", "asin", "atanh")


def samples(ranges, count: int, rng) -> np.ndarray:
    """float32 arguments, `count` of each range."""
    parts = []
    for low, high, kind in ranges:
        if kind == "log":
            parts.append(np.exp(rng.uniform(np.log(low), np.log(high), count)))
        else:
            parts.append(rng.uniform(low, high, count))
    return np.concatenate(parts).astype(np.float32)


def ulp_errors(actual: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of the exact result; subnormal results count in the smallest unit."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        nearest = exact.astype(np.float32)
        exponent = np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126)))
        errors = np.abs(actual.astype(np.float64) - exact) / 2.0 ** (exponent - 23)
    same = (actual == nearest) | (np.isnan(actual) & np.isnan(nearest))
    return np.where(np.isinf(nearest) | np.isnan(nearest), np.where(same, 0.0, np.inf), errors)


# Arguments with a result that is exact by definition; compared bit for bit, NaN with NaN.
_INF, _NAN = np.inf, np.nan
SPECIAL = {
    "exp": [(-_INF, 0), (_INF, _INF), (0, 1), (-0.0, 1), (200, _INF), (-200, 0), (_NAN, _NAN)],
    "exp2": [(-_INF, 0), (_INF, _INF), (3, 8), (-149, 2.0**-149), (_NAN, _NAN)],
    "exp10": [(-_INF, 0), (_INF, _INF), (0, 1), (_NAN, _NAN)],
    "log": [(0, -_INF), (-0.0, -_INF), (1, 0), (_INF, _INF), (-1, _NAN), (_NAN, _NAN)],
    "log2": [(0, -_INF), (8, 3), (2.0**-149, -149), (_INF, _INF), (-1, _NAN)],
    "log10": [(0, -_INF), (1, 0), (_INF, _INF), (-1, _NAN)],
    "sin": [(0, 0), (-0.0, -0.0), (_INF, _NAN), (_NAN, _NAN)],
    "cos": [(0, 1), (_INF, _NAN), (_NAN, _NAN)],
    "tan": [(-0.0, -0.0), (_INF, _NAN)],
    "sinpi": [(1, 0), (0.5, 1), (1.5, -1), (1e9, 0), (_INF, _NAN)],
    "cospi": [(1, -1), (0.5, 0), (2, 1), (1e9, 1)],
    "tanh": [(_INF, 1), (-_INF, -1), (-0.0, -0.0), (_NAN, _NAN)],
    "sinh": [(_INF, _INF), (-_INF, -_INF), (-0.0, -0.0)],
    "cosh": [(_INF, _INF), (0, 1)],
    "asinh": [(_INF, _INF), (-0.0, -0.0)],
    "acosh": [(1, 0), (0.5, _NAN), (_INF, _INF)],
    "atanh": [(1, _INF), (-1, -_INF), (2, _NAN), (-0.0, -0.0)],
    "asin": [(2, _NAN), (-0.0, -0.0)],
    "acos": [(1, 0), (2, _NAN)],
    "atan": [(-0.0, -0.0), (_NAN, _NAN)],
    "rsqrt": [(0, _INF), (_INF, 0), (4, 0.5), (-1, _NAN)],
    "sqrt": [(0, 0), (_INF, _INF), (-1, _NAN)],
}
SPECIAL_PAIRS = {
    "pow": [
        ((0, 2), 0),
        ((0, -1), _INF),
        ((-0.0, -1), -_INF),
        ((-2, 3), -8),
        ((-2, 0.5), _NAN),
        ((_NAN, 0), 1),
        ((1, _NAN), 1),
        ((2, _INF), _INF),
        ((0.5, _INF), 0),
        ((-1, _INF), 1),
        ((_INF, -2), 0),
        ((-_INF, 3), -_INF),
        ((10, 40), _INF),
        ((2, -149), 2.0**-149),
    ],
    "atan2": [((0, 1), 0), ((-0.0, 1), -0.0), ((_NAN, 1), _NAN)],
    "fmod": [((5, 3), 2), ((-5, 3), -2), ((_INF, 1), _NAN), ((1, 0), _NAN), ((1, _INF), 1), ((3e38, 1e-45), None)],
}


# ---- SIMD-group and quad-group functions: Metal expression in x (uint), f (float), lane; reference on rows of 32


def _rows(function):
    """Turns a function of (values, lane) into one of whole groups."""
    return lambda x, f: np.stack([function(x, f, lane) for lane in range(32)], -1)


def _lanes(choose):
    """A shuffle of x: the lane that `choose` names."""
    return lambda x, f: x[..., [choose(lane) for lane in range(32)]]


def _quads(reduce):
    def reference(x, f):
        quads = x.reshape(*x.shape[:-1], 8, 4)
        return np.repeat(reduce(quads)[..., None], 4, -1).reshape(x.shape)

    return reference


def _bits(values):
    return np.sum(values.astype(np.uint64) << np.arange(values.shape[-1], dtype=np.uint64), -1).astype(np.uint32)


def _spread(reduce):
    return lambda x, f: np.repeat(reduce(x, f)[..., None], 32, -1)


def _exclusive(scan, start):
    return lambda x, f: np.concatenate([np.full((*x.shape[:-1], 1), start, x.dtype), scan(x)[..., :-1]], -1)


def _in_quads(function):
    def reference(x, f):
        return function(x.reshape(*x.shape[:-1], 8, 4)).reshape(x.shape)

    return reference


def _sum(x, axis=-1):
    return np.sum(x, axis, dtype=np.uint32)


def _cumulative(x):
    return np.cumsum(x, -1, dtype=np.uint32)


def _products(x):
    return np.cumprod(x | 1, -1, dtype=np.uint32)


GROUP = {
    "simd_shuffle(x, ushort(lane * 7 % 32))": _lanes(lambda i: i * 7 % 32),
    "simd_broadcast(x, 11)": _lanes(lambda i: 11),
    "simd_broadcast_first(x)": _lanes(lambda i: 0),
    "simd_shuffle_xor(x, 13)": _lanes(lambda i: i ^ 13),
    "simd_shuffle_down(x, 3)": _lanes(lambda i: i + 3 if i + 3 < 32 else i),
    "simd_shuffle_up(x, 5)": _lanes(lambda i: i - 5 if i >= 5 else i),
    "simd_shuffle_rotate_down(x, 9)": _lanes(lambda i: (i + 9) % 32),
    "simd_shuffle_rotate_up(x, 9)": _lanes(lambda i: (i - 9) % 32),
    "simd_shuffle_and_fill_down(x, x + 1000u, 3)": lambda x, f: np.concatenate([x[..., 3:], x[..., :3] + 1000], -1),
    "simd_shuffle_and_fill_up(x, x + 1000u, 3)": lambda x, f: np.concatenate([x[..., -3:] + 1000, x[..., :-3]], -1),
    "simd_shuffle_and_fill_down(x, x + 1000u, 2, 8)": lambda x, f: np.concatenate(
        [(p := x.reshape(*x.shape[:-1], 4, 8))[..., 2:], p[..., :2] + 1000], -1
    ).reshape(x.shape),
    "simd_shuffle_and_fill_up(x, x + 1000u, 2, 8)": lambda x, f: np.concatenate(
        [(p := x.reshape(*x.shape[:-1], 4, 8))[..., -2:] + 1000, p[..., :-2]], -1
    ).reshape(x.shape),
    "simd_sum(x)": _spread(lambda x, f: _sum(x)),
    "simd_product(x | 1)": _spread(lambda x, f: np.prod(x | 1, -1, dtype=np.uint32)),
    "simd_max(x)": _spread(lambda x, f: x.max(-1)),
    "simd_min(x)": _spread(lambda x, f: x.min(-1)),
    "simd_and(x | 3)": _spread(lambda x, f: np.bitwise_and.reduce(x | 3, -1)),
    "simd_or(x & 255)": _spread(lambda x, f: np.bitwise_or.reduce(x & 255, -1)),
    "simd_xor(x)": _spread(lambda x, f: np.bitwise_xor.reduce(x, -1)),
    "simd_prefix_inclusive_sum(x)": lambda x, f: _cumulative(x),
    "simd_prefix_exclusive_sum(x)": _exclusive(_cumulative, 0),
    "simd_prefix_inclusive_product(x | 1)": lambda x, f: _products(x),
    "simd_prefix_exclusive_product(x | 1)": _exclusive(_products, 1),
    "uint(ulong(simd_ballot((x & 1) != 0)))": _spread(lambda x, f: _bits(x & 1)),
    "uint(ulong(simd_active_threads_mask()))": lambda x, f: np.full_like(x, 0xFFFFFFFF),
    "uint(simd_any(x == 77))": _spread(lambda x, f: (x == 77).any(-1).astype(np.uint32)),
    "uint(simd_all(x < 250))": _spread(lambda x, f: (x < 250).all(-1).astype(np.uint32)),
    "uint(simd_is_first())": _rows(lambda x, f, lane: np.full(x.shape[:-1], lane == 0, np.uint32)),
    "as_type<uint>(simd_max(f))": _spread(lambda x, f: f.max(-1).view(np.uint32)),
    "as_type<uint>(simd_sum(f))": _spread(lambda x, f: np.sum(f, -1, dtype=np.float32).view(np.uint32)),
    "uint(simd_sum(half(x & 7)))": _spread(lambda x, f: _sum(x & 7)),
    "uint(simd_max(ushort(x)))": _spread(lambda x, f: x.max(-1)),
    "uint(simd_sum(ulong(x) << 32) >> 32)": _spread(lambda x, f: _sum(x)),
    "simd_sum(uint4(x, 1, x, 2)).z": _spread(lambda x, f: _sum(x)),
    "quad_shuffle(x, ushort((lane * 3) % 4))": _lanes(lambda i: i // 4 * 4 + i * 3 % 4),
    "quad_broadcast(x, 2)": _lanes(lambda i: i // 4 * 4 + 2),
    "quad_broadcast_first(x)": _lanes(lambda i: i // 4 * 4),
    "quad_shuffle_xor(x, 3)": _lanes(lambda i: i ^ 3),
    "quad_shuffle_down(x, 1)": _lanes(lambda i: i + 1 if i % 4 < 3 else i),
    "quad_shuffle_up(x, 2)": _lanes(lambda i: i - 2 if i % 4 >= 2 else i),
    "quad_shuffle_rotate_down(x, 1)": _lanes(lambda i: i // 4 * 4 + (i + 1) % 4),
    "quad_shuffle_rotate_up(x, 1)": _lanes(lambda i: i // 4 * 4 + (i - 1) % 4),
    "quad_shuffle_and_fill_down(x, x + 1000u, 1)": _in_quads(
        lambda q: np.concatenate([q[..., 1:], q[..., :1] + 1000], -1)
    ),
    "quad_shuffle_and_fill_up(x, x + 1000u, 1)": _in_quads(
        lambda q: np.concatenate([q[..., -1:] + 1000, q[..., :-1]], -1)
    ),
    "quad_sum(x)": _quads(_sum),
    "quad_product(x)": _quads(lambda q: np.prod(q, -1, dtype=np.uint32)),
    "quad_max(x)": _quads(lambda q: q.max(-1)),
    "quad_min(x)": _quads(lambda q: q.min(-1)),
    "quad_and(x)": _quads(lambda q: np.bitwise_and.reduce(q, -1)),
    "quad_or(x)": _quads(lambda q: np.bitwise_or.reduce(q, -1)),
    "quad_xor(x)": _quads(lambda q: np.bitwise_xor.reduce(q, -1)),
    "quad_prefix_inclusive_sum(x)": _in_quads(_cumulative),
    "quad_prefix_exclusive_sum(x)": _in_quads(lambda q: _exclusive(_cumulative, 0)(q, None)),
    "quad_prefix_inclusive_product(x | 1)": _in_quads(_products),
    "quad_prefix_exclusive_product(x | 1)": _in_quads(lambda q: _exclusive(_products, 1)(q, None)),
    "uint(ulong(quad_ballot((x & 1) != 0)))": _quads(lambda q: _bits(q & 1)),
    "uint(ulong(quad_active_threads_mask()))": lambda x, f: np.full_like(x, 15),
    "uint(quad_any(x < 30))": _quads(lambda q: (q < 30).any(-1).astype(np.uint32)),
    "uint(quad_all(x < 200))": _quads(lambda q: (q < 200).all(-1).astype(np.uint32)),
    "uint(quad_is_first())": _rows(lambda x, f, lane: np.full(x.shape[:-1], lane % 4 == 0, np.uint32)),
}
