"""What cubins and prebuild() are for: the time until the first tokens of a process, with and without them.

Each measurement is a process of its own, with the driver's cache on disk off (CUDA_CACHE_DISABLE), so that what is
assembled is assembled then. Weights lie on the GPU before the clock starts; a few layers have all the kernels that more
would have. Run as a script, it is one such process.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

import mlx_anvil
from cuda_decoder import BITS, GROUP_SIZE, VOCABULARY, WIDTH, Layer, draw_quantized, next_token, normal
from cuda_timing import Row
from mlx_anvil._check import dtype_name

DTYPE = mx.bfloat16
LAYERS, PROMPT, PROCESSES = 2, 512, 5


def prebuilt(layers: list[Layer], norm: mx.array, head: list[mx.array], prompt: mx.array) -> mlx_anvil.Prebuilt:
    """Of the prompt's token and the next one, whose pipelines are being built when this returns."""
    caches = [(layer.keys[...], layer.values[...]) for layer in layers]

    def tokens() -> list[mx.array]:
        token = next_token(layers, norm, head, prompt, 0)
        return [token, next_token(layers, norm, head, embedding(token, head), PROMPT)]

    building = mlx_anvil.prebuild(nn.Module(), tokens)
    for layer, (keys, values) in zip(layers, caches, strict=True):
        layer.keys, layer.values = keys, values
    return building


def embedding(token: mx.array, head: list[mx.array]) -> mx.array:
    return mlx_anvil.quantized_embedding(token, *head, dtype=DTYPE, group_size=GROUP_SIZE, bits=BITS)


def first_tokens(prebuild: str) -> Row:
    """Seconds until the prompt's token is there, and then until the one after it; kernels by where they came from.

    Pipelines are built when they are launched; or, with `prebuild`, "beside" the first token, from the start of the
    clock on; or "before" it, as while the weights of a model are loaded.
    """
    layers, head = [Layer(DTYPE) for _ in range(LAYERS)], draw_quantized(VOCABULARY, WIDTH, DTYPE)
    norm, prompt = mx.ones(WIDTH, DTYPE), normal((PROMPT, WIDTH), DTYPE)
    mx.eval(norm, [layer.norms for layer in layers])
    mx.synchronize()
    if prebuild == "before":
        prebuilt(layers, norm, head, prompt).wait()
    with mlx_anvil.trace() as trace:
        start = time.perf_counter()
        if prebuild == "beside":
            prebuilt(layers, norm, head, prompt)
        token = next_token(layers, norm, head, prompt, 0)
        mx.eval(token)
        first = time.perf_counter()
        mx.eval(next_token(layers, norm, head, embedding(token, head), PROMPT))
        second = time.perf_counter()
    ours = {event.kernel: event.device for event in trace.events if any(event.grid)}  # not those of MLX
    cubins = sum(device.startswith("cuda (") for device in ours.values())
    return {"first_s": first - start, "second_s": second - first, "cubins": cubins, "ptx": len(ours) - cubins}


VARIANTS = {  # MLX_ANVIL_CUBINS, arguments
    "with cubins": ("1", []),
    "PTX alone": ("0", []),
    "PTX alone, prebuild beside it": ("0", ["beside"]),
    "PTX alone, prebuild before it": ("0", ["before"]),
}


def first_rows(copy: float | None) -> Iterator[Row]:
    runs: dict[str, list[Row]] = {what: [] for what in VARIANTS}
    for attempt in range(PROCESSES + 1):
        for what, (cubins, arguments) in VARIANTS.items():
            environment = {**os.environ, "CUDA_CACHE_DISABLE": "1", "MLX_ANVIL_CUBINS": cubins}
            command = [sys.executable, __file__, *arguments]
            result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            if attempt > 0:  # the first fills what MLX itself keeps on disk
                runs[what].append(json.loads(result.stdout.splitlines()[-1]))
    for what, rows in runs.items():
        row: Row = {"what": f"first tokens of a process, 8B shape, {LAYERS} layers, {dtype_name(DTYPE)}, {what}"}
        for name in ("first_s", "second_s"):
            seconds = [one[name] for one in rows]
            row |= {name: round(statistics.median(seconds), 4), f"{name}_all": [round(value, 4) for value in seconds]}
        yield row | {name: rows[0][name] for name in ("cubins", "ptx")}


if __name__ == "__main__":
    mx.set_default_device(mx.gpu)
    print(json.dumps(first_tokens(sys.argv[1] if len(sys.argv) > 1 else "")))
