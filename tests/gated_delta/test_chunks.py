"""Tests of gated_delta's kernels that take chunks of 64 steps to matrix units, beside its definition."""

import mlx.core as mx
import pytest

import mlx_anvil
import support
from mlx_anvil.reference import DTYPES
from support import kernel_names, max_error, to_numpy
from tests.gated_delta.cases import (
    FLOAT32,
    Case,
    check_gradients,
    check_gradients_of_pairs,
    check_results,
    definition,
    draw,
)

pytestmark = pytest.mark.usefixtures("gpu_of_chunks")


@pytest.fixture
def gpu_of_chunks(request: pytest.FixtureRequest) -> None:
    """A GPU with matrix units for bfloat16, by itself or in groups of four SIMD groups, or with Apple's for float32."""
    request.getfixturevalue(getattr(request, "param", "checked_simulator"))


each_gpu = pytest.mark.parametrize(
    "gpu_of_chunks",
    ["checked_simulator", "gpu_with_matrix_units", "group_products"],
    ids=["apple", "nvidia", "hopper"],
    indirect=True,
)


each_gate = pytest.mark.parametrize("per_channel", [False, True], ids=["heads", "channels"])


def check(case: Case) -> None:
    with mlx_anvil.trace() as trace:
        check_results(case)
        check_gradients(case)
    kernels = [name for name in kernel_names(trace) if "_sum_" not in name]
    assert kernels
    assert all("_chunk_" in name for name in kernels)


@each_gpu
@each_gate
@pytest.mark.parametrize("steps", [17, 63, 64, 65, 130])
def test_steps(steps: int, per_channel: bool):
    check(draw(steps, (1, 2), (64, 40), mx.bfloat16, per_channel=per_channel))


@each_gate
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 1), (64, 64), (128, 65), (128, 128)], ids=str)
def test_dims(dims: tuple[int, int], dtype: mx.Dtype, per_channel: bool):
    check(draw(70, (1, 1), dims, dtype, per_channel=per_channel))


@each_gpu
@each_gate
@pytest.mark.parametrize(
    "options", [{}, {"with_state": False}, {"normalize_eps": 1e-6}, {"gates": mx.bfloat16}], ids=str
)
def test_options(options: dict[str, object], per_channel: bool):
    check(draw(66, (2, 6), (64, 16), mx.bfloat16, batch=2, per_channel=per_channel, **options))


@each_gpu
@each_gate
@pytest.mark.parametrize("lengths", [[0, 70], [1, 64], [65, 63]], ids=str)
def test_padding(lengths: list[int], per_channel: bool):
    """Nothing is read of steps that are padding."""
    options = {"normalize_eps": 0.0, "lengths": mx.array(lengths)}
    case = draw(70, (1, 2), (64, 24), mx.bfloat16, batch=2, per_channel=per_channel, **options)
    check(case)
    padding = mx.arange(70)[None] >= case.options["lengths"][:, None]
    spoilt = [mx.where(padding.reshape(2, 70, *(1,) * (x.ndim - 2)), mx.nan, x) for x in case.arrays[:5]]
    for a, b in zip(case.run(*spoilt, case.state), case.run(), strict=True):
        assert mx.array_equal(a, b)


@each_gpu
@each_gate
@pytest.mark.parametrize("factor", [0.0, -1.0, 1e-30, 1.0])
def test_decays(factor: float, per_channel: bool):
    """Nothing is divided by decays, and products of decays do not cancel."""
    case = draw(70, (1, 1), (64, 8), mx.bfloat16, per_channel=per_channel)
    steps = mx.arange(70).reshape(1, 70, *(1,) * (case.g.ndim - 2))
    shift = mx.arange(64) if per_channel else 0  # so that each channel loses others
    case.g = mx.where((steps + shift) % 5 == 2, factor, case.g)
    check(case)


@pytest.mark.parametrize("gate", range(64, 130, 9))
def test_every_gate(gate: int):
    """The gradient of one step's decay, between chunks and blocks of steps, by differences."""
    case = draw(130, (1, 1), (64, 4), per_channel=True)
    channel = gate % 64
    at = (0, gate, 0, channel)
    gradient = mx.grad(lambda g: (case.run(case.q, case.k, case.v, g, case.beta, case.state)[0] * case.v).sum())
    value = to_numpy(gradient(case.g))[at]

    def loss(step: float) -> float:
        moved = [to_numpy(x) for x in case.arrays]
        moved[3][at] += step
        return float((definition(*moved)[0] * to_numpy(case.v)).sum())

    slope = (loss(1e-4) - loss(-1e-4)) / 2e-4
    assert abs(value - slope) <= 1e-4 * max(1.0, abs(slope))


@each_gate
def test_rates(per_channel: bool):
    """Rates of 0 and 2, and equal keys: a system whose inverse has large elements that cancel."""
    case = draw(64, (1, 1), (64, 8), per_channel=per_channel)
    case.k = mx.broadcast_to(case.k[:, :1], case.k.shape)
    case.k = case.k / mx.linalg.norm(case.k, axis=-1, keepdims=True)
    case.g = mx.ones_like(case.g)
    case.beta = 2.0 * (mx.arange(64) % 2).astype(mx.float32)[None, :, None]
    check_results(case, slack=20)
    check_gradients(case, slack=20)


@each_gate
@pytest.mark.parametrize("offset", [1, 4])
def test_rows_at_any_address(offset: int, per_channel: bool):
    """Rows of q, k, v and decays that do not start at vectors."""
    case = draw(66, (1, 2), (64, 24), mx.float32, per_channel=per_channel)
    wide = [mx.pad(x, [(0, 0)] * 3 + [(offset, 3)])[..., offset:-3] for x in (case.q, case.k, case.v)]
    if per_channel:
        wide.append(mx.pad(case.g, [(0, 0)] * 3 + [(offset, 3)])[..., offset:-3])
    mx.eval(wide)
    moved = Case(*wide, *case.arrays[len(wide) :])
    check(moved)
    for a, b in zip(moved.run(), case.run(), strict=True):
        assert max_error(a, b) <= FLOAT32


def test_calls_that_take_steps():
    for case in (
        draw(16, dims=(64, 8)),
        draw(20, dims=(64, 8), return_states=[3]),
        draw(20, dims=(80, 8)),
    ):
        with mlx_anvil.trace() as trace:
            check_results(case)
        names = kernel_names(trace)
        assert names
        assert not any("_chunk_" in name for name in names)


def test_state_at_any_address():
    """A state that does not start at a vector is taken by steps."""
    case = draw(20, (1, 1), (64, 8))
    flat = mx.concatenate([mx.zeros(1), case.state.flatten()])
    mx.eval(flat)
    case.state = flat[1:].reshape(case.state.shape)
    with mlx_anvil.trace() as trace:
        check_results(case)
    names = kernel_names(trace)
    assert names
    assert not any("_chunk_" in name for name in names)


@each_gate
@pytest.mark.parametrize("dims", [(128, 72), (64, 136)], ids=str)
@pytest.mark.parametrize("gpu_of_chunks", ["gpu_with_matrix_units", "group_products"], indirect=True)
def test_pairs(dims: tuple[int, int], per_channel: bool, request: pytest.FixtureRequest):
    with mlx_anvil.trace() as trace:
        check(draw(130, (1, 2), dims, mx.bfloat16, per_channel=per_channel))
    names = [name for name in kernel_names(trace) if "_chunk_forward_" in name]
    assert names
    # A GPU chooses by what it has.
    by_groups = "group_products" in request.node.name or (support.backend == "cuda" and "_group_" in names[0])
    assert all(("_group_" if by_groups else "_pairs_") in name for name in names)


@each_gate
@pytest.mark.parametrize("normalize_eps", [None, 1e-6])
@pytest.mark.parametrize("gpu_of_chunks", ["gpu_with_matrix_units", "group_products"], indirect=True)
def test_gradients_of_pairs(normalize_eps: float | None, per_channel: bool):
    case = draw(330, (1, 2), (64, 64), mx.bfloat16, per_channel=per_channel, normalize_eps=normalize_eps)
    check_gradients_of_pairs(case.run, case.arrays)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("gpu_of_chunks", ["gpu_with_matrix_units"], indirect=True)
def test_pieces(with_state: bool):
    """A GPU with idle multiprocessors prepares a piece of the sequence while it walks along the one before."""
    lengths = mx.array([2100, 900])
    case = draw(2100, (1, 1), (64, 8), mx.bfloat16, batch=2, per_channel=True, with_state=with_state)
    case.options["lengths"] = lengths
    with mlx_anvil.trace() as trace:
        check_results(case)
    names = kernel_names(trace)
    assert sum("_chunk_forward_" in name for name in names) == 2
    assert sum("_chunk_prepare_" in name for name in names) == 2


@pytest.mark.parametrize("gpu_of_chunks", ["group_products"], indirect=True)
def test_heads_of_a_part():
    """With many chunks a threadgroup adds up the gradients of several value heads."""
    lengths = mx.array([576, 130, 0, 64])
    case = draw(576, (4, 16), (64, 8), mx.bfloat16, batch=4, normalize_eps=1e-6, lengths=lengths)
    check_gradients_of_pairs(case.run, case.arrays)


@each_gate
def test_padding_of_an_infinite_state(per_channel: bool):
    case = draw(20, (1, 1), (64, 8), per_channel=per_channel, lengths=mx.array([17]))
    case.state = mx.full(case.state.shape, mx.inf)
    assert not case.run()[0][:, 17:].any()


@each_gate
def test_long_sequence_as_steps(per_channel: bool):
    case = draw(257, (1, 1), (64, 16), per_channel=per_channel, normalize_eps=1e-6)
    pieces, state = [], case.state
    for first in range(0, 257, 16):
        y, state = mlx_anvil.gated_delta(
            *(x[:, first : first + 16] for x in case.arrays[:5]), state, normalize_eps=1e-6
        )
        pieces.append(y)
    whole, last = case.run()
    assert max_error(mx.concatenate(pieces, axis=1), whole) <= FLOAT32
    assert max_error(state, last) <= FLOAT32
