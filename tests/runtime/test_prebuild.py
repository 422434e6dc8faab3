"""prebuild(): it finds the kernels that a model launches, runs nothing, and builds each pipeline once."""

import subprocess
import sys
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import lm_models
import mlx_anvil
from mlx_anvil import _ext, _simulate

pytestmark = pytest.mark.cpu_only

LENGTHS = (5, 40)
MODELS = ("llama", "qwen3", "gemma2", "mistral", "cohere")


def patched(name: str, quantized: bool) -> nn.Module:
    mx.random.seed(7)
    model = lm_models.ARCHITECTURES[name].build()
    if quantized:
        nn.quantize(model, group_size=32, bits=4)
    mlx_anvil.patch(model)
    mx.eval(model.parameters())
    return model


def generate(model: nn.Module, length: int) -> mx.array:
    cache = make_prompt_cache(model)
    tokens = mx.arange(length)[None] % lm_models.VOCABULARY
    mx.eval(model(tokens, cache=cache), [c.state for c in cache])
    logits = model(tokens[:, :1], cache=cache)
    mx.eval(logits)
    return logits


@pytest.fixture
def compiled(monkeypatch):
    """Kernels that the simulator is asked to compile, one entry per compilation. A fast stand-in compiles nothing."""
    names = []
    original = _simulate._compile

    def count(op, kernel, *options):
        names.append(kernel)
        return original(op, kernel, *options)

    with mlx_anvil.simulate():
        _simulate._use_compiler(count)
        yield names
        _simulate._use_compiler()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_are_those_that_generation_launches(name, quantized):
    model = patched(name, quantized)
    with mx.stream(mx.cpu), mlx_anvil.simulate():
        prebuilt = mlx_anvil.prebuild(model, prompt_lengths=LENGTHS)
        with mlx_anvil.trace() as trace:
            for length in LENGTHS:
                generate(model, length)
    launched = {event.kernel for event in trace.events if any(event.grid)}
    assert len(launched) > 3
    assert set(prebuilt.kernels) == launched
    assert prebuilt.reason == ""


def test_nothing_is_evaluated_or_changed():
    model = patched("llama", quantized=True)
    before = {name: (id(array), bytes(array)) for name, array in tree_flatten(model.parameters())}
    with mlx_anvil.simulate():
        x = mx.random.normal((4096, 4096))  # 64 MB, which would be seen
        gate = mlx_anvil.silu_gate(x, x)
        memory = mx.get_active_memory()
        mx.reset_peak_memory()
        (kernel,) = _ext._plan_kernels([mx.sum(gate)])
        assert mx.get_peak_memory() == 0  # since it was reset, nothing was allocated
        assert mx.get_active_memory() == memory
        assert kernel.name.startswith("silu_gate_forward_float32")
        mlx_anvil.prebuild(model, prompt_lengths=[5])
    assert {name: (id(array), bytes(array)) for name, array in tree_flatten(model.parameters())} == before


def test_a_plan_has_the_strides_of_views():
    """Attention's kernel depends on whether rows are vectors."""

    def planned(x: mx.array) -> str:
        with mlx_anvil.simulate():
            (kernel,) = _ext._plan_kernels([mlx_anvil.flash_attention(x, x, x, scale=1.0)])
            with mlx_anvil.trace() as trace:
                mx.eval(mlx_anvil.flash_attention(x, x, x, scale=1.0))
        assert kernel.name == trace.events[-1].kernel
        return kernel.name

    whole, odd = (mx.random.normal((1, 20, 2, width)) for width in (64, 67))
    assert planned(whole.transpose(0, 2, 1, 3)) == planned(whole.swapaxes(1, 2)[..., :64])
    assert planned(odd.transpose(0, 2, 1, 3)[..., 3:]) != planned(whole.transpose(0, 2, 1, 3))


def test_after_wait_nothing_is_compiled(compiled):
    model = patched("llama", quantized=True)
    prebuilt = mlx_anvil.prebuild(model, prompt_lengths=[5])
    prebuilt.wait(600)
    assert prebuilt.done
    at_once = list(compiled)
    generate(model, 5)
    assert compiled == at_once


LAUNCH_WHILE_BUILDING = """
import threading, time
import mlx.core as mx
import mlx_anvil
from mlx_anvil import _ext, _simulate

calls, started = [], threading.Event()

def slow(op, kernel, *options):
    calls.append(kernel)
    started.set()
    time.sleep(0.5)
    return _simulate._compile(op, kernel, *options)

with mlx_anvil.simulate():
    _simulate._use_compiler(slow)
    x = mx.random.normal((3, 8))
    (planned,) = _ext._plan_kernels([mlx_anvil.silu_gate(x, x)])
    builder = threading.Thread(target=planned.build)
    builder.start()
    started.wait()
    mx.eval(mlx_anvil.silu_gate(x, x))
    builder.join()
print(calls)
"""


def test_a_launch_waits_for_the_thread_that_builds():
    """The launch neither compiles again nor blocks the builder by holding the GIL. Runs in a process without compiled
    kernels."""
    run = subprocess.run([sys.executable, "-c", LAUNCH_WHILE_BUILDING], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "['silu_gate_forward_float32_flat']\n"


def test_an_error_is_raised_by_wait():
    def fail(*_):
        raise OSError("no space left")

    with mlx_anvil.simulate(checked=True):
        _simulate._use_compiler(fail)
        try:
            x = mx.random.normal((2, 3, 5)).astype(mx.float16)
            prebuilt = mlx_anvil.prebuild(nn.Linear(2, 2), lambda: mlx_anvil.softmax_topk(x, 3))
            with pytest.raises(RuntimeError, match=r"\[prebuild\] 1 of 1 kernels could not be built; .*no space left"):
                prebuilt.wait(60)
            assert prebuilt.done
        finally:
            _simulate._use_compiler()


def test_wait_gives_up_in_time():
    release = threading.Event()

    def hang(*_):
        release.wait(60)
        raise OSError("given up")

    with mlx_anvil.simulate(checked=True):
        _simulate._use_compiler(hang)
        try:
            x = mx.random.normal((2, 3, 5))
            prebuilt = mlx_anvil.prebuild(nn.Linear(2, 2), lambda: {"out": [mlx_anvil.rms_norm(x, mx.ones(5), 1e-5)]})
            with pytest.raises(TimeoutError, match=r"\[prebuild\] 1 of 1 kernels are not built yet"):
                prebuilt.wait(0.05)
            assert not prebuilt.done
            assert repr(prebuilt) == "Prebuilt(0 of 1 kernels built)"
        finally:
            release.set()
            _simulate._use_compiler()


def test_on_the_cpu_there_is_nothing_to_build():
    prebuilt = mlx_anvil.prebuild(patched("llama", quantized=False), prompt_lengths=[5])
    assert prebuilt.kernels == ()
    assert prebuilt.done
    assert prebuilt.reason
    prebuilt.wait(0)


def test_patch_prebuilds():
    mx.random.seed(7)
    model = lm_models.ARCHITECTURES["llama"].build()
    assert mlx_anvil.patch(model).prebuilt is None
    with mlx_anvil.simulate():
        prebuilt = mlx_anvil.patch(model, prebuild=True).prebuilt
        assert any(name.startswith("rms_norm") for name in prebuilt.kernels)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": 3}, TypeError, r"\[prebuild\] model is a int; allowed: an mlx.nn.Module"),
        ({"inputs": 3}, TypeError, r"\[prebuild\] inputs is a int; allowed: a function"),
        ({"prompt_lengths": [0]}, ValueError, r"\[prebuild\] prompt_lengths is \[0\]; allowed: positive integers"),
        ({"prompt_lengths": [2.5]}, ValueError, r"\[prebuild\] prompt_lengths is \[2.5\]"),
        ({"batch_size": True}, ValueError, r"\[prebuild\] batch_size is \(True,\)"),
        (
            {},
            ValueError,
            r"\[prebuild\] Linear has no layers, as mlx-lm's models have; allowed: such a model, or inputs=",
        ),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        mlx_anvil.prebuild(**({"model": nn.Linear(2, 2)} | arguments))
