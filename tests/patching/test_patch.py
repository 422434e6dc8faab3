"""``patch`` and ``unpatch``: what they change, what they must not change, and calls that no op supports."""

import copy
import gc
import pickle
import subprocess
import sys
import threading

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.activations import swiglu
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_anvil
from lm_models import ARCHITECTURES, Architecture, tokens
from mlx_anvil.patching import Fallback, Report
from mlx_anvil.patching._report import FallbackLog
from support import backend_scope, max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32 with attention
LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}


@pytest.fixture
def model() -> nn.Module:
    model = ARCHITECTURES["llama"].build()
    mlx_anvil.unpatch(model)  # gives classes the methods back that patched models needed which are gone
    return model


def ops_of(function, *arguments) -> set[str]:
    """Ops of ours that run when the function's result is evaluated."""
    with mlx_anvil.trace() as trace:
        mx.eval(function(*arguments))
    return {event.op for event in trace.events if not event.is_fallback}


LLAMA_OPS = {"rms_norm", "rope", "flash_attention", "silu_gate"}


def description(model: nn.Module) -> dict[str, tuple]:
    """Everything that must not change: parameters by identity, frozen state, training mode, modules, their classes."""
    state = {"parameters": tuple((name, id(array)) for name, array in tree_flatten(model.parameters()))}
    state["trainable"] = tuple(name for name, _ in tree_flatten(model.trainable_parameters()))
    state["training"] = tuple((path, module.training) for path, module in model.named_modules())
    state["modules"] = tuple((path, id(module), type(module)) for path, module in model.named_modules())
    state["attributes"] = tuple((path, {**vars(module)}) for path, module in model.named_modules())
    state["text"] = (repr(model),)
    return state


def methods(model: nn.Module) -> list[tuple]:
    """What the classes of a model hold, in the order of their names."""
    classes = sorted({type(module) for _, module in model.named_modules()}, key=repr)
    return [(cls, dict(vars(cls))) for cls in classes]


def test_only_methods_change(model):
    model.freeze()
    model.model.layers[1].unfreeze()
    model.model.layers[0].eval()
    before, was = description(model), methods(model)
    report = mlx_anvil.patch(model)
    assert description(model) == before
    assert {row.op for row in report.swapped} >= LLAMA_OPS - {"silu_gate"}
    assert ops_of(model, tokens(1, 5)) == LLAMA_OPS
    mlx_anvil.unpatch(model)
    assert description(model) == before
    assert methods(model) == was


def test_patch_again_and_unpatch_again(model):
    gc.collect()
    mlx_anvil.unpatch(model)  # restores the methods for which patched models of other tests are gone
    original = nn.RMSNorm.__call__
    first, patched = mlx_anvil.patch(model), description(model)
    second = mlx_anvil.patch(model)
    assert second == first
    assert description(model) == patched
    assert nn.RMSNorm.__call__.__wrapped__ is original  # not a route to a route
    mlx_anvil.unpatch(model)
    mlx_anvil.unpatch(model)
    assert nn.RMSNorm.__call__ is original
    assert ops_of(model, tokens(1, 5)) == set()


def test_the_last_options_count(model):
    mlx_anvil.patch(model, norm=False)
    assert ops_of(model, tokens(1, 5)) == LLAMA_OPS - {"rms_norm"}
    report = mlx_anvil.patch(model, attention=False, rope=False)
    assert ops_of(model, tokens(1, 5)) == {"rms_norm", "silu_gate"}
    assert {(row.op, row.why) for row in report.left} == {
        ("flash_attention", "attention=False"),
        ("rope", "rope=False"),
    }


def test_a_module_of_a_model(model):
    mlx_anvil.patch(model)
    mlx_anvil.unpatch(model.model.layers[0])
    with mlx_anvil.trace() as trace:
        mx.eval(model(tokens(1, 5)))
    assert len([name for name in trace.kernels if name.startswith("rope")]) == 2  # q and k of one layer


def test_other_models_are_out_of_reach(model):
    sibling = ARCHITECTURES["llama"].build()
    sdpa = llama.scaled_dot_product_attention
    mlx_anvil.patch(model)
    assert llama.scaled_dot_product_attention is sdpa
    assert ops_of(sibling, tokens(1, 5)) == set()
    assert ops_of(ARCHITECTURES["llama"].build(), tokens(1, 5)) == set()


def test_experts_of_other_models_are_out_of_reach():
    """The activation of mlx-lm's experts is a single object, the default argument of all of them."""
    models = [ARCHITECTURES["mixtral"].build() for _ in range(2)]
    activation = models[0].model.layers[0].block_sparse_moe.switch_mlp.activation
    assert activation is models[1].model.layers[0].block_sparse_moe.switch_mlp.activation
    was = methods(activation)
    report = mlx_anvil.patch(models[0])
    assert methods(activation) == was
    assert report.left == ()
    assert mlx_anvil.patch(activation).swapped == ()


def test_threads():
    """One patched and one unpatched model of an architecture in threads of their own, while a third is patched and
    unpatched over and over."""
    models = [ARCHITECTURES["llama"].build() for _ in range(3)]
    mlx_anvil.patch(models[0])
    batch = tokens(2, 9)
    want = [models[i](batch) for i in range(2)]
    mx.eval(want)
    errors: list[str] = []
    finished = threading.Event()

    def forward(which: int) -> None:
        try:
            with backend_scope(), mx.stream(mx.new_stream(mx.default_device())):
                for _ in range(15):
                    ops = ops_of(models[which], batch)
                    if ops != (LLAMA_OPS if which == 0 else set()):
                        errors.append(f"model {which} ran {ops}")
                    if max_error(models[which](batch), want[which]) > LIMIT:
                        errors.append(f"model {which} is off")
        except Exception as error:
            errors.append(repr(error))

    def patch_and_unpatch() -> None:
        while not finished.is_set():
            mlx_anvil.patch(models[2])
            mlx_anvil.unpatch(models[2])

    workers = [threading.Thread(target=forward, args=(which,)) for which in (0, 1, 0, 1)]
    patcher = threading.Thread(target=patch_and_unpatch)
    for thread in (*workers, patcher):
        thread.start()
    for thread in workers:
        thread.join()
    finished.set()
    patcher.join()
    assert errors == []


def test_compile(model):
    mlx_anvil.patch(model)
    batch = tokens(2, 9)
    assert max_error(mx.compile(model)(batch), model(batch)) <= LIMIT
    assert ops_of(mx.compile(model), batch) >= LLAMA_OPS - {"silu_gate"}


def test_a_compiled_step_of_training_is_that_of_the_model():
    model, batch = Architecture("llama", {"num_hidden_layers": 1}).build(), tokens(2, 9)
    optimizer = optim.SGD(learning_rate=0.1)

    def step(tokens: mx.array) -> mx.array:
        value, gradients = nn.value_and_grad(model, lambda: model(tokens).square().mean())()
        optimizer.update(model, gradients)
        return value

    def train(step) -> list[mx.array]:
        model.load_weights(start)
        losses = [step(batch) for _ in range(3)]
        mx.eval(losses, model.parameters())
        return losses

    start = tree_flatten(model.parameters())
    theirs = train(step)
    mlx_anvil.patch(model)
    state = [model.state, optimizer.state]
    ours = train(mx.compile(step, inputs=state, outputs=state))
    assert theirs[2].item() < theirs[0].item()
    assert max_error(mx.stack(ours), mx.stack(theirs)) <= LIMIT


@pytest.mark.parametrize("first", ["patch", "lora"])
@pytest.mark.parametrize("quantized", [False, True], ids=["full", "4 bits"])
def test_lora(model, first, quantized):
    if quantized:
        nn.quantize(model, group_size=32, bits=4)
    keys = {f"{part}.{name}_proj" for part, names in (("self_attn", "qv"), ("mlp", "x")) for name in names} | {
        "mlp.gate_proj"
    }
    if first == "patch":
        mlx_anvil.patch(model)
    model.freeze()
    linear_to_lora_layers(model, 2, LORA | {"keys": keys})
    for layer in model.layers:
        layer.mlp.gate_proj.lora_b = mx.random.normal(layer.mlp.gate_proj.lora_b.shape)
    if first == "lora":
        mlx_anvil.patch(model)
    batch = tokens(2, 9)
    gradient = nn.value_and_grad(model, lambda model: model(batch).square().mean())
    with mlx_anvil.strict():
        got = gradient(model)
        ops = ops_of(model, batch)
    assert ops >= LLAMA_OPS | ({"quantized_matmul"} if quantized else set())
    mlx_anvil.unpatch(model)
    want = gradient(model)
    names = [name for name, _ in tree_flatten(want[1])]
    assert names
    assert all("lora" in name for name in names)
    for (name, ours), (_, theirs) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert max_error(ours, theirs) <= LIMIT, name
    fused = model.layers[0].mlp.gate_proj.fuse()
    assert isinstance(fused, nn.QuantizedLinear if quantized else nn.Linear)


def test_weights_load_and_save(model, tmp_path):
    batch = tokens(1, 5)
    want = model(batch)
    model.save_weights(str(tmp_path / "before.safetensors"))
    patched = ARCHITECTURES["llama"].build()
    mlx_anvil.patch(patched)
    patched.load_weights(str(tmp_path / "before.safetensors"))
    assert max_error(patched(batch), want) <= LIMIT
    patched.save_weights(str(tmp_path / "after.safetensors"))
    model.load_weights(str(tmp_path / "after.safetensors"))
    assert max_error(model(batch), want) == 0


def test_copies_are_not_patched(model):
    batch = tokens(1, 5)
    want = model(batch)
    mlx_anvil.patch(model)
    norm, x = model.model.norm, mx.random.normal((3, 64))
    for other in (copy.copy(norm), copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert ops_of(other, x) == set()
    assert ops_of(copy.deepcopy(model), batch) == set()
    assert max_error(copy.deepcopy(model)(batch), want) == 0


def test_quantized_after_the_patch(model):
    mlx_anvil.patch(model)
    nn.quantize(model, group_size=32, bits=4)
    mlx_anvil.patch(model)
    ops = ops_of(model, tokens(1, 5))
    assert ops == LLAMA_OPS - {"silu_gate"} | {"quantized_matmul", "quantized_embedding", "quantized_swiglu"}


def test_nothing_to_swap():
    report = mlx_anvil.patch(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert report.swapped == ()
    assert report.summary.endswith(".Sequential: nothing to swap.")
    assert str(report) == report.summary
    assert report.left == ()


def test_a_reason_is_printed_as_it_is():
    log = FallbackLog()
    log.add("rope", "x is [batch, length]; allowed: [batch]")
    assert "x is [batch, length]; allowed: [batch]" in str(Report("Model", (), (), log=log))


@pytest.mark.parametrize("function", [mlx_anvil.patch, mlx_anvil.unpatch])
def test_not_a_module(function):
    with pytest.raises(TypeError, match=rf"^\[{function.__name__}\] model is a dict; allowed: an mlx.nn.Module.$"):
        function({"weight": mx.ones(3)})


def test_a_call_that_no_op_takes_runs_as_before(model):
    model.set_dtype(mx.float64)
    with mx.stream(mx.cpu):
        norm, x = model.model.norm, mx.random.normal((2, 64)).astype(mx.float64)
        want = norm(x)
        report = mlx_anvil.patch(model)
        with mlx_anvil.trace() as trace:
            got = [norm(x), norm(x)]
        assert mx.array_equal(got[1], want)
        (fallback,) = report.fallbacks
        assert (fallback.op, fallback.count) == ("rms_norm", 2)
        assert "float64" in fallback.reason
        assert [(event.op, event.reason) for event in trace.fallbacks] == [(fallback.op, fallback.reason)] * 2
        text = " ".join(str(report).split())
        assert f"x 2 rms_norm: {fallback.reason}" in text
        assert "rms_norm: use float32, float16 or bfloat16: no kernel takes float64." in text
        with mlx_anvil.strict(), pytest.raises(RuntimeError, match=r"strict\(\).*float64"):
            norm(x)


def test_a_call_that_an_op_would_give_to_mlx_runs_as_before():
    """Heads too wide for our prompt kernel use MLX's own function, not our graph of MLX ops."""
    model = Architecture("llama", {"head_dim": 1030, "num_attention_heads": 1, "num_key_value_heads": 1}).build()
    batch = tokens(1, 9)
    want = model(batch)
    report = mlx_anvil.patch(model, norm=False, rope=False, swiglu=False)
    assert max_error(model(batch), want) == 0
    (fallback,) = report.fallbacks
    assert (fallback.op, fallback.count) == ("flash_attention", 2)
    assert "head" in fallback.reason
    with mlx_anvil.strict(), pytest.raises(RuntimeError, match="strict"):
        model(batch)


def test_a_wrong_call_raises_what_it_always_raised(model):
    layer = model.model.norm
    with pytest.raises(ValueError, match="rms_norm") as theirs:
        layer(mx.ones((2, 3)))
    report = mlx_anvil.patch(model)
    with pytest.raises(ValueError, match="rms_norm") as ours:
        layer(mx.ones((2, 3)))
    assert str(ours.value) == str(theirs.value)
    assert report.fallbacks == ()


def test_arguments_that_our_op_does_not_have():
    class Doubled(nn.Module):
        def __call__(self, x):
            return swiglu(x, 2.0)

    module, x = Doubled(), mx.random.normal((2, 8))
    want = module(x)
    report = mlx_anvil.patch(module)
    assert mx.array_equal(module(x), want)
    assert report.fallbacks == (Fallback("silu_gate", "up is a float; allowed: mlx.core.array.", 1),)


def test_mlx_lm_is_not_needed():
    code = (
        "import sys; sys.modules['mlx_lm'] = None\n"
        "import mlx.core as mx, mlx.nn as nn, mlx_anvil\n"
        "layer = nn.TransformerEncoderLayer(32, 4)\n"
        "print(mlx_anvil.patch(layer)); mx.eval(layer(mx.ones((1, 4, 32)), None))\n"
        "assert [name for name in sys.modules if name.startswith('mlx_lm')] == ['mlx_lm']\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "flash_attention" in run.stdout
    assert "layer_norm" in run.stdout
