"""Calls of every op that between them ask for every kernel: all dtypes, tiles, formats and layouts that dispatches tell
apart. What they compute does not matter, only what they launch."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES

Call = Callable[[], object]


def silu_gate() -> Iterator[Call]:
    for dtype in DTYPES:
        whole = [mx.zeros((6, 10), dtype) for _ in range(4)]
        for a, b, c, d in (whole, [x[:, ::2] for x in whole]):
            yield lambda a=a, b=b, c=c: mx.vjp(mlx_anvil.silu_gate, [a, b], [c])
            yield lambda a=a, b=b, c=c, d=d: mx.jvp(mlx_anvil.silu_gate, [a, b], [c, d])


def gated() -> Iterator[Call]:
    for dtype, activation in product(DTYPES, ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")):
        function = partial(mlx_anvil.gated, activation=activation)
        whole = [mx.zeros((6, 10), dtype) for _ in range(4)]
        for a, b, c, d in (whole, [x[:, ::2] for x in whole]):
            yield partial(mx.vjp, function, [a, b], [c])
            yield partial(mx.jvp, function, [a, b], [c, d])


def _for_matrix_units(call: Call) -> Call:
    def chosen() -> object:
        if mx.default_device() == mx.gpu:  # which has them or not
            return call()
        with mlx_anvil.simulate(matrix_units=True):
            return call()

    chosen.for_matrix_units = True
    return chosen


# ---- flash_attention -------------------------------------------------------------------------------------------------

# Tiles are for head dims up to these or any between: each is tried, and one more.
HEAD_DIMS = tuple(sorted({d + e for d in (32, 64, 72, 80, 96, 128, 192, 256, 512) for e in (0, 1)}))
QUERIES, KEYS = 40, 300  # enough for every tile, and in a decode for keys in parts


def _attention(dtype: mx.Dtype, dim: int, value_dim: int, queries: int, heads: int = 2, **options: object) -> Call:
    q = mx.zeros((1, heads, queries, dim), dtype)
    k, v = (mx.zeros((1, 1, KEYS, d), dtype) for d in (dim, value_dim))

    def call() -> object:
        return mlx_anvil.flash_attention(q, k, v, **options)

    return call


def _attention_gradients(dtype: mx.Dtype, dim: int, value_dim: int, **options: object) -> Call:
    q = mx.zeros((1, 2, QUERIES, dim), dtype)
    k, v = (mx.zeros((1, 1, QUERIES, d), dtype) for d in (dim, value_dim))
    extra = {name: x for name, x in options.items() if isinstance(x, mx.array) and x.dtype != mx.bool_}
    fixed = {name: x for name, x in options.items() if name not in extra}

    def loss(q: mx.array, k: mx.array, v: mx.array, *arrays: mx.array) -> mx.array:
        out, lse = mlx_anvil.flash_attention(q, k, v, return_lse=True, **fixed, **dict(zip(extra, arrays, strict=True)))
        return out.sum() + lse.sum()

    return lambda: mx.grad(loss, argnums=tuple(range(3 + len(extra))))(q, k, v, *extra.values())


def _attention_options(dtype: mx.Dtype, queries: int, keys: int) -> Iterator[dict[str, object]]:
    sinks = mx.zeros((2,), dtype)
    masks = None, "causal", mx.ones((queries, keys), mx.bool_), mx.zeros((1, 1, queries, keys), dtype)
    for mask, with_sinks, softcap in product(masks, (False, True), (None, 5.0)):
        yield {"mask": mask, "softcap": softcap, **({"sinks": sinks} if with_sinks else {})}


def _attention_by_matrix_units(dtype: mx.Dtype) -> Iterator[Call]:
    for dim, value_dim in product(HEAD_DIMS, HEAD_DIMS):
        for queries in (1, QUERIES):
            yield _attention(dtype, dim, value_dim, queries)
        yield _attention_gradients(dtype, dim, value_dim)
    for queries, return_lse in product((1, QUERIES), (False, True)):
        for options in _attention_options(dtype, queries, KEYS):
            yield _attention(dtype, 64, 64, queries, return_lse=return_lse, **options)
    for options in _attention_options(dtype, QUERIES, QUERIES):
        yield _attention_gradients(dtype, 64, 64, **options)


def flash_attention() -> Iterator[Call]:
    for dtype in DTYPES:
        for dim, value_dim, (queries, heads) in product(
            HEAD_DIMS, HEAD_DIMS, ((1, 1), (1, 2), (2, 2), (4, 2), (QUERIES, 2))
        ):
            yield _attention(dtype, dim, value_dim, queries, heads)
        for dim, value_dim in product(HEAD_DIMS, HEAD_DIMS):
            yield _attention_gradients(dtype, dim, value_dim)
        if dtype != mx.float32:
            yield from map(_for_matrix_units, _attention_by_matrix_units(dtype))
        for queries, return_lse in product((1, QUERIES), (False, True)):
            for options in _attention_options(dtype, queries, KEYS):
                yield _attention(dtype, 64, 64, queries, return_lse=return_lse, **options)
        for options in _attention_options(dtype, QUERIES, QUERIES):
            yield _attention_gradients(dtype, 64, 64, **options)


# ---- quantized matrices ----------------------------------------------------------------------------------------------

MODES = {
    "affine": tuple(product((32, 64, 128), (2, 3, 4, 5, 6, 8))),
    "mxfp4": ((32, 4),),
    "mxfp8": ((32, 8),),
    "nvfp4": ((16, 4),),
}


def quantized_matmul() -> Iterator[Call]:
    for dtype, (mode, formats) in product(DTYPES, MODES.items()):
        for group_size, bits in formats:
            options = {"group_size": group_size, "bits": bits, "mode": mode}
            for outputs in (128, 512):  # a plain product sums so many rows of w in one part, or in several
                gate, up = (mx.quantize(mx.zeros((outputs, 128), dtype), **options) for _ in range(2))
                for rows in (*range(1, 9), 9, 40):
                    x = mx.zeros((rows, 128), dtype)
                    y = mx.zeros((rows, outputs), dtype)
                    yield lambda x=x, w=gate, o=options: mlx_anvil.quantized_matmul(x, *w, transpose=True, **o)
                    yield lambda y=y, w=gate, o=options: mlx_anvil.quantized_matmul(y, *w, transpose=False, **o)
                    yield lambda x=x, g=gate, u=up, o=options: mlx_anvil.quantized_swiglu(x, g, u, **o)
            # Tiles of matrix units for few, more (some of half as many) and many rows of w; with the last, eight rows of
            # x are not staged.
            for outputs, rows in product((128, 6144, 65536), (1, 8)) if mode == "affine" and bits == 4 else ():
                gate, up = (mx.quantize(mx.zeros((outputs, 256), dtype), **options) for _ in range(2))
                x = mx.zeros((rows, 256), dtype)
                yield _for_matrix_units(lambda x=x, w=gate, o=options: mlx_anvil.quantized_gemv(x, *w, **o))
                yield _for_matrix_units(lambda x=x, g=gate, u=up, o=options: mlx_anvil.quantized_swiglu(x, g, u, **o))


def quantized_embedding() -> Iterator[Call]:
    for dtype, (mode, formats) in product(DTYPES, MODES.items()):
        for group_size, bits in formats:
            options = {"group_size": group_size, "bits": bits, "mode": mode}
            matrix = mx.quantize(mx.zeros((5, 128), dtype), **options)
            for ids in (mx.zeros((3,), mx.int32), mx.zeros((3,), mx.uint64)):
                yield lambda i=ids, m=matrix, d=dtype, o=options: mlx_anvil.quantized_embedding(i, *m, dtype=d, **o)


def quantized_head() -> Iterator[Call]:
    """One block of rows of w, with a merge, and with several, of which the last gives the results."""
    for dtype, (mode, formats) in product(DTYPES, MODES.items()):
        for group_size, bits in formats:
            options = {"group_size": group_size, "bits": bits, "mode": mode}
            for outputs in (64, 128, 4096):
                matrix = mx.quantize(mx.zeros((outputs, 128), dtype), **options)
                for rows in range(1, 10):
                    x = mx.zeros((rows, 128), dtype)
                    yield lambda x=x, m=matrix, o=options: mlx_anvil.quantized_argmax(x, *m, **o)
                    yield lambda x=x, m=matrix, o=options: mlx_anvil.quantized_topk(x, *m, k=64, **o)


# ---- rope ------------------------------------------------------------------------------------------------------------


def rope() -> Iterator[Call]:
    for dtype, dim, traditional, given in product(DTYPES, (32, 13), (False, True), (False, True)):
        q, k = mx.zeros((2, 4, 3, dim), dtype), mx.zeros((2, 1, 3, dim), dtype)
        freqs = mx.ones((4,)) if given else None
        options = {
            "dims": 8,
            "traditional": traditional,
            "freqs": freqs,
        }
        options["offset"] = mx.array([1, 2], mx.int64 if traditional else mx.int32)
        yield lambda q=q, o=options: mx.vjp(lambda q: mlx_anvil.rope(q, **o), [q], [q])
        yield lambda q=q, k=k, o=options: mlx_anvil.rope_qk(q, k, **o)


# ---- norms -----------------------------------------------------------------------------------------------------------


def _norm_gradients(function: Callable[..., object], arrays: dict[str, mx.array]) -> Call:
    def loss(*given: mx.array) -> mx.array:
        result = function(**dict(zip(arrays, given, strict=True)))
        return sum((y.sum() for y in result), mx.zeros(())) if isinstance(result, tuple) else result.sum()

    return lambda: mx.grad(loss, argnums=tuple(range(len(arrays))))(*arrays.values())


def norm() -> Iterator[Call]:
    functions = (mlx_anvil.rms_norm, ("residual", "gate")), (mlx_anvil.layer_norm, ("residual", "bias"))
    for dtype, columns, (function, extras) in product(DTYPES, (64, 67, 4096, 8200), functions):
        for weight_dtype, with_weight, *with_extra in product({dtype, mx.float32}, *((False, True),) * 3):
            arrays = {"x": mx.zeros((2, columns), dtype)}
            if with_weight:
                arrays["weight"] = mx.zeros((columns,), weight_dtype)
            for name, wanted in zip(extras, with_extra, strict=True):
                if wanted:
                    of_columns = name == "bias"
                    shape = (columns,) if of_columns else (2, columns)
                    arrays[name] = mx.zeros(shape, weight_dtype if of_columns else dtype)
            yield lambda f=function, a=arrays: f(**a)
            yield _norm_gradients(function, arrays)


# ---- softmax_topk ----------------------------------------------------------------------------------------------------


def softmax_topk() -> Iterator[Call]:
    for dtype, experts in product(DTYPES, (8, 200, 600)):
        logits, cotangent = mx.zeros((3, experts), dtype), mx.zeros((3, 2), dtype)
        for norm, scoring, in_order in product((False, True), ("softmax", "sigmoid"), (False, True)):
            options = {"k": 2, "norm": norm, "scoring": scoring, "sorted": in_order}
            router = partial(lambda x, **o: mlx_anvil.softmax_topk(x, **o)[0], **options)
            yield lambda f=router, x=logits, c=cotangent: mx.vjp(f, [x], [c])


# By the folder under metal/ that has the kernels.
CALLS = {
    "silu_gate": silu_gate,
    "gated": gated,
    "flash_attention": flash_attention,
    "quantized_matmul": quantized_matmul,
    "quantized_embedding": quantized_embedding,
    "quantized_head": quantized_head,
    "rope": rope,
    "norm": norm,
    "softmax_topk": softmax_topk,
}
