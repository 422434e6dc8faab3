"""Cost of the Metal kernels of quantized matrices beside MLX's on the same arrays, and freedom from races. test_op.py
and test_swiglu.py test their results, with --backend simulator."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from quantized_numpy import FLOAT_FORMATS, Format
from tests.quantized_matmul.profiles import (
    GEMV,
    PLAIN,
    PRODUCTS,
    SWIGLU,
    TILES,
    Call,
    Counts,
    evaluate,
    mlx_instructions,
    our_instructions,
    profile_mlx,
    profile_ours,
)

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

FOUR_BITS = Format("affine", 64, 4)
FORMATS = [*(Format("affine", 64, bits) for bits in (2, 3, 4, 5, 6, 8)), *FLOAT_FORMATS]
# Those whose chunks are whole vectors; the others' straddle words, or the words that lanes share.
WHOLE_VECTORS = [format for format in FORMATS if format.bits in (4, 8)]

each_format = pytest.mark.parametrize("format", FORMATS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["float16", "float32"])
each_rows = pytest.mark.parametrize("rows", [1, 2, 4, 8])
several_rows = pytest.mark.parametrize("rows", [2, 4, 8])


def mlx_wide(rows: int) -> tuple[int, int, str]:
    """Arguments with which MLX dispatches qmv_wide for 2, 4 and 8 rows: at most 5 rows at a time, 8 lanes per row of
    w."""
    return min(rows, 4), 8, "false"


def assert_reads_no_more(ours: Counts, mlx: Counts) -> None:
    assert ours.matrix_unique == mlx.matrix_unique
    assert ours.matrix_bytes <= mlx.matrix_bytes
    assert ours.matrix_lines <= mlx.matrix_lines
    assert ours.x_lines <= mlx.x_lines


@pytest.mark.parametrize("format", WHOLE_VECTORS, ids=str)
@pytest.mark.parametrize(
    ("product", "rows"),
    [(product, rows) for product in PRODUCTS for rows in (1, 2 if product == SWIGLU else 8)],  # more go by tiles
)
def test_words_are_read_once_for_all_rows(product: str, format: Format, rows: int, rng: np.random.Generator):
    """No access to w, scales or biases touches more lines than its bytes fill."""
    counts = profile_ours(Call.draw(rng, product, format, "float16", rows, 64, 1024))
    assert counts.word_bytes == counts.word_unique
    assert counts.matrix_lines == counts.matrix_fewest_lines


@pytest.mark.alike("dtype")
@each_dtype
@each_format
def test_one_row_beside_qmv_fast(format: Format, dtype: str, rng: np.random.Generator):
    call = Call.draw(rng, GEMV, format, dtype, 1, 16, 1024)
    assert_reads_no_more(profile_ours(call), profile_mlx("qmv_fast", call, "false"))


@several_rows
def test_several_rows_beside_qmv_fast_and_qmv_wide(rows: int, rng: np.random.Generator):
    call = Call.draw(rng, GEMV, FOUR_BITS, "float16", rows, 16, 1024)
    ours, wide = profile_ours(call), profile_mlx("qmv_wide", call, *mlx_wide(rows))
    assert_reads_no_more(ours, profile_mlx("qmv_fast", call, "false"))
    # Lanes of qmv_wide have groups of their own, so that they do not load a scale together; but neither do they
    # together load anything else.
    assert 16 * ours.matrix_lines <= wide.matrix_lines
    assert 8 * ours.x_lines <= wide.x_lines


@each_dtype
def test_ragged_sizes_beside_qmv(dtype: str, rng: np.random.Generator):
    call = Call.draw(rng, GEMV, FOUR_BITS, dtype, 1, 29, 960)
    assert_reads_no_more(profile_ours(call), profile_mlx("qmv", call, "false"))


def test_swiglu_reads_x_once(rng: np.random.Generator):
    """A swiglu reads x as often as one product, although a SIMD group has half as many rows of each matrix."""
    call = Call.draw(rng, SWIGLU, FOUR_BITS, "float16", 1, 16, 1024)
    ours, mlx = profile_ours(call), profile_mlx("qmv_fast", call, "false")
    assert_reads_no_more(ours, mlx)
    assert 2 * ours.other_bytes <= mlx.other_bytes


@pytest.mark.slow
@each_rows
@pytest.mark.parametrize("bits", [3, 4, 5, 8])
def test_plain_product_beside_qvm(bits: int, rows: int, rng: np.random.Generator):
    call = Call.draw(rng, PLAIN, Format("affine", 64, bits), "float16", rows, 96, 1024)
    ours = profile_ours(call)
    for function, *arguments in (("qvm", "false"), ("qvm_split_k", 3)):
        mlx = profile_mlx(function, call, *arguments)
        assert ours.matrix_lines <= mlx.matrix_lines
        assert ours.x_lines <= mlx.x_lines


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 9, 32, 64])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_many_rows_beside_qmm_t(bits: int, rows: int, rng: np.random.Generator):
    """Weights do not pass through threadgroup memory, and x is there in 16 bits."""
    call = Call.draw(rng, TILES, Format("affine", 64, bits), "float16", rows, 128, 512)
    ours, mlx = profile_ours(call), profile_mlx("qmm_t", call, "true", "false")
    assert ours.matrix_bytes <= mlx.matrix_bytes
    assert ours.threadgroup_bytes <= 0.6 * mlx.threadgroup_bytes
    assert ours.barriers <= 0.6 * mlx.barriers
    assert ours.threadgroup_memory <= 8192 if rows <= 32 else ours.threadgroup_memory <= mlx.threadgroup_memory


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_many_rows_beside_qmm_n(bits: int, rng: np.random.Generator):
    call = Call.draw(rng, PLAIN, Format("affine", 64, bits), "float16", 64, 256, 512)
    ours, mlx = profile_ours(call), profile_mlx("qmm_n", call, "false")
    assert ours.threadgroup_bytes <= 0.6 * mlx.threadgroup_bytes
    assert ours.barriers <= 0.6 * mlx.barriers
    assert ours.threadgroup_memory <= mlx.threadgroup_memory


@pytest.mark.parametrize("rows", [(1, 2), (3, 8, 9, 16, 20, 32), (33, 64, 70)])
def test_bits_do_not_depend_on_the_number_of_rows(rows: tuple[int, ...], rng: np.random.Generator):
    """The bits are equal for 1 and 2 rows, for 3 to 32, and for any number above 32."""
    call = Call.draw(rng, TILES, FOUR_BITS, "float16", rows[-1], 40, 448)
    with mx.stream(mx.cpu), mlx_anvil.simulate():
        all_rows = np.array(evaluate(call))
        for some in rows[:-1]:
            for first in (0, rows[-1] - some):
                of_some = np.array(evaluate(replace(call, x=call.x[first : first + some])))
                np.testing.assert_array_equal(of_some, all_rows[first : first + some])


def test_too_many_weights_for_32_bit_offsets():
    """The reason is known without evaluating the call."""
    rows, columns = 1 << 22, 8192
    factors = mx.zeros((rows, columns // 64), mx.float16)
    with mx.stream(mx.cpu), mlx_anvil.simulate(), mlx_anvil.trace() as trace:
        mlx_anvil.quantized_gemv(
            mx.zeros((1, columns), mx.float16), mx.zeros((rows, columns // 8), mx.uint32), factors, factors
        )
    assert "fewer than 2^34 weights" in str(trace)


def test_parts_of_a_plain_product_are_few(rng: np.random.Generator):
    """Few rows of w are one part. For many, the parts take little memory traffic beside w."""
    few, many = (profile_ours(Call.draw(rng, PLAIN, FOUR_BITS, "float16", 1, rows, 1024)) for rows in (256, 512))
    assert few.other_bytes == 2 * 1024
    assert many.other_bytes == 2 * 1024 + 2 * (2 * 4 * 1024)
    assert many.other_bytes <= 0.1 * many.matrix_unique


@pytest.mark.slow
@pytest.mark.alike("dtype")
@each_dtype
@each_format
def test_instructions_for_each_weight(format: Format, dtype: str):
    """The inner loops have no more instructions than MLX's."""
    assert (
        our_instructions(GEMV, format, dtype, 1)["total"]
        <= mlx_instructions("qmv_fast", format, dtype, "false")["total"]
    )
    assert (
        our_instructions(PLAIN, format, dtype, 1)["total"] <= mlx_instructions("qvm", format, dtype, "false")["total"]
    )


@several_rows
def test_instructions_of_several_rows(rows: int):
    width, *others = mlx_wide(rows)
    wide = mlx_instructions("qmv_wide", FOUR_BITS, "float16", width, *others)["total"] * rows / width
    for product in PRODUCTS:
        assert our_instructions(product, FOUR_BITS, "float16", rows)["total"] <= wide


@pytest.mark.parametrize("rows", [1, 7, 20, 40])
@pytest.mark.parametrize("format", [FOUR_BITS, Format("affine", 32, 3), *FLOAT_FORMATS], ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_no_races(product: str, format: Format, rows: int, rng: np.random.Generator):
    """Three schedules with every access checked: no finding, and the same bits."""
    call = Call.draw(rng, product, format, "float16", rows, 45 if product != PLAIN else 300, 5 * 64)
    results = []
    for seed in range(3):
        with mx.stream(mx.cpu), mlx_anvil.simulate(checked=True, seed=seed):
            results.append(np.array(evaluate(call)))
    call.assert_close(results[0])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("transpose", [True, False], ids=["x W^T", "x W"])
@pytest.mark.parametrize("rows", [2, 9, 70])
@pytest.mark.parametrize("matrix_units", [False, True], ids=["", "matrix units"])
def test_sums_without_terms_are_zero(matrix_units, rows, transpose):
    """Each route: few rows, tiles or GEMM, tiles or a dense product."""
    outputs, columns = (40, 0) if transpose else (0, 128)
    matrix = mx.zeros((outputs, columns // 8), mx.uint32), *[mx.zeros((outputs, columns // 64), mx.float16)] * 2
    x = mx.zeros((rows, 0), mx.float16)
    with mx.stream(mx.cpu), mlx_anvil.simulate(checked=True, matrix_units=matrix_units):
        result = mlx_anvil.quantized_matmul(x, *matrix, transpose=transpose)
        mx.eval(result)
    assert result.shape == (rows, outputs if transpose else columns)
    assert not mx.any(result).item()
