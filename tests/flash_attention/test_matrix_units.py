"""flash_attention on GPUs with matrix units. The checked simulator runs their kernels."""

import mlx.core as mx
import pytest

import mlx_anvil
from tests.flash_attention.cases import FEATURES, check, draw

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.slow,
    pytest.mark.alike("dtype"),
    pytest.mark.usefixtures("matrix_units"),
]

each_dtype = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])


def check_traced(case, kernels: set[str]) -> None:
    """Checks the results, and that exactly these kernels for matrix units ran."""
    with mlx_anvil.trace() as trace:
        check(case)
    passes = {kernel.split("_float16")[0].split("_bfloat16")[0] for kernel in trace.kernels}
    assert passes - {"flash_attention_delta", "flash_attention_d_sinks"} == kernels


ALL_PASSES = {
    "flash_attention_forward_matrix",
    "flash_attention_backward_dq_matrix",
    "flash_attention_backward_dkv_matrix",
}
LONG_PASSES = {
    "flash_attention_forward_matrix_long",
    "flash_attention_backward_dq_matrix",
    "flash_attention_backward_dkv_matrix_long",
}


@each_dtype
@pytest.mark.parametrize("dims", [(32, 32), (40, 64), (64, 48), (80, 96), (128, 128), (128, 72)], ids=str)
def test_head_dims(dims, dtype):
    # Queries and keys: ragged blocks of every tile's rows; more keys than queries.
    check_traced(draw((2, 1), (37, 75), dims, dtype, "causal"), LONG_PASSES if max(dims) > 96 else ALL_PASSES)


@each_dtype
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, dtype):
    check_traced(draw((4, 2), (70, 70), (64, 64), dtype, feature, batch=2), ALL_PASSES)


@pytest.mark.parametrize("feature", ["none", "window+causal"])
def test_blocks_of_the_largest_tile(feature):
    check_traced(draw((1, 1), (130, 131), (128, 128), mx.float16, feature), LONG_PASSES)


@each_dtype
def test_tall_tiles(dtype):
    """Taken where one round of them replaces two of long ones: 133 blocks, not 266, on 132 multiprocessors."""
    tall = LONG_PASSES - {"flash_attention_forward_matrix_long"} | {"flash_attention_forward_matrix_tall"}
    case = draw((133, 1), (70, 37), (128, 128), dtype, "sinks")
    check_traced(case, tall)
    check_traced(draw((132, 1), (70, 37), (128, 128), dtype, "sinks"), LONG_PASSES)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
@pytest.mark.parametrize("feature", ["none", "bool+causal"])
def test_factors_of_scores(scale, feature):
    """exp2's argument is one fma, for which a negative factor changes the products' signs."""
    q, k, v = (mx.random.normal((1, 2, 37, 64)).astype(mx.float16) for _ in range(3))
    mask = mx.random.uniform(shape=(37, 37)) < 0.7 if "bool" in feature else None
    found = mlx_anvil.flash_attention(q, k, v, scale=scale, mask=mask)
    scores = scale * (q.astype(mx.float32) @ k.astype(mx.float32).swapaxes(-1, -2))
    if mask is not None:
        scores = mx.where(mask, scores, -float("inf"))
    expected = mx.softmax(scores, axis=-1) @ v.astype(mx.float32)
    assert mx.abs(found.astype(mx.float32) - expected).max().item() < 4e-3


@each_dtype
def test_elements_one_by_one(dtype):
    """Rows that are not whole vectors, and columns that are not adjacent."""
    case = draw((2, 2), (33, 34), (66, 66), dtype)
    case.q, case.k, case.v = (x[..., ::2] for x in (case.q, case.k, case.v))
    case.d_out = case.d_out[..., :33]
    check_traced(case, ALL_PASSES)


def test_wider_heads_and_float32_have_no_such_tiles():
    for dims, dtype in (((136, 136), mx.float16), ((64, 64), mx.float32)):
        with mlx_anvil.trace() as trace:
            check(draw((1, 1), (17, 17), dims, dtype))
        assert not any("_matrix_" in kernel for kernel in trace.kernels)
