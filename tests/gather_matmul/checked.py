"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator
from functools import partial
from itertools import cycle, product

import mlx.core as mx
import numpy as np

import mlx_anvil
from checked_calls import Checked, any_dtype
from mlx_anvil.reference import DTYPES
from quantized_numpy import Format, any_format_of_each_kind, assert_rounded, half_units
from support import to_numpy
from tests.gather_matmul.metal_cases import COLUMNS, Case

HALVES = (mx.float16, mx.bfloat16)


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    # Pairs by GEMV, runs of few rows, runs of many; then tiles of matrix units.
    formats = cycle(any_format_of_each_kind(rng))
    for gated, (pairs, sorted_ids) in product((False, True), ((5, False), (21, True), (70, True))):
        yield Checked(partial(_run, rng, next(formats), pairs, 37, sorted_ids, gated=gated))
    yield Checked(partial(_run, rng, next(formats), 70, 37, True, transpose=False))
    for gated, pairs in product((False, True), (36, 70)):
        run = partial(_run, rng, next(formats), pairs, 37, True, gated=gated, dtypes=HALVES, rounded_weights=True)
        yield Checked(run, matrix_units=True)
    for gated, (pairs, bits) in product((False, True), ((60, 3), (200, 8), (500, 4))):  # of gather_gemm_group
        format = Format("affine", int(rng.choice((32, 64, 128))), bits)
        run = partial(_run, rng, format, pairs, 37, True, gated=gated, dtypes=HALVES, rounded_weights=True)
        yield Checked(run, group_products=True)
    for outputs, gated in ((37, False), (37, True), (520, False), (520, True)):
        four_bits = Format("affine", int(rng.choice((32, 64, 128))), 4)
        run = partial(_run, rng, four_bits, 21, outputs, True, gated=gated, dtypes=HALVES)
        yield Checked(run, matrix_units=True)
    for pairs, transposed in ((21, True), (70, True), (70, False)):
        yield Checked(partial(_dense, rng, pairs, transposed))
    yield Checked(partial(_sums, rng))


def _run(
    rng: np.random.Generator,
    format: Format,
    pairs: int,
    outputs: int,
    sorted_ids: bool,
    dtypes: tuple[mx.Dtype, ...] = DTYPES,
    **how: bool,
) -> None:
    Case.draw(rng, format, any_dtype(rng, dtypes), pairs, outputs, sorted_ids=sorted_ids, **how).check()


def _dense(rng: np.random.Generator, pairs: int, transposed: bool) -> None:
    experts, outputs, dtype = 3, 37 if transposed else 48, any_dtype(rng)
    shape = (experts, outputs, COLUMNS) if transposed else (experts, COLUMNS, outputs)
    w = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    x = mx.array(rng.standard_normal((pairs, 1, COLUMNS)).astype(np.float32)).astype(dtype)
    ids = np.sort(rng.integers(0, experts, pairs)).astype(np.int32)
    b = w.swapaxes(-1, -2) if transposed else w
    result = mlx_anvil.gather_matmul(x, b, rhs_indices=mx.array(ids), sorted_indices=True)
    matrices = to_numpy(w).swapaxes(-1, -2) if transposed else to_numpy(w)
    assert_rounded(result, np.einsum("pmk,pkn->pmn", to_numpy(x), matrices[ids]), dtype, terms=COLUMNS)


def _sums(rng: np.random.Generator) -> None:
    """The gradient in x, of which several pairs have a row, or none has."""
    lefts, pairs, dtype = 6, 45, any_dtype(rng)
    w = mx.array(rng.standard_normal((3, COLUMNS, 37)).astype(np.float32)).astype(dtype)
    x, y = mx.zeros((lefts, 1, COLUMNS), dtype), mx.ones((pairs, 1, 37), dtype)
    lhs, rhs = rng.integers(0, lefts - 1, pairs), rng.integers(0, 3, pairs)
    _, (gradient,) = mx.vjp(lambda x: mlx_anvil.gather_matmul(x, w, mx.array(lhs), mx.array(rhs)), [x], [y])
    of_pairs, wanted, rounding = to_numpy(w).sum(-1)[rhs], np.zeros(x.shape), np.zeros(x.shape)
    np.add.at(wanted[:, 0], lhs, of_pairs)
    assert gradient.dtype == dtype
    if dtype == mx.float32:
        assert_rounded(gradient, wanted, dtype, terms=37 * pairs)
        return
    # Each pair's gradient is rounded before they are summed.
    np.add.at(rounding[:, 0], lhs, half_units(of_pairs, dtype))
    assert (np.abs(to_numpy(gradient) - wanted) <= rounding + half_units(wanted, dtype) + 1e-5).all()
