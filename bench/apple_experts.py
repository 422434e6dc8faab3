"""Rows of apple.py for mixtures of experts: 128 of 768 x 2048 (Qwen3-30B-A3B), 8 for a token, 4 bits in groups of 64.

MLX's side is what mlx-lm's SwitchGLU and its models launch. Of their sorts and sums only the bytes are counted, which
flatters MLX.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np

import apple_launches as launches
import mlx_anvil
from apple_launches import QUANTIZED
from apple_mlx import Counted, counted, times, traffic
from apple_rows import Part, Row
from estimate_launches import Launch, _draw

EXPERTS, CHOSEN, DIMS, HIDDEN = 128, 8, 2048, 768
FORMAT: dict[str, Any] = {"group_size": 64, "bits": 4}
SORTED_PAIRS = 64  # from which on SwitchGLU sorts, and ours on a GPU
# Pairs of four experts that stand for all where an expert has 32 on average: every other one has more than 32.
COUNTS = (26, 31, 33, 38)
RHS_ROWS, RHS_OUTPUTS = 16, 32


def matrix_bytes(outputs: int, columns: int) -> float:
    return outputs * columns * (0.5 + 4 / 64)


def read_experts(tokens: int) -> float:
    """How many experts tokens choose together, on average."""
    return EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** tokens)


# ---- our calls


def _random(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.float16)


def _matrices(experts: int, outputs: int, columns: int) -> tuple[mx.array, ...]:
    codes = np.random.default_rng(0).integers(0, 1 << 32, (experts, outputs, columns // 8), np.uint32)
    scales = _random(experts, outputs, columns // 64) / 64
    return mx.array(codes), scales, scales * -8


def _ids_of(counts: Sequence[int]) -> mx.array:
    return mx.array(np.repeat(np.arange(len(counts)), counts).astype(np.int32))


def _chosen(tokens: int, experts: int) -> mx.array:
    scores = np.random.default_rng(1).random((tokens, experts))
    return mx.array(np.argsort(scores, axis=-1)[:, :CHOSEN].astype(np.int32))


def product_of_token(outputs: int, columns: int) -> mx.array:
    """One token, by 8 experts."""
    return mlx_anvil.gather_quantized_matmul(
        _random(1, 1, columns), *_matrices(CHOSEN, outputs, columns), rhs_indices=mx.arange(CHOSEN), **FORMAT
    )


def sorted_product(counts: Sequence[int], outputs: int, columns: int) -> mx.array:
    """Rows that are sorted by expert, `counts` of each."""
    ids = _ids_of(counts)
    return mlx_anvil.gather_quantized_matmul(
        _random(ids.size, 1, columns), *_matrices(len(counts), outputs, columns), rhs_indices=ids,
        sorted_indices=True, **FORMAT,
    )  # fmt: skip


def block(ids: mx.array, experts: int) -> mx.array:
    """All of quantized_experts."""
    gate, up, down = (_matrices(experts, *s) for s in ((HIDDEN, DIMS), (HIDDEN, DIMS), (DIMS, HIDDEN)))
    return mlx_anvil.quantized_experts(_random(ids.shape[0], DIMS), ids, _random(*ids.shape), gate, up, down, **FORMAT)


def block_of_tokens(tokens: int) -> mx.array:
    return block(_chosen(tokens, EXPERTS), EXPERTS)


def block_of_counts(counts: Sequence[int]) -> mx.array:
    return block(_ids_of(counts)[:, None], len(counts))


def permute(tokens: int) -> Any:
    return mlx_anvil.moe_permute(_random(tokens, DIMS), _chosen(tokens, EXPERTS), EXPERTS)


def combine(tokens: int) -> mx.array:
    pairs = mx.random.permutation(tokens * CHOSEN).astype(mx.int32).reshape(tokens, CHOSEN)
    return mlx_anvil.moe_combine(_random(tokens * CHOSEN, DIMS), _random(tokens, CHOSEN), pairs)


# ---- MLX's launches


def gather_qmv(pairs: int, experts: float, outputs: int, columns: int, shared: bool) -> Launch:
    """A row by a matrix, for each pair: two pairs are simulated. `shared`: all pairs have the same row."""
    part, words, groups = 64, columns // 8, columns // 64
    scales = _draw((2, part, groups), "float16")
    w = np.random.default_rng(1).integers(0, 1 << 32, (2, part, words), np.uint32)
    x = _draw((1 if shared else 2, 1, columns), "float16")

    def layout(array: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        strides = np.array(array.strides, np.int64) // array.itemsize
        return 1, np.array(array.shape, np.int32), strides

    one, ids = np.ones(1, np.int64), np.arange(2, dtype=np.uint32)
    lhs = np.zeros(2, np.uint32) if shared else ids
    buffers = [w, scales, scales.copy(), x, lhs, ids, np.zeros((2, 1, part), np.float16), columns, part]
    buffers += [*layout(x), *layout(w), layout(scales)[2], layout(scales)[2], 1, np.array([2], np.int32), one, one]
    factors = experts * outputs * groups * 2
    sizes = {"w": experts * outputs * words * 4, "scales": factors, "biases": factors, "y": pairs * outputs * 2}
    sizes |= {"x": (1 if shared else pairs) * columns * 2, "lhs_indices": pairs * 4, "rhs_indices": pairs * 4}
    return Launch(QUANTIZED, "affine_gather_qmv_fast", ("half", 64, 4, "false"), dict(enumerate(buffers)), (1, outputs // 8, pairs),
                  (1, part // 8, 2), (32, 2, 1), {}, sizes)  # fmt: skip


def gather_rhs(tokens: int, outputs: int, columns: int) -> Launch:
    """Sorted rows, 32 of an expert on average: those of four experts and four tiles of outputs are simulated."""
    experts, part = len(COUNTS), 4 * RHS_OUTPUTS
    share = tokens * CHOSEN / sum(COUNTS)
    scales = _draw((experts, part, columns // 64), "float16")
    w = np.random.default_rng(1).integers(0, 1 << 32, (experts, part, columns // 8), np.uint32)
    x = _draw((sum(COUNTS), 1, columns), "float16")
    offsets = np.concatenate([[0], np.cumsum(COUNTS)[:-1]]).astype(np.int32)
    out = np.zeros((len(x), 1, part), np.float16)
    buffers = [x, w, scales, scales.copy(), offsets, out, len(x), part, columns, experts]
    tiles = sum(ceil(count / RHS_ROWS) for count in COUNTS)
    factors = EXPERTS * outputs * columns // 64 * 2
    sizes = {"w": EXPERTS * outputs * columns // 2, "scales": factors, "biases": factors}
    sizes |= {"x": tokens * CHOSEN * columns * 2, "y": tokens * CHOSEN * outputs * 2}
    return Launch(
        QUANTIZED, "affine_gather_qmm_rhs", ("half", 64, 4, RHS_ROWS, RHS_OUTPUTS, 32, 1, 2, "true"),
        dict(enumerate(buffers)), (outputs // RHS_OUTPUTS, ceil(tiles * share), 1), (part // RHS_OUTPUTS, tiles, 1),
        (32, 2, 1), {200: False, 201: True, 202: True}, sizes,
    )  # fmt: skip


def times_weights(rows: int, columns: int) -> Launch:
    """Rows times a number each: up to 32 rows are simulated."""
    part = min(rows, 32)
    y, weights = _draw((part, columns), "float16"), _draw((part, 1), "float16")
    buffers = dict(enumerate([y, weights, np.zeros_like(y), np.array([columns, 1]), np.array([1, 0])]))
    wide, high = launches._block(columns, rows)
    grid, sample = ((columns // wide, ceil(n / high), 1) for n in (rows, part))
    size = rows * columns * 2.0
    return Launch(("binary_ops.h", "binary.h"), "binary_g_nd2", ("half", "half", "Multiply", "int"), buffers, grid,
                  sample, (wide, high, 1), {}, {"a": size, "b": rows * 2, "c": size})  # fmt: skip


def product(tokens: int, outputs: int, columns: int, shared: bool = True) -> list[Counted]:
    """Of the pairs of tokens, as GatherQMM chooses: one kernel for few pairs of an expert, and one for many."""
    pairs = tokens * CHOSEN
    if pairs >= SORTED_PAIRS and pairs >= 4 * EXPERTS:
        found = counted(gather_rhs, tokens, outputs, columns)
        return [traffic("offsets of experts", pairs * 4, EXPERTS * 4), found]
    whole = 512 * ceil(columns / 512)
    found = counted(gather_qmv, pairs, read_experts(tokens), outputs, whole, shared and tokens == 1)
    if whole == columns:
        return [found]
    # Mesa does not compile MLX's kernel for these, which runs whole blocks of 512 columns too, and checks their ends.
    fewer = vars(times(found, columns / whole).work)
    moved = {name: fewer[name] for name in ("bytes_read", "bytes_written", "cache_bytes", "port_cycles")}
    return [replace(found, work=replace(found.work, **moved))]


def sort_rows(tokens: int) -> list[Counted]:
    """Two sorts, the token and the expert of each place, and the rows."""
    pairs = tokens * CHOSEN
    small = [traffic(name, pairs * 4, pairs * 4) for name in ("argsort", "argsort", "divide", "take ids")]
    return [*small, counted(launches.gather, pairs, DIMS, "float16")]


def weigh_and_sum(tokens: int, ordered: bool) -> list[Counted]:
    pairs = tokens * CHOSEN
    rows, sums = pairs * DIMS * 2, tokens * DIMS * 2
    back = [] if ordered else [counted(launches.gather, pairs, DIMS, "float16")]
    return [*back, counted(times_weights, pairs, DIMS), traffic("sum", rows, sums)]


def switch_glu(tokens: int) -> list[Counted]:
    ordered = tokens * CHOSEN < SORTED_PAIRS
    activation = counted(launches.swiglu, tokens * CHOSEN * HIDDEN)
    sides = product(tokens, HIDDEN, DIMS)
    before = [] if ordered else sort_rows(tokens)
    return [*before, *2 * sides, activation, *product(tokens, DIMS, HIDDEN, False), *weigh_and_sum(tokens, ordered)]


# ---- rows


def product_rows() -> Iterator[Row]:
    for outputs, columns in ((HIDDEN, DIMS), (DIMS, HIDDEN)):
        name = f"{columns} to {outputs}"
        read, written = CHOSEN * matrix_bytes(outputs, columns) + columns * 2, CHOSEN * outputs * 2
        yield Row("gather_quantized_matmul", f"1 token, {name}", (product_of_token, (outputs, columns)), 1,
                  lambda _, o=outputs, c=columns: product(1, o, c), {"": (read, written)})  # fmt: skip
        tokens, part = 512, 128
        pairs = tokens * CHOSEN
        read, written = EXPERTS * matrix_bytes(outputs, columns) + pairs * columns * 2, pairs * outputs * 2
        yield Row(
            "gather_quantized_matmul", f"{tokens} tokens, {name}", (sorted_product, (COUNTS, part, columns)),
            pairs * outputs / (sum(COUNTS) * part), lambda _, n=tokens, o=outputs, c=columns: product(n, o, c),
            {"gather_tiles": (read, written)}, skip=("table",), others=(_table(pairs),),
        )  # fmt: skip


def _table(pairs: int) -> Part:
    """The launch that finds the tiles of sorted pairs: one threadgroup, so all pairs are simulated."""
    counts = np.random.default_rng(2).multinomial(pairs, [1 / EXPERTS] * EXPERTS)
    return Part((sorted_product, (tuple(map(int, counts)), 32, 64)), keep=("table",))


def block_rows() -> Iterator[Row]:
    for tokens in (1, 4, 8, 16, 512):
        pairs, experts = tokens * CHOSEN, read_experts(tokens)
        few = pairs < 4 * EXPERTS
        ordered = pairs < SORTED_PAIRS
        gated = (2 * experts * matrix_bytes(HIDDEN, DIMS) + (tokens if ordered else pairs) * DIMS * 2,
                 pairs * HIDDEN * 2)  # fmt: skip
        down = (experts * matrix_bytes(DIMS, HIDDEN) + pairs * HIDDEN * 2, pairs * DIMS * 2)
        moved = {"gather_few_gated": gated, "gather_tiles_gated": gated, "gather_few_float": down,
                 "gather_tiles_transposed": down}  # fmt: skip
        call: tuple[Callable[..., Any], tuple[Any, ...]] = (block_of_tokens, (tokens,))
        scale, others = 1.0, []
        skip: tuple[str, ...] = ()
        if not few:
            call, scale = (block_of_counts, (COUNTS,)), pairs / sum(COUNTS)
            skip = ("table", "moe")
            table = _table(pairs)
            others = [Part((permute, (tokens,))), table, table, Part((combine, (tokens,)))]
        yield Row("quantized_experts", f"{tokens} token{'s' if tokens > 1 else ''}", call, scale,
                  lambda _, n=tokens: switch_glu(n), moved, skip=skip, others=tuple(others))  # fmt: skip


def end_rows() -> Iterator[Row]:
    """The sort, and the weighted sum."""
    for tokens in (8, 512, 2048):
        yield Row("moe_permute", f"{tokens} tokens", (permute, (tokens,)), 1, lambda _, n=tokens: sort_rows(n))
    for tokens in (1, 512, 2048):
        part = min(tokens, 128)
        moved = (tokens * CHOSEN * DIMS * 2, tokens * DIMS * 2)
        yield Row("moe_combine", f"{tokens} token{'s' if tokens > 1 else ''}", (combine, (part,)), tokens / part,
                  lambda _, n=tokens: weigh_and_sum(n, n * CHOSEN < SORTED_PAIRS), {"": moved})  # fmt: skip


FAMILIES: list[Callable[[], Iterator[Row]]] = [product_rows, block_rows, end_rows]
