"""Memory of quantized_experts for a prompt: no array of tokens x experts, and little beyond what the formula names."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

import mlx_anvil
from support import Arrays

pytestmark = pytest.mark.cpu_only

TOKENS, DIMS, HIDDEN, EXPERTS, K = 2048, 256, 128, 32, 8
DTYPES = (mx.float32, mx.bfloat16)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def call_of(dtype: mx.Dtype) -> tuple[Callable[..., mx.array], Arrays]:
    """The op as a function of x, weights, and a shared expert with its gate."""
    shapes = (EXPERTS, HIDDEN, DIMS), (EXPERTS, HIDDEN, DIMS), (EXPERTS, DIMS, HIDDEN)
    experts = [mx.quantize((mx.random.normal(shape) / 16).astype(dtype)) for shape in shapes]
    ids = mx.argsort(mx.random.uniform(shape=(TOKENS, EXPERTS)), axis=-1)[:, :K]
    arrays = [mx.random.normal((TOKENS, size)).astype(dtype) for size in (DIMS, K, DIMS, 1)]
    mx.eval(experts, ids, arrays)

    def call(x: mx.array, weights: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
        return mlx_anvil.quantized_experts(x, ids, weights, *experts, shared=shared, shared_gate=gate)

    return call, arrays


def peak_of(function: Callable[[], object]) -> int:
    """What an evaluation needs beyond its inputs."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function())
    mx.synchronize()
    return mx.get_peak_memory() - before


def sizes(dtype: mx.Dtype) -> tuple[int, int, int]:
    """Bytes of an array like x, of the experts' hidden rows, and of their results."""
    return TOKENS * DIMS * dtype.size, TOKENS * K * HIDDEN * dtype.size, TOKENS * K * DIMS * dtype.size


@pytest.fixture
def one_op_at_a_time() -> Iterator[None]:
    """Above the memory limit, MLX waits for an op before it allocates for the next. Else it is up to ten ops ahead."""
    limit = mx.set_memory_limit(1)
    yield
    mx.set_memory_limit(limit)


@each_dtype
def test_forward(dtype):
    """Also where MLX allocates ahead. Without the shared expert in the call, its sum would be another array."""
    call, arrays = call_of(dtype)
    like_x, hidden, rows = sizes(dtype)
    assert peak_of(lambda: call(*arrays)) <= 1.2 * (hidden + rows + like_x)


def peak_of_gradient(dtype: mx.Dtype) -> int:
    call, arrays = call_of(dtype)
    cotangent = mx.random.normal((TOKENS, DIMS)).astype(dtype)
    mx.eval(cotangent)
    return peak_of(lambda: mx.vjp(call, arrays, [cotangent])[1])


@each_dtype
@pytest.mark.usefixtures("one_op_at_a_time")
def test_gradient(dtype):
    """Beyond the gradients: the rows and their gradient, and two of hidden rows, gate, up and their gradients. The next
    op may allocate its rows before MLX frees those of the last."""
    like_x, hidden, rows = sizes(dtype)
    assert peak_of_gradient(dtype) <= 1.2 * (2 * hidden + 3 * rows + 2 * like_x)


@each_dtype
def test_gradient_where_mlx_allocates_ahead(dtype):
    """Then nothing is freed in time: every array of the gradient's graph counts once."""
    like_x, hidden, rows = sizes(dtype)
    # Rows, their gradient, and those of x for gate and up; hidden rows and their gradient, gate and up, and theirs.
    assert peak_of_gradient(dtype) <= 1.05 * (4 * rows + 6 * hidden + 5 * like_x)
