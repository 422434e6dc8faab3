"""Products with quantized weights, and quantized_argmax, on an NVIDIA GPU: against MLX's product, a dense product of the
dequantised weights, dequantising before a dense product, and PyTorch's int4 product."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from harness import in_turn

import mlx.core as mx

from cuda_decoder import BITS, GROUP_SIZE, HALF_DTYPES, VOCABULARY, WIDTH, draw_quantized, normal
from cuda_timing import Call, Row, compare
from mlx_anvil import quantized_argmax, quantized_matmul
from mlx_anvil._check import dtype_name

MORE_THAN_CACHE = 200 << 20
OPTIONS = {"group_size": GROUP_SIZE, "bits": BITS}
SHAPES = ((4096, 4096), (4096, 14336), (8192, 8192), (4096, 128256))
LONGEST_CHAIN = 16
OTHER_FORMATS: tuple[dict[str, Any], ...] = (
    {"group_size": 64, "bits": 3},
    {"group_size": 64, "bits": 8},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
)


def in_chain(product: Callable[..., mx.array], x: mx.array, matrices: list[list[mx.array]]) -> Call:
    """A chain of products with different matrices, in which each uses the previous result, as in a model. The chain
    restarts with x from time to time, before its numbers overflow."""
    turn, of_last, calls = itertools.cycle(matrices), [x], itertools.count()

    def call() -> mx.array:
        if next(calls) % LONGEST_CHAIN == 0:
            of_last[0] = x
        result = product(of_last[0], *next(turn))
        rows, columns = x.shape
        # No copy: a part of memory.
        of_last[0] = result[:, :columns] if rows == 1 else result.reshape(-1)[: x.size].reshape(x.shape)
        return result

    return call


def int4mm_us(columns: int, outputs: int, rows: int) -> float | None:
    """Microseconds of PyTorch's int4 product in bfloat16, in a CUDA graph. None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    sets = []
    for _ in range(1 + MORE_THAN_CACHE // (columns * outputs // 2)):
        codes = torch.randint(0, 255, (outputs, columns // 2), dtype=torch.uint8, device="cuda")
        factors = torch.randn(columns // GROUP_SIZE, outputs, 2, device="cuda").bfloat16()
        sets.append((torch._convert_weight_to_int4pack(codes, 8), factors))
    x = torch.randn(rows, columns, device="cuda").bfloat16()
    torch._weight_int4pack_mm(x, sets[0][0], GROUP_SIZE, sets[0][1])
    graph, calls = torch.cuda.CUDAGraph(), 4 * len(sets)
    with torch.cuda.graph(graph):
        for packed, factors in itertools.islice(itertools.cycle(sets), calls):
            torch._weight_int4pack_mm(x, packed, GROUP_SIZE, factors)
    seconds = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / calls)
    return round(sorted(seconds)[len(seconds) // 2] * 1e6, 2)


def with_int4mm(row: Row, dtype: mx.Dtype, *sizes: int) -> Row:
    us = int4mm_us(*sizes) if dtype == mx.bfloat16 else None
    return row | {"int4mm_us": us, "times_int4mm": round(us / row["ours_us"], 3)} if us else row


def few_rows(copy: float | None) -> Iterator[Row]:
    for (columns, outputs), dtype in itertools.product(SHAPES, HALF_DTYPES):
        one = sum(part.nbytes for part in draw_quantized(outputs, columns, dtype))
        matrices = [draw_quantized(outputs, columns, dtype) for _ in range(1 + MORE_THAN_CACHE // one)]
        for rows in (1, 8):
            x = normal((rows, columns), dtype)
            contestants = {
                "ours": in_chain(partial(quantized_matmul, **OPTIONS), x, matrices),
                "mlx": in_chain(partial(mx.quantized_matmul, **OPTIONS), x, matrices),
            }
            what = f"quantized_matmul 4-bit {dtype_name(dtype)} {columns}->{outputs}, {rows} rows"
            row = compare(what, contestants, work={"bytes": one}, copy=copy)
            yield with_int4mm(row, dtype, columns, outputs, rows)


def against_dense(
    columns: int, outputs: int, rows: int, dtype: mx.Dtype, transpose: bool = True, options: dict[str, Any] = OPTIONS
) -> Row:
    matrix = mx.quantize(normal((outputs, columns), dtype), **options)
    dequantized = mx.dequantize(*matrix, dtype=dtype, **options)
    mx.eval(matrix, dequantized)
    x = normal((rows, columns if transpose else outputs), dtype)

    def dense(weights: mx.array) -> mx.array:
        return x @ (weights.T if transpose else weights)

    contestants: dict[str, Call] = {
        "ours": partial(quantized_matmul, x, *matrix, transpose=transpose, **options),
        "mlx": partial(mx.quantized_matmul, x, *matrix, transpose=transpose, **options),
        "dense": partial(dense, dequantized),
        "dequantized": lambda: dense(mx.dequantize(*matrix, dtype=dtype, **options)),
    }
    format = options["mode"] if "mode" in options else f"{options['bits']}-bit"
    sizes = f"{columns}->{outputs}" if transpose else f"{outputs}->{columns} (x W)"
    what = f"quantized_matmul {format} {dtype_name(dtype)} {sizes}, {rows} rows"
    return compare(what, contestants, work={"flops": 2.0 * columns * outputs * rows})


def many_rows() -> Iterator[Row]:
    for (columns, outputs), dtype, rows in itertools.product(
        ((4096, 14336), (14336, 4096)), HALF_DTYPES, (16, 64, 128, 512)
    ):
        row = against_dense(columns, outputs, rows, dtype)
        yield with_int4mm(row, dtype, columns, outputs, rows) if rows == 16 else row
    for rows in (16, 64, 512):
        yield against_dense(4096, 14336, rows, mx.bfloat16, transpose=False)
    for options, rows in itertools.product(OTHER_FORMATS, (16, 64)):
        yield against_dense(4096, 14336, rows, mx.bfloat16, options=options)


def head_rows(copy: float | None) -> Iterator[Row]:
    def composed(x: mx.array, *head: mx.array) -> mx.array:
        return mx.argmax(mx.quantized_matmul(x, *head, **OPTIONS), axis=-1)

    for dtype in HALF_DTYPES:
        head, x = draw_quantized(VOCABULARY, WIDTH, dtype), normal((1, WIDTH), dtype)
        contestants = {
            "ours": in_turn([partial(quantized_argmax, x, *head, **OPTIONS)]),
            "product": in_turn([partial(quantized_matmul, x, *head, **OPTIONS)]),
            "mlx": in_turn([partial(composed, x, *head)]),
        }
        what = f"quantized_argmax 4-bit {dtype_name(dtype)} {WIDTH}->{VOCABULARY}, 1 row"
        yield compare(what, contestants, work={"bytes": sum(part.nbytes for part in head)}, copy=copy)


def quantized_rows(copy: float | None) -> Iterator[Row]:
    yield from few_rows(copy)
    yield from many_rows()
    yield from head_rows(copy)
