"""Attention over quantized and ragged caches on an NVIDIA GPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from harness import in_turn

import mlx.core as mx

from cuda_decoder import normal
from cuda_timing import Call, Row, compare, peak_bytes, with_peers
from cuda_torch import Shape, flex_attention_us
from mla_decode import RANK, ROPE, SCALE
from mlx_anvil import attention_plan, flash_attention, mla_decode
from mlx_anvil._check import dtype_name

DTYPE, HEADS, KV_HEADS, DIM, GROUP = mx.bfloat16, 32, 8, 128, 64
Codes = tuple[mx.array, ...]


def draw(queries: int, keys: int) -> list[mx.array]:
    return [normal((1, HEADS, queries, DIM), DTYPE)] + [normal((1, KV_HEADS, keys, DIM), DTYPE) for _ in range(2)]


def quantized(x: mx.array, bits: int) -> Codes:
    parts = tuple(mx.quantize(x, group_size=GROUP, bits=bits))
    mx.eval(parts)
    return parts


def of_mlx_lm(q: mx.array, keys: Codes, values: Codes, *, bits: int, causal: bool) -> mx.array:
    """What mlx-lm's models do with a quantized cache."""
    options: dict[str, Any] = {"group_size": GROUP, "bits": bits}
    groups = mx.reshape(q * DIM**-0.5, (1, KV_HEADS, HEADS // KV_HEADS, -1, DIM))
    wide = [tuple(mx.expand_dims(part, -3) for part in x) for x in (keys, values)]
    scores = mx.quantized_matmul(groups, *wide[0], transpose=True, **options)
    if causal:
        place, lowest = mx.arange(q.shape[2]), mx.array(mx.finfo(scores.dtype).min, scores.dtype)
        scores = mx.where(place[:, None] >= place[None], scores, lowest)
    out = mx.quantized_matmul(mx.softmax(scores, axis=-1, precise=True), *wide[1], transpose=False, **options)
    return mx.reshape(out, q.shape)


def quantized_cache_rows(copy: float | None) -> Iterator[Row]:
    for bits in (4, 8):
        sets = [draw(1, 32768) for _ in range(4)]
        codes = [(q, quantized(k, bits), quantized(v, bits)) for q, k, v in sets]
        contestants: dict[str, Call] = {
            "ours": in_turn([partial(flash_attention, *x, kv_bits=bits) for x in codes]),
            "bfloat16": in_turn([partial(flash_attention, *x) for x in sets]),
            "mlx_lm": in_turn([partial(of_mlx_lm, *x, bits=bits, causal=False) for x in codes]),
        }
        work: dict[str, float] = {"bytes": sum(part.nbytes for side in codes[0][1:] for part in side)}
        yield compare(f"decode over {bits}-bit keys, 32768 keys", contestants, work=work, copy=copy)
        del sets, codes, contestants
    for bits in (4, 8):
        length = 4096
        q, k, v = draw(length, length)
        keys, values = quantized(k, bits), quantized(v, bits)
        contestants = {
            "ours": partial(flash_attention, q, keys, values, mask="causal", kv_bits=bits),
            "bfloat16": partial(flash_attention, q, k, v, mask="causal"),
            "mlx_lm": partial(of_mlx_lm, q, keys, values, bits=bits, causal=True),
        }
        work = {"flops": 2.0 * HEADS * length * length * DIM}
        row = compare(f"prefill over {bits}-bit keys, {length} keys", contestants, work=work)
        yield row | {f"{label}_peak_bytes": peak_bytes(call) for label, call in contestants.items()}


def ragged_rows(copy: float | None) -> Iterator[Row]:
    count, length = 8, 2048
    for backward in (False, True):
        q, k, v = draw(count * length, count * length)
        d_out = normal(q.shape, DTYPE)
        ends = mx.arange(0, (count + 1) * length, length)
        batch = [x.reshape(x.shape[1], count, length, DIM).swapaxes(0, 1) for x in (q, k, v, d_out)]
        mx.eval(ends, batch)
        # Made once per step, for all layers, as FlexAttention's block mask is.
        plan = attention_plan(q_len=q.shape[2], kv_len=k.shape[2], cu_seqlens_q=ends)
        packed: Call = partial(flash_attention, q, k, v, mask="causal", plan=plan)
        dense: Call = partial(flash_attention, *batch[:3], mask="causal")
        if backward:
            attend = partial(flash_attention, mask="causal", plan=plan)
            packed = partial(mx.vjp, attend, [q, k, v], [d_out])
            dense = partial(mx.vjp, partial(flash_attention, mask="causal"), batch[:3], batch[3:])
        what = "forward and backward" if backward else "forward"
        work = {"flops": 2.0 * HEADS * count * length * length * DIM}
        row = compare(f"packed {what}, {count} x {length}", {"ours": packed, "batch": dense}, work=work)
        shape = Shape(1, HEADS, KV_HEADS, count * length, DIM)
        row = with_peers(row, flex_attention_us(shape, dtype_name(DTYPE), backward=backward, documents=count))
        yield row | {"ours_peak_bytes": peak_bytes(packed), "batch_peak_bytes": peak_bytes(dense)}
    lengths = mx.array([512, 1024, 2048, 4096, 8192, 16384, 24576, 32768])
    shapes = [(8, HEADS, 1, DIM)] + [(8, KV_HEADS, 32768, DIM)] * 2
    q, k, v = (normal(shape, DTYPE) for shape in shapes)
    # A step makes its plan once, for all layers.
    plan = attention_plan(q_len=1, kv_len=shapes[1][2], lengths=lengths)
    contestants: dict[str, Call] = {
        "ours": partial(flash_attention, q, k, v, plan=plan),
        "full": partial(flash_attention, q, k, v),
    }
    seen = int(lengths.sum()) * KV_HEADS * DIM * 2 * 2
    yield compare("decode of 8 lengths up to 32768", contestants, work={"bytes": seen}, copy=copy)
    for page in (16, 64):
        count = shapes[1][2] // page
        table = mx.random.permutation(8 * count).reshape(8, count)
        pages = [normal((8 * count, KV_HEADS, page, DIM), DTYPE) for _ in range(2)]
        of_pages = attention_plan(q_len=1, lengths=lengths, block_table=table, page_size=page)
        contestants = {
            "ours": partial(flash_attention, q, *pages, plan=of_pages),
            "contiguous": partial(flash_attention, q, k, v, plan=plan),
        }
        yield compare(f"decode of 8 lengths in pages of {page}", contestants, work={"bytes": seen}, copy=copy)


def latent_rows(copy: float | None) -> Iterator[Row]:
    keys = 32768
    for heads in (16, 128):
        q = [normal((1, heads, 1, dim), DTYPE) for dim in (RANK, ROPE)]
        sets = [[normal((1, 1, keys, dim), DTYPE) for dim in (RANK, ROPE)] for _ in range(2)]

        def composed(latent: mx.array, k_rope: mx.array, q: list[mx.array] = q) -> mx.array:
            scores = (q[0] * SCALE) @ latent.swapaxes(-1, -2) + (q[1] * SCALE) @ k_rope.swapaxes(-1, -2)
            return mx.softmax(scores, axis=-1, precise=True) @ latent

        contestants: dict[str, Call] = {
            "ours": in_turn([partial(mla_decode, *q, *cache, scale=SCALE) for cache in sets]),
            "mlx": in_turn([partial(composed, *cache) for cache in sets]),
        }
        work: dict[str, float] = {"bytes": sum(part.nbytes for part in sets[0])}
        yield compare(f"mla_decode of {heads} heads, {keys} keys", contestants, work=work, copy=copy)
