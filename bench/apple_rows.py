"""The calls that apple.py counts: ours, and what MLX launches for the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import mlx.core as mx

import apple_launches as launches
import apple_mlx as theirs
import mlx_anvil
from apple_mlx import Architecture, Counted, backward_chunks

Call = tuple[Callable[..., Any], tuple[Any, ...]]
HEADS, KV_HEADS, COLUMNS = 32, 8, 4096
FEW_ROWS = "quantized_matmul.mlx_few_rows"


@dataclass(frozen=True)
class Part:
    """Launches of ours that another call makes, `scale` times smaller, whose names have one of `keep`."""

    call: Call
    scale: float = 1
    keep: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Row:
    """A call of ours that is `scale` times smaller than the real one, and MLX's launches for the real one.

    `moved` are bytes that the real call's launches read and write, by a part of the kernel's name; those of others grow
    with `scale`. `left` are MLX's launches for an op of MLX's that ours runs instead of its kernel. `chunks` is how many
    launches share a launch's work on a chip.
    """

    op: str
    what: str
    call: Call
    scale: float
    mlx: Callable[[Architecture], Sequence[Counted]]
    moved: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    dtype: str = "float16"
    skip: tuple[str, ...] = ()  # launches whose names have one of these are not of the row
    others: tuple[Part, ...] = ()  # launches that `call` makes with other sizes, or not at all
    differ: str = ""  # by what launches of ours differ between chips: "cores", or a choice of docs/tuning.md
    left: Callable[[Architecture], Sequence[Counted]] | None = None
    chunks: Callable[[str], int] = lambda chip: 1


# ---- our calls


def _random(*shape: int, dtype: str = "float16") -> mx.array:
    return mx.random.normal(shape).astype(getattr(mx, dtype))


def attend(
    heads: int, rows: int, keys: int, dim: int, causal: bool, dtype: str = "float16", kv_heads: int = 1
) -> mx.array:
    k, v = (_random(1, kv_heads, keys, dim, dtype=dtype) for _ in range(2))
    q = _random(1, heads, rows, dim, dtype=dtype)
    return mlx_anvil.flash_attention(q, k, v, mask="causal" if causal else None)


def attention_gradients(length: int, dim: int, causal: bool) -> list[mx.array]:
    arrays = [_random(1, 1, length, dim) for _ in range(4)]
    mask = "causal" if causal else None
    return mx.vjp(lambda q, k, v: mlx_anvil.flash_attention(q, k, v, mask=mask), arrays[:3], arrays[3:])[1]


def _matrix(outputs: int, columns: int) -> tuple[mx.array, ...]:
    return mx.quantize(_random(outputs, columns), group_size=64, bits=4)


def product(rows: int, outputs: int, columns: int) -> mx.array:
    w = _matrix(outputs, columns)
    return mlx_anvil.quantized_matmul(_random(rows, columns), *w, transpose=True, group_size=64, bits=4)


def swiglu(rows: int, outputs: int, columns: int) -> mx.array:
    gate, up = (_matrix(outputs, columns) for _ in range(2))
    return mlx_anvil.quantized_swiglu(_random(rows, columns), gate, up, group_size=64, bits=4)


def head(rows: int, outputs: int, columns: int) -> mx.array:
    return mlx_anvil.quantized_argmax(_random(rows, columns), *_matrix(outputs, columns), group_size=64, bits=4)


def embed(ids: int, columns: int) -> mx.array:
    chosen = mx.random.randint(0, 2048, (ids,))
    return mlx_anvil.quantized_embedding(chosen, *_matrix(2048, columns), group_size=64, bits=4)


def norm(rows: int, columns: int, residual: bool) -> Any:
    x, weight = _random(rows, columns), _random(columns)
    return mlx_anvil.rms_norm(x, weight, 1e-5, residual=_random(rows, columns) if residual else None)


def rotate(length: int) -> Any:
    return mlx_anvil.rope_qk(_random(1, HEADS, length, 128), _random(1, KV_HEADS, length, 128), 128, offset=100)


def gate(rows: int, columns: int) -> mx.array:
    return mlx_anvil.silu_gate(_random(rows, columns), _random(rows, columns))


# ---- rows


def attention_rows(dim: int, dtype: str = "float16") -> Iterator[Row]:
    """32 heads; 64 queries of one are simulated. With a causal mask they see half of the keys, as on average."""
    queries, size = 64, 4 if dtype == "float32" else 2
    short, long = (512, 2048) if dtype == "float32" else (1024, 4096)
    for length, causal in ((short, False), (long, False), (long, True)):
        keys = (length + queries) // 2 if causal else length
        moved = HEADS * length * dim * size
        yield Row(
            "attention", f"{length} x {dim}{', causal' if causal else ''}",
            (attend, (1, queries, keys, dim, causal, dtype)), HEADS * length / queries,
            lambda _, n=length, c=causal: theirs.attention(n, dim, HEADS, dtype, c), {"": (3 * moved, moved)}, dtype,
        )  # fmt: skip


def decode_rows() -> Iterator[Row]:
    """32 query heads, 8 of keys. All are simulated, because the parts of the keys depend on the heads and the cores."""
    dim = 128
    for keys in (1024, 4096, 32768):
        read, written = (2 * KV_HEADS * keys + HEADS) * dim * 2, HEADS * dim * 2
        yield Row(
            "decode", f"{keys} keys", (attend, (HEADS, 1, keys, dim, False, "float16", KV_HEADS)), 1,
            lambda chip, n=keys: theirs.decode(n, dim, HEADS, KV_HEADS, chip), {"decode_float": (read, written)},
            differ="cores",
        )  # fmt: skip


def backward_rows(dim: int, causal: bool) -> Iterator[Row]:
    """32 heads; one of 256 tokens is simulated, whose parts cost a little more than those of longer ones."""
    part = 256
    for length in (1024, 2048, 4096):
        size = HEADS * length * dim * 2.0
        # Pairs of a query and a key, in blocks of 64 queries, and two weights of each.
        blocks = [(n * (n + 64) / 2 if causal else n * n) for n in (length, part)]
        stored = HEADS * blocks[0] * 2 * 2
        moved = {"_delta": (2 * size, 2 * size / dim), "_dq_": (4 * size, size + stored)}
        moved |= {"_sums_": (size + stored / 2, size)}
        yield Row(
            "backward", f"{length} x {dim}{', causal' if causal else ''}", (attention_gradients, (part, dim, causal)),
            HEADS * blocks[0] / blocks[1], lambda chip, n=length: theirs.backward(n, dim, HEADS, causal, chip), moved,
            skip=("forward",), chunks=lambda chip, n=length: backward_chunks(HEADS, n, chip),
        )  # fmt: skip


def product_rows() -> Iterator[Row]:
    """4 bits in groups of 64. 4096 outputs, or up to 128 rows and 128 outputs, are simulated."""
    shapes = [(1, 4096, 4096), (1, 14336, 4096), (1, 4096, 14336)]
    shapes += [(rows, 4096, 4096) for rows in (2, 4, 5, 8)] + [(8, 14336, 4096)]
    shapes += [(rows, 4096, 4096) for rows in (9, 16, 32)] + [(16, 14336, 4096)]
    shapes += [(rows, 4096, 4096) for rows in (128, 512, 2048)]
    for rows, outputs, columns in shapes:
        part = (min(rows, 128), 4096 if rows <= 2 else 128)
        read, written = outputs * columns * (0.5 + 4 / 64) + rows * columns * 2, rows * outputs * 2

        def mlx(chip: Architecture, size: tuple[int, int, int] = (rows, outputs, columns)) -> list[Counted]:
            return theirs.product(*size, chip)

        yield Row(
            "product", f"{rows} row{'s' if rows > 1 else ''}, {columns} to {outputs}",
            (product, (part[0], part[1], columns)), rows * outputs / prod(part), mlx, {"": (read, written)},
            differ=FEW_ROWS if 2 <= rows <= 4 else "", left=mlx,
        )  # fmt: skip


def swiglu_rows() -> Iterator[Row]:
    """4096 to twice 14336; 4096 outputs, or 128, are simulated."""
    outputs = 14336
    for rows in (1, 2, 4, 8):
        part = 4096 if rows <= 2 else 128
        read = 2 * outputs * COLUMNS * (0.5 + 4 / 64) + rows * COLUMNS * 2
        yield Row(
            "quantized_swiglu", f"{rows} row{'s' if rows > 1 else ''}", (swiglu, (rows, part, COLUMNS)), outputs / part,
            lambda chip, n=rows: [*2 * theirs.product(n, outputs, COLUMNS, chip),
                                  theirs.counted(launches.swiglu, n * outputs)],
            {"swiglu": (read, rows * outputs * 2), "gated": (read, rows * outputs * 2),
             "silu_gate": (2 * rows * outputs * 2, rows * outputs * 2)},
            differ=FEW_ROWS if 2 <= rows <= 3 else "", left=lambda chip, n=rows: theirs.product(n, outputs, COLUMNS, chip),
        )  # fmt: skip


def head_rows() -> Iterator[Row]:
    """A vocabulary of 128256, of which 4096 are simulated."""
    outputs, part = 128256, 4096
    for rows in (1, 4, 8):
        read = outputs * COLUMNS * (0.5 + 4 / 64) + rows * COLUMNS * 2
        yield Row(
            "head", f"argmax, {rows} row{'s' if rows > 1 else ''}", (head, (rows, part, COLUMNS)), outputs / part,
            lambda chip, n=rows: [*theirs.product(n, outputs, COLUMNS, chip),
                                  theirs.counted(launches.argmax, n, outputs)],
            {"quantized_head_float": (read, rows * 4), "tiles": (read, rows * outputs * 2),
             "logits": (rows * outputs * 2, rows * outputs / 256)},
        )  # fmt: skip


def embedding_rows() -> Iterator[Row]:
    for ids in (1, 512, 2048):
        part = min(ids, 64)
        moved = (ids * COLUMNS * (0.5 + 4 / 64), ids * COLUMNS * 2)
        yield Row("embedding", f"{ids} id{'s' if ids > 1 else ''}", (embed, (part, COLUMNS)), ids / part,
                  lambda _, n=ids: theirs.embedding(n, COLUMNS), {"": moved})  # fmt: skip


def norm_rows() -> Iterator[Row]:
    """8 rows are simulated."""
    for residual in (False, True):
        for rows in (1, 512, 4096):
            size, part = rows * COLUMNS * 2, min(rows, 8)
            sums = [(launches.add, (rows * COLUMNS,))] if residual else []
            yield Row(
                "rms_norm", f"{rows} row{'s' if rows > 1 else ''}{', residual' if residual else ''}",
                (norm, (part, COLUMNS, residual)), rows / part,
                lambda _, n=rows, s=tuple(sums): [*(theirs.counted(make, *a) for make, a in s),
                                                  theirs.counted(launches.rms_norm, n, COLUMNS)],
                {"": ((1 + residual) * size, (1 + residual) * size)},
            )  # fmt: skip


def rope_rows() -> Iterator[Row]:
    """q with 32 heads and k with 8, head_dim 128; up to 1024 tokens are simulated."""
    for length in (1, 512, 2048):
        part = min(length, 1024)  # where a thread takes as many heads as in a longer call
        size = (HEADS + KV_HEADS) * length * 128 * 2
        yield Row("rope", f"{length} token{'s' if length > 1 else ''}", (rotate, (part,)), length / part,
                  lambda _, n=length: [theirs.counted(launches.rope, h, n, 128) for h in (HEADS, KV_HEADS)],
                  {"": (size, size)})  # fmt: skip


def gate_rows() -> Iterator[Row]:
    columns = 14336
    for rows in (1, 512, 2048):
        size, part = rows * columns * 2, min(rows, 4)
        yield Row("silu_gate", f"{rows} x {columns}", (gate, (part, columns)), rows / part,
                  lambda _, n=rows: [theirs.counted(launches.swiglu, n * columns)], {"": (2 * size, size)})  # fmt: skip


# Rows that share simulations are one family: a process computes it.
FAMILIES: list[Callable[[], Iterator[Row]]] = [
    decode_rows,
    product_rows,
    swiglu_rows,
    head_rows,
    lambda: attention_rows(64),
    lambda: attention_rows(128),
    lambda: attention_rows(128, "float32"),
    lambda: backward_rows(64, False),
    lambda: backward_rows(64, True),
    lambda: backward_rows(128, False),
    lambda: backward_rows(128, True),
    norm_rows,
    rope_rows,
    gate_rows,
    embedding_rows,
]
