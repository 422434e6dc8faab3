"""Ring attention in 1 to 4 processes, compared with attention of the whole sequence by one."""

import mlx.core as mx
import pytest
import ring_programs
import ring_transforms
from ring_programs import Case

from mlx_anvil.distributed import _local, ring_attention
from support import FLOAT32_TOLERANCE, GRADIENT_FACTOR, OUTPUT_FACTOR

pytestmark = pytest.mark.cpu_only

TOLERANCE = 2 * FLOAT32_TOLERANCE  # of attention
FLOOR = 1e-5
SECONDS = 300  # with sanitizers, on two cores
CAUSAL = {"mask": "causal"}
ZIGZAG = {"mask": "causal", "layout": "zigzag"}
SHORT = [
    Case(),
    Case(options=CAUSAL),
    Case(options=ZIGZAG, heads=(6, 2)),
    Case(part=1),
    Case(part=0),
    Case(options={"layout": "zigzag", "window_size": (7, 3)}),
    Case(options={"mask": "causal", "window_size": 9}),
    Case(options={"mask": "causal", "window_size": 1}),
    Case(options={"mask": "causal", "softcap": 2.0, "scale": 0.3}, sinks=True, dims=(24, 40), part=23),
    Case(batch=3, lengths=(20, 5, 13), options=CAUSAL, sinks=True),
    Case(batch=2, lengths=(17, 0), options={"layout": "zigzag"}, part=22),
    Case(batch=2, lengths=(17, 24), options=ZIGZAG, sinks=True),
    Case(batch=2, lengths=(30, 9), options={"window_size": (5, 2)}),
    Case(dtype="bfloat16", options=CAUSAL),
    Case(dtype="float16", options=ZIGZAG),
]
# A part is cut into pieces of at least 512 rows, with zig-zag 1024.
LONG = [
    Case(part=1537, heads=(2, 1), options=CAUSAL),
    Case(part=3074, heads=(2, 2), options=ZIGZAG),
    Case(part=1100, heads=(2, 1), options={"window_size": (700, 10)}, dtype="bfloat16"),
    Case(part=1100, heads=(2, 1), batch=2, lengths=(1500, 600), options={"mask": "causal", "window_size": 700}),
]


def assert_accurate(cases: list[Case], found: list[list[dict[str, tuple[float, float]]]]) -> None:
    """``found`` is what each rank returned."""
    for i, case in enumerate(cases):
        for name in found[0][i]:
            ours = max(of_rank[i][name][0] for of_rank in found)
            peer = max(of_rank[i][name][1] for of_rank in found)
            factor = GRADIENT_FACTOR if name.startswith("d_") else OUTPUT_FACTOR
            limit = TOLERANCE if case.dtype == "float32" else factor * peer + FLOOR
            assert ours <= limit, f"{name} of {case}: {ours:.2g}, and {peer:.2g} by one process"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_results_and_gradients(count, seed):
    cases = SHORT + LONG if count <= 2 else SHORT
    assert_accurate(cases, _local.results(ring_programs.errors, count, cases, seed, seconds=SECONDS))


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_long_parts(count, seed):
    assert_accurate(LONG, _local.results(ring_programs.errors, count, LONG, seed, seconds=SECONDS))


@pytest.mark.parametrize("count", [2, 3])
def test_metal_kernels_in_the_simulator(count, seed):
    """GPUs run it as a graph of attention nodes and exchanges."""
    cases = [case for case in SHORT if case.dtype == "float32"][: 9 if count == 3 else None]
    assert_accurate(cases, _local.results(ring_programs.errors, count, cases, seed, True))


@pytest.mark.parametrize("simulated", [False, True], ids=["cpu", "simulator"])
@pytest.mark.parametrize(
    ("layout", "options"),
    [("contiguous", CAUSAL), ("zigzag", {"mask": "causal", "softcap": 3.0}), ("contiguous", {"window_size": 5})],
)
def test_transforms(layout, options, simulated, seed):
    for deviations in _local.results(ring_transforms.deviations, 3, seed, layout, options, simulated):
        assert len(deviations) > 20
        wrong = {name: error for name, error in deviations.items() if not error <= TOLERANCE}
        assert not wrong


def test_memory_is_that_of_a_part(seed):
    """Beside a rank's own arrays: two pieces of keys and values, and of their gradients, of 8 in a part."""
    for peak, own in _local.results(ring_programs.outputs_alone, 2, seed, 8192):
        assert peak <= 1.2 * own, (peak, own)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ([{}, {"length": 9}], "the length differs, "),
        ([{}, {"head_dim": 8}], "the head_dim differs, "),
        ([{"mask": "causal"}, {}], "mask or window_size (right) differs; "),
        ([{}, {"dtype": "bfloat16"}], "the dtype differs; "),
        ([{"layout": "zigzag"}, {}], "the layout differs; "),
    ],
)
def test_unlike_calls_are_found(options, what):
    for rank, error in enumerate(_local.results(ring_programs.unlike_calls, 2, options)):
        assert error.startswith(f"[ring_attention] rank {rank} and rank {1 - rank} do not make the same call: {what}")


def test_a_lost_neighbour_is_named():
    ended = _local.run(ring_programs.killed_neighbour, 3, 2, seconds=60)
    assert ended[2].status == -9
    for rank in (0, 1):
        first, second = ended[rank].result.splitlines()
        assert first.startswith(f"[ring_attention] rank {rank} ")
        assert "connection to a peer was lost" in first
        assert second == ("[ring_attention] an earlier transfer of this process failed; start all ranks again.")
    # The other one may end first, and then be the lost neighbour of this one.
    assert any("rank 2: " in ended[rank].result for rank in (0, 1))


X = mx.zeros((1, 2, 8, 16))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"k": mx.zeros((1, 2, 9, 16)), "v": mx.zeros((1, 2, 9, 16))}, ValueError, "the same length"),
        ({"k": mx.zeros((1, 3, 8, 16)), "v": mx.zeros((1, 3, 8, 16))}, ValueError, "heads of q a multiple"),
        ({"q": X.astype(mx.int32)}, ValueError, "q has dtype int32"),
        ({"q": None}, TypeError, "q is a NoneType"),
        ({"mask": "full"}, ValueError, "mask is 'full'"),
        ({"mask": mx.ones((8, 8), mx.bool_)}, TypeError, "mask is a mlx.core.array; allowed: None, 'causal'"),
        ({"layout": "striped"}, ValueError, "layout is 'striped'; allowed: 'contiguous', 'zigzag'"),
        ({"layout": None}, TypeError, "layout is a NoneType"),
        ({"group": 3}, TypeError, "group is a int"),
        ({"window_size": (1, 2, 3)}, ValueError, "window_size has 3 entries"),
        ({"window_size": (-2, 0)}, ValueError, "window_size has -2 on the left"),
        ({"softcap": -1.0}, ValueError, "softcap is -1"),
        ({"lengths": mx.array([1, 2])}, ValueError, "lengths has shape (2,)"),
        ({"lengths": mx.array([1.0])}, ValueError, "lengths has dtype float32"),
        ({"lengths": mx.array([9])}, ValueError, "lengths has 9; allowed: 0 to 8"),
        ({"sinks": mx.zeros((3,))}, ValueError, "sinks has shape (3,)"),
        ({"return_lse": 1}, TypeError, "return_lse is a int"),
    ],
)
def test_errors(change, error, text):
    arguments = {"q": X, "k": X, "v": X} | change
    with pytest.raises(error) as raised:
        ring_attention(**arguments)
    assert str(raised.value).startswith("[ring_attention] ")
    assert text in str(raised.value)


def test_an_odd_part_has_no_two_chunks():
    x = mx.zeros((1, 2, 7, 16))
    with pytest.raises(ValueError, match="allowed with layout='zigzag': an even length"):
        ring_attention(x, x, x, layout="zigzag")
