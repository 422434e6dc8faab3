"""What the processes of ``test_tensor_parallel.py`` run."""

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

import mlx_anvil
from expert_models import MODELS, OPTIONS
from lm_models import ARCHITECTURES, Architecture, tokens
from mlx_anvil import _overlap, distributed
from mlx_anvil.patching._routes import is_patched

QUANTIZATION = {"group_size": 32, "bits": 4}
STEPS = 12


def _models(sizes: dict[str, int], experts: int) -> dict[str, Architecture]:
    with_experts = {**OPTIONS, **sizes, "moe_intermediate_size": experts}
    latent = {"v_head_dim": 32, "qk_nope_head_dim": 32, "first_k_dense_replace": 1}
    return {
        "llama": Architecture("llama", {**sizes, "num_hidden_layers": 1}),
        "qwen3": Architecture("qwen3", {**sizes, "num_hidden_layers": 1, "tie_word_embeddings": False}),
        "qwen3_moe": Architecture("qwen3_moe", {**with_experts, "decoder_sparse_step": 2}),
        "deepseek_v3": Architecture("deepseek_v3", {**with_experts, **latent}),
    }


# Two, three and four processes divide all of these, into whole quantization groups.
EVEN = _models(
    {
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_attention_heads": 24,
        "num_key_value_heads": 12,
        "head_dim": 16,
    },
    384,
)
# Three processes divide none: 4 heads for keys and values, 7 groups of columns, 5 of an expert's, 97 tokens.
UNEVEN = _models(
    {
        "hidden_size": 64,
        "intermediate_size": 224,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 97,
    },
    160,
)


def model_of(architecture: Architecture, quantized: bool) -> nn.Module:
    """The same in every process."""
    mx.random.seed(7)
    model = architecture.build()
    if quantized:
        nn.quantize(model, **QUANTIZATION)
    return model


def alone(even: bool) -> dict[tuple[str, bool], tuple[list[int], list[np.ndarray]]]:
    """Tokens and logits of every model in one process that patches nothing."""
    names = [(name, quantized) for name in EVEN for quantized in (False, True)]
    return {(name, quantized): _generated(model_of(_of(name, even), quantized), STEPS) for name, quantized in names}


def together(even: bool, steps: int) -> dict[tuple[str, bool, str], dict[str, Any]]:
    """The same of all processes, for a patch before and after the model is sharded; and what the patch said.

    The kernels of the latter show that its other steps would be the same.
    """
    group, found = mx.distributed.init(), {}
    for name in EVEN:
        for quantized in (False, True):
            for order in ("before", "after"):
                model = model_of(_of(name, even), quantized)
                report = mlx_anvil.patch(model) if order == "before" else None
                if even:
                    model.shard(group)
                else:
                    distributed.shard(model, group, head="lm_head" in model)
                report = report or mlx_anvil.patch(model)
                with mlx_anvil.strict(), mlx_anvil.trace() as trace:
                    made = _generated(model, steps if order == "before" else 1)
                swapped = mlx_anvil.patch(model).swapped if order == "before" else report.swapped
                rows = {(row.path.split(".")[-1], row.op, row.why) for row in swapped}
                found[name, quantized, order] = {
                    "generated": made,
                    "fallbacks": report.fallbacks,
                    "kernels": trace.kernels,
                    "rows": rows,
                }
    return found


def _of(name: str, even: bool) -> Architecture:
    return (EVEN if even else UNEVEN)[name]


def _generated(model: nn.Module, steps: int) -> tuple[list[int], list[np.ndarray]]:
    """Greedy tokens of a prompt and that many steps, and their logits."""
    mx.random.seed(3)
    token, cache, found, logits = tokens(1, 9), make_prompt_cache(model), [], []
    for _ in range(1 + steps):
        logits.append(model(token, cache=cache)[:, -1])
        token = mx.argmax(logits[-1], axis=-1, keepdims=True)
        found.append(int(token.item()))
    return found, [np.array(x) for x in logits]


def refusals() -> dict[str, str]:
    """What mlx-lm and we say to sizes that three processes do not divide, and to other layers."""
    group = mx.distributed.init()
    model = model_of(UNEVEN["llama"], True)
    few = model_of(Architecture("llama", {"num_attention_heads": 2, "num_key_value_heads": 2}), False)
    odd = model_of(
        Architecture(
            "qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "tie_word_embeddings": False}
        ),
        False,
    )
    odd.layers[1].self_attn.sinks = mx.zeros(6)
    tied, lora = (model_of(UNEVEN[name], False) for name in ("llama", "llama"))
    lora.layers[0].mlp.up_proj = LoRALinear.from_base(lora.layers[0].mlp.up_proj)
    before = [id(layer) for layer in odd.layers[0].self_attn.children().values()]
    found = {
        name: _error(call)
        for name, call in {
            "mlx_lm": lambda: model.shard(group),
            "few": lambda: distributed.shard(few, group),
            "unknown": lambda: distributed.shard(odd, group),
            "head": lambda: distributed.shard(tied, group, head=True),
            "lora": lambda: distributed.shard(lora, group),
            "shapes": lambda: distributed.matmul_all_sum(mx.zeros((3, 4)), mx.zeros((2, 5)), group=group),
            "chunks": lambda: distributed.matmul_all_sum(mx.zeros((3, 4)), mx.zeros((2, 4)), chunks=0),
        }.items()
    }
    assert before == [id(layer) for layer in odd.layers[0].self_attn.children().values()]
    return found


# Further architectures that distributed.shard takes.
OTHERS = {
    **{name: ARCHITECTURES[name] for name in ("mistral", "qwen2", "gemma2", "gemma3")},
    **{name: MODELS[name] for name in ("exaone_moe", "gemma4_text", "glm4_moe", "glm4_moe_lite", "mistral4")},
}


def in_two_processes() -> dict[str, Any]:
    """With prompts in four chunks, what further tests look at."""
    _overlap.MIN_ROWS = _overlap.MIN_BYTES = 2
    assert _overlap.default_chunks(9, 64) == 4
    return {"errors": others(), "generators": generators()}


def generators() -> list[list[int]]:
    """Tokens of mlx-lm's generator, which evaluates ahead on a stream of its own; in one process, and in all."""
    found = []
    for is_sharded in (False, True):
        model = model_of(EVEN["qwen3"], True)
        if is_sharded:
            mlx_anvil.patch(model)
            distributed.shard(model, head=True)
        steps = generate_step(mx.arange(1, 40), model, max_tokens=STEPS, prefill_step_size=16)
        found.append([int(token) for token, _ in steps])
    return found


def others() -> dict[str, float]:
    """The largest error of the logits of a prompt and of a token, relative to one process's logits."""
    errors = {}
    for name, architecture in OTHERS.items():
        _, alone = _generated(model_of(architecture, False), 1)
        model = model_of(architecture, False)
        mlx_anvil.patch(model)
        distributed.shard(model)
        assert type(model.layers[0].self_attn.o_proj) is nn.ShardedToAllLinear
        _, logits = _generated(model, 1)
        errors[name] = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(alone, logits, strict=True))
    return errors


def _error(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


GRADIENTS = (
    ("llama", False, True),
    ("llama", True, True),
    ("qwen3", False, False),
    ("qwen3_moe", True, False),
    ("deepseek_v3", False, False),
)


def in_three_processes() -> dict[str, Any]:
    """What further tests look at, of one run."""
    return {
        "gradients": {case: gradients(*case) for case in GRADIENTS},
        "chunks": chunked(),
        "order": in_order(10),
        "refusals": refusals(),
    }


def gradients(name: str, quantized: bool, even: bool) -> dict[str, float]:
    """The largest error of the gradient of each parameter, relative to one process's gradients."""
    group = mx.distributed.init()
    mx.random.seed(5)
    architecture = _of(name, even)
    prompt, cotangent = tokens(1, 7), mx.random.normal((1, 7, 97))
    alone = model_of(architecture, quantized)
    sharded = model_of(architecture, quantized)
    mlx_anvil.patch(sharded)
    has_head = "lm_head" in sharded
    distributed.shard(sharded, group, head=has_head)

    def weighted_sum(model: nn.Module) -> mx.array:
        logits = model(prompt)
        return (logits * cotangent[..., : logits.shape[-1]]).sum()

    def of(model: nn.Module) -> dict[str, mx.array]:
        model.train()
        loss = nn.value_and_grad(model, weighted_sum)
        _, grads = loss(model)
        return dict(tree_flatten(grads))

    whole, parts = of(alone), of(sharded)
    # Where a rank's own part is, the same split of the parameters' indices says.
    places = model_of(architecture, quantized)
    flat = {path: mx.arange(x.size).reshape(x.shape) for path, x in tree_flatten(alone.trainable_parameters())}
    places.update(tree_unflatten(list(flat.items())))
    distributed.shard(places, group, head=has_head)
    own = dict(tree_flatten(places.trainable_parameters()))
    errors = {}
    for path, part in parts.items():
        truth = (
            whole[path.replace("lm_head.part", "lm_head")]
            .flatten()[own[path].astype(mx.int32).flatten()]
            .reshape(part.shape)
        )
        if _is_partial(path):
            part = mx.distributed.all_sum(part, group=group)
        errors[path] = float((mx.abs(part - truth).max() / mx.abs(truth).max()).item())
    return errors


def _is_partial(path: str) -> bool:
    """True for what every process has, but uses for its own heads or experts only."""
    return any(name in path for name in ("q_norm", "k_norm", "kv_a_", ".mlp.gate."))


SHAPES = (
    ((5, 37), 67, 96, mx.float32),
    ((1,), 64, 64, mx.float32),
    ((0, 3), 64, 64, mx.float32),
    ((300,), 128, 128, mx.bfloat16),
    ((129,), 31, 192, mx.float16),
)


def chunked() -> list[tuple[str, float, float]]:
    """Sums in chunks, and their gradients, against those of the whole product: name, error, limit."""
    found = []
    for i, (rows, outputs, columns, dtype) in enumerate(SHAPES):
        mx.random.seed(i)
        x, w = mx.random.normal((*rows, columns)), mx.random.normal((outputs, columns)) * columns**-0.5
        part = _own_columns(columns)
        x, w = x[..., part].astype(dtype), w[:, part].astype(dtype)
        cotangent = mx.random.normal((*rows, outputs)).astype(dtype)
        codes = mx.quantize(w, **QUANTIZATION)
        for way in ("dense", "quantized"):
            of = partial(_dense if way == "dense" else _quantized, x, w, codes, cotangent)
            whole = of(1)
            ways = {str(chunks): partial(of, chunks) for chunks in (None, 2, 3, 7)}
            ways["compiled"] = mx.compile(partial(of, 3))
            limit = 1e-6 if dtype == mx.float32 else 2 * mx.finfo(dtype).eps
            for name, call in ways.items():
                for result, truth in zip(call(), whole, strict=True):
                    assert (result.shape, result.dtype) == (truth.shape, truth.dtype)
                    found.append((f"{way} {rows} {dtype} {name}", _error_of(result, truth), limit))
    return found


def _own_columns(columns: int) -> slice:
    """Whole groups of 32, one more in the last processes."""
    group = mx.distributed.init()
    begin, end = (columns // 32 * rank // group.size() * 32 for rank in (group.rank(), group.rank() + 1))
    return slice(begin, end)


def _dense(x: mx.array, w: mx.array, codes: Any, cotangent: mx.array, chunks: int | None) -> list[mx.array]:
    outputs, grads = mx.vjp(lambda x, w: distributed.matmul_all_sum(x, w, chunks=chunks), [x, w], [cotangent])
    return outputs + grads


def _quantized(x: mx.array, w: mx.array, codes: Any, cotangent: mx.array, chunks: int | None) -> list[mx.array]:
    def call(x: mx.array) -> mx.array:
        return distributed.quantized_matmul_all_sum(x, *codes, chunks=chunks, **QUANTIZATION)

    outputs, grads = mx.vjp(call, [x], [cotangent])
    return outputs + grads


def _error_of(result: mx.array, truth: mx.array) -> float:
    if truth.size == 0:
        return 0.0
    scale = mx.abs(truth.astype(mx.float32)).max()
    error = mx.abs(result.astype(mx.float32) - truth.astype(mx.float32)).max()
    return float(error.item()) / (float(scale.item()) or 1.0)


def in_order(rounds: int) -> list[np.ndarray]:
    """Sums in chunks among other communication, many times in one graph each, also from another stream."""
    group = mx.distributed.init()
    rank, size = group.rank(), group.size()
    found = []
    for stream in (mx.default_stream(mx.cpu), mx.new_stream(mx.cpu)):
        with mx.stream(stream):
            for i in range(rounds):
                mx.random.seed(i)
                x = mx.random.randint(-8, 8, (64 + i, 32)).astype(mx.float32)
                w = mx.random.randint(-8, 8, (48, 32)).astype(mx.float32)
                # Whole numbers: every order of additions has the same sum.
                mine = x * (rank + 1)
                total = size * (size + 1) // 2
                first = distributed.matmul_all_sum(mine, w, group=group, chunks=5)
                others = [mx.distributed.all_sum(mx.full((1000 + i,), float(rank)), group=group) for _ in range(3)]
                gathered = mx.distributed.all_gather(mx.full((3,), rank), group=group)
                second = distributed.matmul_all_sum(first * 0.5 + mine @ w.T, mx.eye(48), group=group, chunks=3)
                mx.eval(second, others, gathered)
                product = x @ w.T
                expected = size * 0.5 * total * product + total * product
                found += [
                    np.array(mx.array_equal(first, total * product)),
                    np.array(mx.array_equal(second, expected)),
                    np.array(all((other == sum(range(size))).all().item() for other in others)),
                    np.array((gathered == mx.repeat(mx.arange(size), 3)).all()),
                ]
    return found


def layers_of_a_patched_model() -> dict[str, bool]:
    """Which layers are patched that ``shard()`` and MLX make. In a group of one process."""

    def makers() -> list[Any]:
        dense, quantized = nn.AllToShardedLinear.from_linear, nn.QuantizedShardedToAllLinear.from_quantized_linear
        return [dense.__func__, quantized.__func__]

    model = Architecture("llama", {"tie_word_embeddings": False}).build()
    theirs = makers()
    mlx_anvil.patch(model)
    found = {
        "patch changes MLX's classes": makers() != theirs,
        "a layer of no model": is_patched(nn.ShardedToAllLinear.from_linear(nn.Linear(8, 8))),
    }
    model.shard()
    made = model.layers[0].self_attn.o_proj
    found["a layer of the patched model"] = is_patched(made)
    mlx_anvil.unpatch(model)
    found["that layer after unpatch"] = is_patched(made)
    found["a layer made after unpatch"] = is_patched(nn.ShardedToAllLinear.from_linear(model.lm_head))
    return found | {"unpatch restores MLX's classes": makers() == theirs}
