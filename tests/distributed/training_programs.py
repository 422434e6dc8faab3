"""What the processes of test_training.py run."""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

from mlx_anvil import distributed

Arrays = dict[str, np.ndarray]
STEPS = 3
MAX_NORM = 0.5
# Odd sizes: no part is a multiple of the number of processes, and buckets end inside layers.
BUCKET_BYTES = 300
LAYERS, DIMS, BATCH = 10, 256, 384

OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "SGD": lambda: optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "RMSprop": lambda: optim.RMSprop(0.01),
    "Adagrad": lambda: optim.Adagrad(0.1),
    "AdaDelta": lambda: optim.AdaDelta(0.5),
    "Adam": lambda: optim.Adam(optim.cosine_decay(0.01, 5), bias_correction=True),
    "AdamW": lambda: optim.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: optim.Adamax(0.01),
    "Lion": lambda: optim.Lion(0.01, weight_decay=0.1),
    "Adafactor": lambda: optim.Adafactor(beta_1=0.9),
    "Muon": lambda: optim.Muon(0.01),
    "MultiOptimizer": lambda: optim.MultiOptimizer(
        [optim.Muon(0.01), optim.AdamW(0.01)], [lambda path, array: array.ndim == 2 and "layers.1" in path]
    ),
}


def small_model() -> nn.Module:
    mx.random.seed(1)
    model = nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 13), nn.LayerNorm(13), nn.Linear(13, 3))
    mx.eval(model.parameters())
    return model


def batches(rank: int) -> list[mx.array]:
    rng = np.random.default_rng(rank)
    return [mx.array(rng.standard_normal((5, 7)), mx.float32) for _ in range(2 * STEPS)]


def loss(model: nn.Module, inputs: mx.array) -> mx.array:
    return model(inputs).square().mean()


def arrays_of(tree: Any) -> Arrays:
    return {path: np.array(array) for path, array in tree_flatten(tree)}


def train(model: nn.Module, optimizer: Any, group: mx.distributed.Group, steps: range, averages: bool) -> None:
    """With ``averages``, the gradients are MLX's averages, clipped by MLX."""
    gradients_of = nn.value_and_grad(model, loss)
    given = batches(group.rank())
    for step in steps:
        _, gradients = gradients_of(model, given[step])
        if averages:
            mx.eval(gradients)
            gradients, _ = optim.clip_grad_norm(nn.average_gradients(gradients, group), MAX_NORM)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)


def optimizers(names: list[str]) -> dict[str, tuple[Arrays, Arrays, int, Arrays, Arrays, int]]:
    """For each: the parameters, the full state and the bytes of this process's state; the same without sharding."""
    group = mx.distributed.init()
    results = {}
    for name in names:
        model, alone = small_model(), small_model()
        sharded = distributed.ShardedOptimizer(OPTIMIZERS[name](), group, max_norm=MAX_NORM, bucket_bytes=BUCKET_BYTES)
        train(model, sharded, group, range(STEPS), averages=False)
        # Read the state into a new object, as after a checkpoint.
        resumed = distributed.ShardedOptimizer(OPTIMIZERS[name](), group, max_norm=MAX_NORM, bucket_bytes=BUCKET_BYTES)
        resumed.load_full_state(sharded.full_state(), model.trainable_parameters())
        train(model, resumed, group, range(STEPS, 2 * STEPS), averages=False)
        reference = OPTIMIZERS[name]()
        train(alone, reference, group, range(2 * STEPS), averages=True)
        ours = arrays_of(model.parameters()), arrays_of(resumed.full_state()), nbytes(resumed.state)
        results[name] = (*ours, arrays_of(alone.parameters()), arrays_of(reference.state), nbytes(reference.state))
    return results


def variants() -> dict[str, Arrays]:
    """The parameters after the same steps, made in several ways."""
    group = mx.distributed.init()
    parameters = {name: trained(name, group) for name in ("plain", "compiled", "averaged before")}
    mx.distributed.sum_scatter = sum_and_cut
    return parameters | {"with sum_scatter": trained("with sum_scatter", group)}


def trained(way: str, group: mx.distributed.Group) -> Arrays:
    model, averages = small_model(), way == "averaged before"
    optimizer = distributed.ShardedOptimizer(
        optim.AdamW(0.01), group, max_norm=MAX_NORM, bucket_bytes=BUCKET_BYTES, reduce=not averages
    )
    optimizer.init(model.trainable_parameters())
    gradients_of = nn.value_and_grad(model, loss)

    def step(inputs: mx.array) -> mx.array:
        value, gradients = gradients_of(model, inputs)
        optimizer.update(model, nn.average_gradients(gradients, group) if averages else gradients)
        return value

    state = [model.state, optimizer.state]
    if way == "compiled":
        step = mx.compile(step, inputs=state, outputs=state)
    for inputs in batches(group.rank()):
        mx.eval(step(inputs), state)
    return arrays_of(model.parameters())


def sum_and_cut(array: mx.array, *, group: mx.distributed.Group, stream: mx.Stream | None = None) -> mx.array:
    """mx.distributed.sum_scatter, which the ring has not."""
    length = array.shape[0] // group.size()
    total = mx.distributed.all_sum(array, group=group, stream=stream)
    return total[group.rank() * length : (group.rank() + 1) * length]


def nbytes(tree: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(tree))


def reduced(bucket_bytes: list[int]) -> list[tuple[Arrays, Arrays]]:
    """Means of gradients of unlike dtypes and sizes, ours and MLX's."""
    group = mx.distributed.init()
    mx.random.seed(group.rank())
    gradients = {
        "a": [mx.random.normal((3, 5)), mx.random.normal((1,)).astype(mx.float16)],
        "b": {"c": mx.random.normal((4, 700)), "d": mx.array(1.5 * group.rank())},
        "e": mx.random.normal((2, 0, 3)),
    }
    expected = nn.average_gradients(gradients, group)
    mx.eval(expected)
    results = []
    for each in bucket_bytes:
        mean = distributed.reduce_gradients(gradients, group, bucket_bytes=each)
        mx.eval(mean)
        results.append((arrays_of(tree_as_float32(mean)), arrays_of(tree_as_float32(expected))))
    return results


def tree_as_float32(tree: Any) -> Any:
    return nn.utils.tree_map(lambda array: array.astype(mx.float32), tree)


def times_of_sums(kinds: list[str]) -> list[list[float] | float]:
    """When the sums of rank 0's backward pass end, in seconds from its begin. The other rank has nothing to compute."""
    group = mx.distributed.init()
    model = nn.Sequential(*[nn.Linear(DIMS, DIMS, bias=False) for _ in range(LAYERS)])
    inputs = mx.random.normal((BATCH, DIMS))
    mx.eval(model.parameters(), inputs)
    results: list[list[float] | float] = []
    for kind in kinds:
        mx.eval(mx.distributed.all_sum(mx.zeros(1), group=group))
        begin = time.perf_counter()
        if group.rank() == 0:
            value, gradients = nn.value_and_grad(model, loss)(model, inputs)
            if kind == "reduce_gradients":
                mean = distributed.reduce_gradients(gradients, group, bucket_bytes=1)
            else:
                mean = nn.average_gradients(gradients, group, 1, mx.new_stream(mx.cpu))
            mx.eval(value, mean)
            results.append(time.perf_counter() - begin)
            continue
        times = []
        for _ in range(LAYERS):
            mx.eval(mx.distributed.all_sum(mx.zeros((DIMS, DIMS)), group=group))
            times.append(time.perf_counter() - begin)
        results.append(times)
    return results


def refused() -> list[str]:
    make = distributed.ShardedOptimizer
    model = small_model()
    sharded = make(optim.SGD(0.1))
    sharded.update(model, model.trainable_parameters())
    return [
        error(lambda: make(optim.Muon(0.1), split="elements")),
        error(lambda: make(optim.SGD(0.1), split="half")),
        error(lambda: make(optim.SGD(0.1), max_norm=0.0)),
        error(lambda: make(optim.SGD(0.1), bucket_bytes=0)),
        error(lambda: make(optim.SGD(0.1)).full_state()),
        error(lambda: sharded.update(model, {"layers": [{"weight": mx.zeros((11, 7))}]})),
        error(lambda: sharded.load_full_state(optim.SGD(0.1).state, model.trainable_parameters())),
        error(lambda: distributed.reduce_gradients({}, bucket_bytes=-1)),
    ]


def error(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as caught:
        return str(caught)
    return ""
