"""What ``patch`` leaves alone is named: in every architecture of mlx-lm that has it."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest

import mlx_anvil
from lm_models import Architecture, tokens
from mlx_anvil.patching import _left
from mlx_anvil.patching._patch import _routes
from mlx_anvil.patching._routers import routers
from recurrent_models import RWKV7
from support import max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32 with attention
SOURCES = {path.stem: path.read_text() for path in Path(mlx_lm.models.__path__[0]).glob("*.py")}
# Parts of models, and one that ends the process where a package is missing.
NO_MODELS = {"switch_layers", "olmo", "base", "activations"}


def with_text(pattern: str) -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return [name for name in sorted(names) if name not in NO_MODELS and re.search(pattern, SOURCES[name])]


def left_in(name: str) -> dict[str, str]:
    """What the classes of a module have left, and why."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    rows = {}
    for cls in vars(module).values():
        if inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__:
            methods = {route.name: route.original for route in _routes(cls)}
            rows |= {what: why for what, _, why in _left.reasons(cls, methods)}
    return rows


def test_routers_of_all_architectures():
    with_routers = with_text(r"mx\.argpartition|sparsemixer|expert_routing\(")
    assert len(with_routers) > 40
    unnamed = [name for name in with_routers if not {"router", "choice of keys"} & left_in(name).keys()]
    assert set(unnamed) == {name.split()[-1] for name, _ in routers()} - {"deepseek_v32"}  # which also chooses keys


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mixtral", _left.OWN_ROUTER),
        ("llama4", _left.OWN_ROUTER),
        ("ernie4_5_moe", _left.OWN_ROUTER),
        ("lfm2_moe", _left.OTHER_ROUTER),
        ("muse_spark", _left.OTHER_ROUTER),
        ("phimoe", _left.OTHER_ROUTER),
    ],
)
def test_why_a_router_is_left(name, why):
    assert left_in(name)["router"] == why


@pytest.mark.parametrize(
    ("name", "activation", "why"),
    [
        ("starcoder2", "gelu", _left.NO_GATE),
        ("gemma3n", "gelu_approx", _left.OTHER_FORM.format(name="gelu_approx")),  # of its decoder layer
        ("step3p5", "clamped_swiglu", _left.CLAMPS_AFTER),
        ("nemotron", "relu_squared", _left.OTHER_ACTIVATION),
    ],
)
def test_why_an_activation_is_left(name, activation, why):
    assert left_in(name)[activation] == why


def test_recurrences_of_all_architectures():
    names = with_text(r"ssm_update\(|ssm_step\(|gated_delta_update\(|recurrent_gla\(|rnn_scan\(|wkv7_kernel\(")
    assert len(names) > 15
    unnamed = [name for name in names if _left.RECURRENCE not in left_in(name).values()]
    assert set(unnamed) <= {"ssm", "gated_delta"}  # the functions themselves


SMALL = {
    "rwkv7": RWKV7,
    "phi3small": Architecture(
        "phi3small",
        {
            "dense_attention_every_n_layers": 2,
            "ff_intermediate_size": 96,
            "gegelu_limit": 1.0,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "step3p5": Architecture(
        "step3p5",
        {
            **{"head_dim": 16, "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 4},
            **{"moe_intermediate_size": 32, "share_expert_dim": 32, "moe_layers_enum": "1"},
            **{"swiglu_limits": [0.0, 0.5], "swiglu_limits_shared": [0.3, 0.0]},
        },
    ),
}
LEFT = {
    "rwkv7": ("Rwkv7TimeMixing", _left.RECURRENCE),
    "phi3small": ("attention", _left.OWN_SOFTMAX),
    "step3p5": ("clamped_swiglu", _left.CLAMPS_AFTER),
}


@pytest.mark.parametrize("name", SMALL)
def test_architectures_with_parts_that_are_left(name):
    model, batch = SMALL[name].build(), tokens(2, 13)
    report = mlx_anvil.patch(model)
    assert LEFT[name] in {(row.what, row.why) for row in report.left}
    assert report.swapped
    mlx_anvil.unpatch(model)
    if name == "phi3small":
        return  # with MLX 0.32.4 alone, on the CPU, it writes outside of its arrays now and then
    want = model(batch)
    mlx_anvil.patch(model)
    with mlx_anvil.strict():
        assert max_error(model(batch), want) <= LIMIT
    mlx_anvil.unpatch(model)
    assert mx.array_equal(model(batch), want)
