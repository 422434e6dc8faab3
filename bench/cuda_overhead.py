"""CPU time of a call: in Python, and in its evaluation (allocation, encoding of its kernels)."""

import time
from collections.abc import Iterator
from functools import partial

import mlx.core as mx

from cuda_timing import Call, Row
from mlx_anvil import flash_attention, quantized_argmax, quantized_matmul, rms_norm, rope_and_cache, rope_qk

CALLS, ROUNDS = 40, 30


def host_seconds(
    contestants: dict[str, Call], calls: int = CALLS, rounds: int = ROUNDS
) -> dict[str, tuple[float, float]]:
    """CPU seconds of one call in Python and in evaluation: the minimum over interleaved rounds."""
    least = dict.fromkeys(contestants, (float("inf"), float("inf")))
    for _ in range(rounds):
        for name, call in contestants.items():
            start = time.perf_counter()
            results = [call() for _ in range(calls)]
            made = time.perf_counter()
            mx.async_eval(results)
            evaluated = time.perf_counter()
            mx.synchronize()
            before = least[name]
            least[name] = (min(before[0], (made - start) / calls), min(before[1], (evaluated - made) / calls))
    return least


def overhead_rows(copy: float | None) -> Iterator[Row]:
    dtype, columns, heads, kv_heads, dims = mx.float16, 4096, 32, 8, 128
    x, residual = (mx.random.normal((1, columns)).astype(dtype) for _ in range(2))
    norm = mx.ones((columns,), dtype)
    w = mx.quantize(mx.random.normal((columns, columns)).astype(dtype), group_size=64, bits=4)
    q, k = (mx.random.normal((1, n, 1, dims)).astype(dtype) for n in (heads, kv_heads))
    keys, values = (mx.random.normal((1, kv_heads, 1024, dims)).astype(dtype) for _ in range(2))
    mx.eval(x, residual, norm, w, q, k, keys, values)
    scale = dims**-0.5
    quantized = {"group_size": 64, "bits": 4}

    def rope(x: mx.array) -> mx.array:
        return mx.fast.rope(x, dims, traditional=False, base=10000.0, scale=1.0, offset=5)

    caches = {who: [mx.zeros_like(keys), mx.zeros_like(values)] for who in ("ours", "mlx")}

    def ours_in_cache() -> mx.array:
        rotated, *caches["ours"] = rope_and_cache(q, k, k, *caches["ours"], dims, offset=5)
        return rotated

    def mlx_in_cache() -> mx.array:
        for cache, rows in zip(caches["mlx"], (rope(k), k), strict=True):
            cache[..., 5:6, :] = rows
        return rope(q)

    calls: dict[str, dict[str, Call]] = {
        "product of one row, 4 bits": {
            "ours": partial(quantized_matmul, x, *w, **quantized),
            "mlx": partial(mx.quantized_matmul, x, *w, **quantized),
        },
        "rms_norm": {"ours": partial(rms_norm, x, norm), "mlx": partial(mx.fast.rms_norm, x, norm, 1e-5)},
        "rms_norm with residual (MLX: a sum and a norm)": {
            "ours": lambda: rms_norm(x, norm, residual=residual),
            "mlx": lambda: mx.fast.rms_norm(x + residual, norm, 1e-5),
        },
        "rope_qk (MLX: two of rope)": {
            "ours": lambda: rope_qk(q, k, dims, offset=5),
            "mlx": lambda: [rope(q), rope(k)],
        },
        "rope_and_cache (MLX: two of rope, two slice updates)": {"ours": ours_in_cache, "mlx": mlx_in_cache},
        "attention of one query, 1024 keys": {
            "ours": partial(flash_attention, q, keys, values, scale=scale),
            "mlx": partial(mx.fast.scaled_dot_product_attention, q, keys, values, scale=scale),
        },
        "quantized_argmax": {"ours": partial(quantized_argmax, x, *w, **quantized)},
    }
    for what, contestants in calls.items():
        row: Row = {"what": what}
        for name, (python, evaluation) in host_seconds(contestants).items():
            row |= {f"{name}_python_us": round(python * 1e6, 2), f"{name}_eval_us": round(evaluation * 1e6, 2)}
        yield row
