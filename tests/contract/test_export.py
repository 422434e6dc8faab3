"""mx.export_function over every op of the registry: inside composed() the file needs nothing but MLX, outside it is
refused."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil.reference import OPS, OpSpec
from support import FLOAT32_TOLERANCE, OTHER_KERNEL, Arrays, as_list, max_error, to_numpy

each_op = pytest.mark.parametrize("spec", OPS.values(), ids=OPS.keys())
# MLX's ops in these graphs infer no shapes; importing says so.
FIXED_SHAPES = (
    "causal_conv1d",
    "gated_delta",
    "kv_append",
    "moe_",
    "quantized_experts",
    "rope",
    "selective_scan",
    "softmax_topk",
    "ssd_scan",
)


def draw(spec: OpSpec, shape: tuple[int, ...]) -> Arrays:
    arrays = spec.make_inputs(shape, mx.float32)
    mx.eval(arrays)
    return arrays


def gradient_of(spec: OpSpec) -> Callable[..., Arrays]:
    count = len(spec.arguments)
    gradient = mx.grad(lambda *xs: (spec.function(*xs) ** 2).sum(), argnums=list(range(count)))
    return lambda *xs: as_list(gradient(*xs))


def export(path: Path, function: Callable[..., object], arrays: Arrays, shapeless: bool = False) -> None:
    with mlx_anvil.composed():
        mx.export_function(str(path), function, *arrays, shapeless=shapeless)


def assert_close(ours: Arrays, expected: Arrays) -> None:
    assert len(ours) == len(expected)
    # On NVIDIA GPUs a product of ours is the sum of three.
    tolerance = FLOAT32_TOLERANCE if support.backend == "cuda" else OTHER_KERNEL
    for a, b in zip(ours, expected, strict=True):
        assert max_error(a, b) <= tolerance


@each_op
@pytest.mark.parametrize("of", ["op", "gradient"])
def test_imported_function_gives_the_same(spec: OpSpec, of: str, tmp_path: Path):
    function = spec.function if of == "op" else gradient_of(spec)
    for number, shape in enumerate(spec.contract_shapes[-2:]):
        arrays = draw(spec, shape)
        path = tmp_path / f"{number}.mlxfn"
        export(path, function, arrays)
        other = draw(spec, shape)
        assert_close(list(mx.import_function(str(path))(*other)), as_list(function(*other)))


@each_op
@pytest.mark.parametrize("of", ["op", "gradient"])
def test_imported_shapeless_function_gives_the_same_or_says_why_not(spec: OpSpec, of: str, tmp_path: Path):
    if of == "gradient" and spec.scattered_gradients:
        pytest.skip("MLX's scatter infers no shapes")
    function = spec.function if of == "op" else gradient_of(spec)
    path = tmp_path / "shapeless.mlxfn"
    export(path, function, draw(spec, spec.contract_shapes[-1]), shapeless=True)
    imported = mx.import_function(str(path))
    for shape in spec.contract_shapes[-2:]:
        arrays = draw(spec, shape)
        try:
            results = list(imported(*arrays))
        except ValueError:
            if not spec.id.startswith(FIXED_SHAPES):
                raise
        else:
            assert_close(results, as_list(function(*arrays)))


@each_op
@pytest.mark.parametrize("of", ["op", "gradient"])
@pytest.mark.parametrize("shapeless", [False, True])
def test_without_composed_it_is_refused(spec: OpSpec, of: str, shapeless: bool, tmp_path: Path):
    """Importing the file that MLX has begun to write fails too. Some gradients copy an operand first."""
    function = spec.function if of == "op" else gradient_of(spec)
    path = str(tmp_path / "refused.mlxfn")
    arrays = draw(spec, spec.contract_shapes[-1])
    ours = r"mlx_anvil\.\w+\(export_it_inside_mlx_anvil\.composed\(\)\)"
    refused = ours if of == "op" else f"({ours}|Contiguous)"
    with pytest.raises(ValueError, match=rf"^\[export_function\] Unable to serialize primitive {refused}$"):
        mx.export_function(path, function, *arrays, shapeless=shapeless)
    with pytest.raises((ValueError, RuntimeError)):
        mx.import_function(path)


# It leaves without MLX's destructors: those of the threads that read files abort now and then on a busy machine
# (0.32.4).
IN_MLX_ALONE = """
import os, sys
import mlx.core as mx
inputs = mx.load(sys.argv[2])
results = mx.import_function(sys.argv[1])(*(inputs[str(i)] for i in range(len(inputs))))
mx.savez(sys.argv[3], **{str(i): x for i, x in enumerate(results)})
assert not any(name.startswith("mlx_anvil") for name in sys.modules)
os._exit(0)
"""


def test_files_need_mlx_alone(tmp_path: Path):
    """One function calls all ops, so one process suffices."""
    drawn = [draw(spec, spec.contract_shapes[-1]) for spec in OPS.values()]
    arrays = [x for xs in drawn for x in xs]

    def all_ops(*given: mx.array) -> Arrays:
        rest = iter(given)
        return [spec.function(*(next(rest) for _ in xs)) for spec, xs in zip(OPS.values(), drawn, strict=True)]

    export(tmp_path / "all.mlxfn", all_ops, arrays)
    mx.savez(str(tmp_path / "in.npz"), **{str(i): x for i, x in enumerate(arrays)})
    paths = [str(tmp_path / name) for name in ("all.mlxfn", "in.npz", "out.npz")]
    subprocess.run([sys.executable, "-c", IN_MLX_ALONE, *paths], check=True)
    with np.load(paths[2]) as results:
        imported = [mx.array(results[str(i)]) for i in range(len(results))]
    assert_close(imported, all_ops(*arrays))


def test_exporter_of_several_traces(tmp_path: Path):
    path = str(tmp_path / "several.mlxfn")
    shapes = [(3, 5), (2, 7)]
    with mlx_anvil.composed(), mx.exporter(path, mlx_anvil.silu_gate) as exporter:
        for shape in shapes:
            exporter(mx.ones(shape), mx.ones(shape))
    imported = mx.import_function(path)
    for shape in shapes:
        gate, up = mx.random.normal(shape), mx.random.normal(shape)
        assert_close(list(imported(gate, up)), [mlx_anvil.silu_gate(gate, up)])


def test_a_module_with_its_weights(tmp_path: Path):
    module = mlx_anvil.nn.SwiGLU(16, 24)
    path = str(tmp_path / "module.mlxfn")
    x = mx.random.normal((3, 16))
    export(Path(path), module, [x])
    assert_close(list(mx.import_function(path)(x)), [module(x)])


def test_composed_is_a_fallback_to_trace_and_strict():
    x = mx.ones((2, 4))
    with mlx_anvil.composed(), mlx_anvil.trace() as trace:
        mx.eval(mlx_anvil.rms_norm(x))
    assert trace.kernels == []
    assert [event.reason for event in trace.fallbacks] == ["inside composed() every op is a graph of MLX ops"]
    with mlx_anvil.composed(), mlx_anvil.strict(), pytest.raises(RuntimeError, match=r"^\[rms_norm\] strict\(\)"):
        mlx_anvil.rms_norm(x)
    with mlx_anvil.trace() as trace:
        mx.eval(mlx_anvil.rms_norm(x))
    assert len(trace.kernels) == 1


@pytest.mark.parametrize("options", [{"mask": "causal"}, {"window_size": (2, 1)}, {"mask": "causal", "window_size": 3}])
def test_a_band_is_that_of_the_shapes(options: dict[str, object], tmp_path: Path):
    """The band of one query would broadcast with any scores. One key crashes MLX 0.32.4, which then reduces an axis of
    length 1."""

    def attention(q: mx.array, k: mx.array) -> mx.array:
        return mlx_anvil.flash_attention(q, k, k, **options)

    def drawn(q_len: int, k_len: int) -> Arrays:
        return [mx.random.normal((1, 2, length, 8)) for length in (q_len, k_len)]

    export(tmp_path / "band.mlxfn", attention, drawn(1, 2), shapeless=True)
    imported = mx.import_function(str(tmp_path / "band.mlxfn"))
    for lengths in [(1, 2), (2, 2), (1, 9), (5, 9), (7, 7)]:
        arrays = drawn(*lengths)
        assert_close(list(imported(*arrays)), [attention(*arrays)])


@pytest.mark.parametrize("op", ["silu_gate", "rms_norm"])
def test_arrays_of_many_axes(op: str, tmp_path: Path):
    """The kernels need a dense copy of such arrays, which MLX does not export."""
    function = getattr(mlx_anvil, op)
    given = [mx.random.normal((2,) * 12)[..., ::-1], mx.random.normal((2,) * (12 if op == "silu_gate" else 1))]
    export(tmp_path / "deep.mlxfn", function, given)
    assert_close(list(mx.import_function(str(tmp_path / "deep.mlxfn"))(*given)), [function(*given)])


@each_op
def test_composed_is_the_definition(spec: OpSpec):
    arrays = draw(spec, spec.contract_shapes[-1])
    with mlx_anvil.composed():
        composed = spec.function(*arrays)
    assert max_error(composed, spec.function(*arrays)) <= OTHER_KERNEL
    assert to_numpy(composed).size
