"""RoPE's kernels as NVIDIA GPUs launch them: two heads per thread, packs that are read ahead, shared angles."""

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil import reference, rope, rope_qk
from mlx_anvil._kernel_files import parse_key
from support import assert_accurate

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("matrix_units")]

READS_AHEAD = 4


def of_both(q: mx.array, k: mx.array, dims: int, **arguments: object) -> list[mx.array]:
    return [reference.rope(x, dims, **arguments) for x in (q, k)]


def normal(*shape: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dims", [64, 32])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("offset", [3, mx.array([5, 2])], ids=["offset", "offsets"])
def test_rotations(dtype, dims, traditional, offset):
    arguments = {"traditional": traditional, "base": 1e4, "offset": offset}
    arrays = [normal(2, 5, 3, 64, dtype=dtype), normal(2, 2, 3, 64, dtype=dtype)]
    assert_accurate(lambda x: rope(x, dims, **arguments), lambda x: reference.rope(x, dims, **arguments), arrays[:1])
    assert_accurate(
        lambda q, k: rope_qk(q, k, dims, **arguments), lambda q, k: of_both(q, k, dims, **arguments), arrays
    )


def kernel_of(ours: object, arrays: list[mx.array], dims: int, **arguments: object) -> tuple[str, dict[int, bool]]:
    with mlx_anvil.trace() as trace:
        mx.eval(ours(*arrays, dims, **arguments))
    return parse_key(trace.events[0].kernel)


@pytest.mark.parametrize("heads", [(17, 0), (16, 5)], ids=["one", "both"])
def test_two_heads_per_thread(heads):
    """Enough work for two heads per thread; the last thread has one head, and a thread can have one head of each
    tensor."""
    arrays = [normal(1, n, 900, 80) for n in heads if n]
    ours, definition = ((rope, reference.rope), (rope_qk, of_both))[len(arrays) - 1]
    given = {"traditional": False, "base": 1e4, "offset": 7}
    name, constants = kernel_of(ours, arrays, 80, **given)
    assert "shared" not in name
    assert constants[READS_AHEAD]
    assert_accurate(lambda *x: ours(*x, 80, **given), lambda *x: definition(*x, 80, **given), arrays)


@pytest.mark.slow
@pytest.mark.alike("dtype")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("frequencies", ["base", "freqs"])
@pytest.mark.parametrize("dims", [64, 128, 256])
@pytest.mark.parametrize(("batch", "heads"), [(1, (23, 0)), (2, (9, 5))], ids=["one", "both"])
def test_shared_angles(batch, heads, dims, frequencies, traditional, dtype):
    """Many rows: the threads of a threadgroup share angles. The last blocks of positions and heads are not full."""
    length = 65536 // dims + 3
    arrays = [normal(batch, n, length, dims, dtype=dtype) for n in heads if n]
    ours, definition = ((rope, reference.rope), (rope_qk, of_both))[len(arrays) - 1]
    given = {"traditional": traditional, "base": 1e4, "offset": 7 if batch == 1 else mx.array([5, 900])}
    if frequencies == "freqs":
        given |= {"base": None, "freqs": mx.random.uniform(1, 1000, (dims // 2,))}
    name, _ = kernel_of(ours, arrays, dims, **given)
    assert name.startswith("rope_shared_")
    assert_accurate(lambda *x: ours(*x, dims, **given), lambda *x: definition(*x, dims, **given), arrays)


def test_strided_heads_share_angles():
    x = normal(1, 1100, 40, 64).swapaxes(1, 2)[:, 1::2]
    given = {"traditional": False, "base": 1e4, "offset": 0}
    name, _ = kernel_of(rope, [x], 64, **given)
    assert name.startswith("rope_shared_one")
    assert_accurate(lambda x: rope(x, 64, **given), lambda x: reference.rope(x, 64, **given), [x])
