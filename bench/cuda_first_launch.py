"""What cubins are for: the time until the first tokens of a process, with and without them.

Each measurement is a process of its own, with the driver's cache on disk off (CUDA_CACHE_DISABLE), so that what is assembled is
assembled then. Weights lie on the GPU before the clock starts; a few layers have all the kernels that more would have. Run as a
script, it is one such process.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import mlx.core as mx

import mlx_anvil
from cuda_decoder import BITS, GROUP_SIZE, VOCABULARY, WIDTH, Layer, draw_quantized, next_token, normal
from cuda_timing import Row
from mlx_anvil._check import dtype_name

DTYPE = mx.bfloat16
LAYERS, PROMPT, PROCESSES = 2, 512, 5


def first_tokens() -> Row:
    """Seconds until the prompt's token is there, and then until the one after it; kernels by where they came from."""
    layers, head = [Layer(DTYPE) for _ in range(LAYERS)], draw_quantized(VOCABULARY, WIDTH, DTYPE)
    norm, prompt = mx.ones(WIDTH, DTYPE), normal((PROMPT, WIDTH), DTYPE)
    mx.eval(norm, [layer.norms for layer in layers])
    mx.synchronize()
    with mlx_anvil.trace() as trace:
        start = time.perf_counter()
        token = next_token(layers, norm, head, prompt, 0)
        mx.eval(token)
        first = time.perf_counter()
        embedded = mlx_anvil.quantized_embedding(token, *head, dtype=DTYPE, group_size=GROUP_SIZE, bits=BITS)
        mx.eval(next_token(layers, norm, head, embedded, PROMPT))
        second = time.perf_counter()
    ours = {event.kernel: event.device for event in trace.events if any(event.grid)}  # not those of MLX
    cubins = sum(device.startswith("cuda (") for device in ours.values())
    return {"first_s": first - start, "second_s": second - first, "cubins": cubins, "ptx": len(ours) - cubins}


def first_rows(copy: float | None) -> Iterator[Row]:
    runs: dict[str, list[Row]] = {"1": [], "0": []}
    for attempt in range(PROCESSES + 1):
        for cubins, rows in runs.items():
            environment = {**os.environ, "CUDA_CACHE_DISABLE": "1", "MLX_ANVIL_CUBINS": cubins}
            command = [sys.executable, __file__]
            result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            if attempt > 0:  # the first fills what MLX itself keeps on disk
                rows.append(json.loads(result.stdout.splitlines()[-1]))
    for cubins, rows in runs.items():
        what = "with cubins" if cubins == "1" else "PTX alone"
        row: Row = {"what": f"first tokens of a process, 8B shape, {LAYERS} layers, {dtype_name(DTYPE)}, {what}"}
        for name in ("first_s", "second_s"):
            seconds = [one[name] for one in rows]
            row |= {name: round(statistics.median(seconds), 4), f"{name}_all": [round(value, 4) for value in seconds]}
        yield row | {name: rows[0][name] for name in ("cubins", "ptx")}


if __name__ == "__main__":
    mx.set_default_device(mx.gpu)
    print(json.dumps(first_tokens()))
