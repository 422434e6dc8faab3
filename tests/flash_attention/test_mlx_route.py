"""Plain attention by MLX's own kernel, on Apple's GPUs with neural accelerators. The simulator presents itself as such a
GPU; MLX's CPU ops stand in for its Metal kernels."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import flash_attention
from support import OUTPUT_FACTOR, assert_same_bits, to_numpy
from tests.flash_attention.cases import Case, assert_close, draw
from tests.flash_attention.formulas import ROUNDING

pytestmark = pytest.mark.cpu_only

MLX = "mx.fast.scaled_dot_product_attention"
HALVES = (mx.float16, mx.bfloat16)


def attend(case: Case, chip: str = "M5", call=flash_attention, **more) -> tuple[mx.array, list[str]]:
    """The result on a chip, where nothing falls back, and the kernels that ran."""
    with mlx_anvil.simulate(chip=chip), mlx_anvil.strict(), mlx_anvil.trace() as trace:
        out = call(case.q, case.k, case.v, **case.options, **more)
        mx.eval(out)
    return out, trace.kernels


def assert_right(out: mx.array, case: Case) -> None:
    exact, composed = case.reference(), case.reference(round_to=ROUNDING[case.q.dtype])
    assert_close("out", out, exact.out, composed.out, OUTPUT_FACTOR)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("feature", ["none", "causal", "bool mask", "additive mask", "sinks"])
def test_what_mlx_takes(feature, dtype):
    case = draw((4, 2), (37, 75), (64, 64), dtype, feature, batch=2)
    if feature == "bool mask":  # a row without keys has its own test
        case.options["mask"][..., 3] = True
    out, kernels = attend(case)
    assert kernels == [MLX]
    assert_right(out, case)


@pytest.mark.parametrize("dim", [96, 128])
@pytest.mark.parametrize("chip", ["M5", "M5 Pro", "M5 Max"])
def test_head_dims(chip, dim):
    case = draw((2, 1), (9, 9), (dim, dim), mx.bfloat16, "causal")
    out, kernels = attend(case, chip)
    assert kernels == [MLX]
    assert_right(out, case)


def test_wide_heads_of_long_prompts():
    case = draw((1, 1), (1024, 1024), (256, 256), mx.float16, "causal")
    out, kernels = attend(case)
    assert kernels == [MLX]
    assert_right(out, case)


def test_trace_says_why():
    case = draw((1, 1), (9, 9), (64, 64), mx.float16)
    with mlx_anvil.simulate(chip="M5"), mlx_anvil.trace() as trace:
        mx.eval(flash_attention(case.q, case.k, case.v))
    (event,) = trace.events
    assert (event.op, event.kernel, event.device) == ("flash_attention", MLX, "simulator")
    assert event.reason == "MLX's kernel uses the GPU's neural accelerators"


@pytest.mark.parametrize(
    ("lengths", "dims", "dtype", "feature"),
    [
        ((8, 8), (64, 64), mx.float16, "causal"),  # few queries
        ((9, 9), (64, 64), mx.float32, "causal"),  # TF32 there
        ((9, 9), (80, 80), mx.float16, "causal"),
        ((9, 9), (64, 48), mx.float16, "causal"),
        ((9, 9), (256, 256), mx.float16, "causal"),
        ((10, 9), (64, 64), mx.float16, "causal"),  # its first row sees nothing
        ((9, 9), (64, 64), mx.float16, "window"),
        ((9, 9), (64, 64), mx.float16, "window+causal"),
        ((9, 9), (64, 64), mx.float16, "softcap"),
    ],
    ids=str,
)
def test_what_stays_ours(lengths, dims, dtype, feature):
    _, kernels = attend(draw((1, 1), lengths, dims, dtype, feature))
    assert kernels
    assert not any(name.startswith("mx.") for name in kernels)


@pytest.mark.parametrize(("window", "by_mlx"), [((8, 0), True), ((7, 0), False), ((8, 8), True), ((8, 7), False)])
def test_a_window_that_hides_nothing(window, by_mlx):
    case = draw((1, 1), (9, 9), (64, 64), mx.float16)
    case.options["window_size"] = window
    out, kernels = attend(case)
    assert (kernels == [MLX]) == by_mlx
    assert_right(out, case)


@pytest.mark.parametrize("chip", ["M1", "M2 Ultra", "M3 Pro", "M4 Max"])
def test_older_chips(chip):
    case = draw((1, 1), (9, 9), (64, 64), mx.float16, "causal")
    out, kernels = attend(case, chip)
    assert kernels
    assert not any(name.startswith("mx.") for name in kernels)
    assert_right(out, case)


def test_the_log_sum_exp_and_gradients_stay_ours():
    case = draw((2, 1), (12, 12), (64, 64), mx.float16, "causal")
    (_, lse), kernels = attend(case, return_lse=True)
    assert lse.shape == (1, 2, 12)
    assert MLX not in kernels
    with mlx_anvil.simulate(chip="M5"), mlx_anvil.strict(), mlx_anvil.trace() as trace:
        loss = mx.grad(lambda q: flash_attention(q, case.k, case.v, mask="causal").astype(mx.float32).sum())
        mx.eval(loss(case.q))
    assert MLX not in trace.kernels
    assert any("backward" in name for name in trace.kernels)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_that_see_nothing_are_zero(kind):
    case = draw((2, 2), (11, 13), (64, 64), mx.float16)
    visible = mx.random.bernoulli(0.5, (2, 11, 13))
    visible[..., 0] = True
    visible[1, 4] = False
    mask = visible if kind == "bool" else mx.where(visible, 0.0, -float("inf")).astype(mx.float16)
    case.options["mask"] = mask
    out, kernels = attend(case)
    assert kernels == [MLX]
    assert_right(out, case)
    assert (to_numpy(out)[0, 1, 4] == 0).all()
    assert (to_numpy(out)[0, 0, 4] != 0).any()


def test_transformations():
    """Shapeless compilation routes by the shapes of each call. Where a gradient or vmap may follow, the op is ours."""
    case = draw((2, 2), (12, 12), (64, 64), mx.float16, "causal")
    longer = draw((2, 2), (21, 30), (64, 64), mx.float16, "causal")
    few = draw((2, 2), (3, 30), (64, 64), mx.float16, "causal")
    routed, _ = attend(case)

    def causal(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return flash_attention(q, k, v, mask="causal")

    shapeless = mx.compile(causal, shapeless=True)
    for each, by_mlx in ((case, True), (longer, True), (few, False), (case, True)):
        out, kernels = attend(Case(each.q, each.k, each.v, each.d_out, {}), call=shapeless)
        assert (kernels == [MLX]) == by_mlx
        assert_right(out, each)
        if each is case:
            assert_same_bits(out, routed)
    compiled, kernels = attend(Case(case.q, case.k, case.v, case.d_out, {}), call=mx.compile(causal))
    assert MLX not in kernels
    assert_right(compiled, case)
    several = Case(*(mx.stack([x, x]) for x in (case.q, case.k, case.v)), case.d_out, {})
    mapped, kernels = attend(several, call=mx.vmap(causal))
    assert MLX not in kernels
    assert_right(mapped[1], case)


def test_strided_views(rng):
    """Transposed heads, as models pass them, and a mask of one row for all heads."""
    case = draw((3, 3), (10, 17), (64, 64), mx.bfloat16)
    case.q, case.k, case.v = (mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (case.q, case.k, case.v))
    case.options["mask"] = mx.array(np.arange(17) < 15).reshape(1, 1, 1, 17)
    out, kernels = attend(case)
    assert kernels == [MLX]
    assert_right(out, case)
