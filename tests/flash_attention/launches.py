"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import (
    EVERY_FORMAT,
    FEW_TOKENS,
    LONG_CACHE,
    MODEL_DTYPES,
    PROMPT,
    RAGGED_PROMPT,
    SHORT_CACHE,
    Call,
    cached,
    for_matrix_units,
    projected_heads,
)

# Tiles are for head dims up to these or any between: each is tried, and one more.
HEAD_DIMS = tuple(sorted({d + e for d in (32, 64, 72, 80, 96, 128, 192, 256, 512) for e in (0, 1)}))
FOUR_BITS = {"group_size": 64, "bits": 4, "mode": "affine"}  # for the decode with matrix units
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
    arrays = {name: x for name, x in options.items() if isinstance(x, mx.array)}
    extra = {name: x for name, x in arrays.items() if mx.issubdtype(x.dtype, mx.floating)}
    fixed = {name: x for name, x in options.items() if name not in extra}

    def loss(q: mx.array, k: mx.array, v: mx.array, *values: mx.array) -> mx.array:
        out, lse = mlx_anvil.flash_attention(q, k, v, return_lse=True, **fixed, **dict(zip(extra, values, strict=True)))
        return out.sum() + lse.sum()

    return lambda: mx.grad(loss, argnums=tuple(range(3 + len(extra))))(q, k, v, *extra.values())


def _attention_vjp(dtype: mx.Dtype, dim: int, value_dim: int, length: int, **options: object) -> Call:
    """Gradients of q, k and v for a cotangent whose rows are vectors, as that of a sum is not."""
    shapes = (2, dim), (1, dim), (1, value_dim), (2, value_dim)
    *arrays, d_out = (mx.zeros((1, heads, length, d), dtype) for heads, d in shapes)
    return partial(mx.vjp, partial(mlx_anvil.flash_attention, **options), arrays, [d_out])


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
    # Heads of 128 have larger tiles without a mask array, and tall ones for many blocks.
    yield _attention_gradients(dtype, 128, 128, mask=mx.ones((QUERIES, QUERIES), mx.bool_))
    yield _attention(dtype, 128, 128, 70, 133)


def _attention_by_group_products(dtype: mx.Dtype) -> Iterator[Call]:
    queries = 70  # more than a block for fewer has
    for dim, value_dim in product((64, 96, 128), repeat=2):
        yield _attention(dtype, dim, value_dim, queries)
        yield _attention_vjp(dtype, dim, value_dim, queries)
    for options in _attention_options(dtype, queries, KEYS):
        if not isinstance(options["mask"], mx.array):
            yield from (_attention(dtype, 64, 64, queries, return_lse=lse, **options) for lse in (False, True))
            yield _attention_vjp(dtype, 64, 64, queries, **options)


def _codes(dtype: mx.Dtype, heads: int, length: int, dim: int, form: dict[str, object]) -> tuple[mx.array, ...]:
    codes = mx.zeros((1, heads, length, dim * form["bits"] // 32), mx.uint32)
    groups = (1, heads, length, dim // form["group_size"])
    if form["mode"] == "affine":
        return codes, mx.zeros(groups, dtype), mx.zeros(groups, dtype)
    return codes, mx.zeros(groups, mx.uint8)


def _quantized(
    dtype: mx.Dtype,
    dim: int,
    queries: int,
    heads: int = 2,
    form: dict[str, object] = EVERY_FORMAT[0],
    **options: object,
) -> Call:
    q = mx.zeros((1, heads, queries, dim), dtype)
    bits = form["bits"] if isinstance(form["bits"], tuple) else (form["bits"],) * 2
    k, v = (_codes(dtype, 1, KEYS, dim, {**form, "bits": of_codes}) for of_codes in bits)
    formats = {"kv_group_size": form["group_size"], "kv_bits": form["bits"], "kv_mode": form["mode"]}
    return partial(mlx_anvil.flash_attention, q, k, v, **formats, **options)


def _every_quantized_kernel(dtype: mx.Dtype) -> Iterator[Call]:
    for dim in (32, 64, 128, 256):
        for queries, heads in ((1, 1), (1, 4), (1, 8), (QUERIES, 2)):
            yield _quantized(dtype, dim, queries, heads)
    yield _quantized(dtype, 512, 1)
    for form, queries in product(EVERY_FORMAT, (1, QUERIES)):
        yield _quantized(dtype, 128, queries, form=form)
    for queries, return_lse in product((1, QUERIES), (False, True)):
        for options in _attention_options(dtype, queries, KEYS):
            yield _quantized(dtype, 64, queries, return_lse=return_lse, **options)
    if dtype != mx.float32:
        for dim, queries in product((64, 128), (1, QUERIES)):
            yield for_matrix_units(_quantized(dtype, dim, queries))
        for options in _attention_options(dtype, QUERIES, KEYS):
            yield for_matrix_units(_quantized(dtype, 64, QUERIES, **options))
        for form in EVERY_FORMAT:
            yield for_matrix_units(_quantized(dtype, 128, 1, form=form))
        for return_lse, options in product((False, True), _attention_options(dtype, 1, KEYS)):
            yield for_matrix_units(_quantized(dtype, 64, 1, form=FOUR_BITS, return_lse=return_lse, **options))
        yield from (for_matrix_units(call, group_products=True) for call in _quantized_by_group_products(dtype))


def _quantized_by_group_products(dtype: mx.Dtype) -> Iterator[Call]:
    queries = 70  # more than a block for fewer has
    for dim, bits in product((64, 96, 128), (4, 8, (8, 4))):
        yield _quantized(dtype, dim, queries, form={**FOUR_BITS, "group_size": 32, "bits": bits})
    for options, return_lse in product(_attention_options(dtype, queries, KEYS), (False, True)):
        if not isinstance(options["mask"], mx.array):
            yield _quantized(dtype, 64, queries, form=FOUR_BITS, return_lse=return_lse, **options)


def _ragged(dtype: mx.Dtype, queries: int) -> Iterator[Call]:
    padded = {"lengths": mx.array([KEYS // 2]), "q_lengths": mx.array([queries])}
    packed = {"cu_seqlens_q": mx.array([0, 1, queries]), "cu_seqlens_k": mx.array([0, 2, KEYS])}
    for lengths in (padded, {"starts": mx.array([KEYS // 2])}, packed):
        yield _attention(dtype, 64, 64, queries, mask="causal", **lengths)
        yield _quantized(dtype, 64, queries, mask="causal", **lengths)
        if dtype != mx.float32:
            yield for_matrix_units(_attention(dtype, 64, 64, queries, mask="causal", **lengths))
            yield for_matrix_units(_quantized(dtype, 64, queries, mask="causal", **lengths))


def _ragged_gradients(dtype: mx.Dtype) -> Iterator[Call]:
    padded = {"lengths": mx.array([QUERIES // 2]), "q_lengths": mx.array([QUERIES])}
    packed = {"cu_seqlens_q": mx.array([0, 1, QUERIES]), "cu_seqlens_k": mx.array([0, 2, QUERIES])}
    for lengths, mask in product((padded, packed), ("causal", mx.zeros((1, 1, QUERIES, QUERIES), dtype))):
        call = _attention_gradients(dtype, 64, 64, mask=mask, **lengths)
        yield call
        yield for_matrix_units(call)


def every_kernel() -> Iterator[Call]:
    for dtype in DTYPES:
        yield from _every_quantized_kernel(dtype)
        for dim, value_dim, (queries, heads) in product(
            HEAD_DIMS, HEAD_DIMS, ((1, 1), (1, 2), (2, 2), (4, 2), (QUERIES, 2))
        ):
            yield _attention(dtype, dim, value_dim, queries, heads)
        for dim, value_dim in product(HEAD_DIMS, HEAD_DIMS):
            yield _attention_gradients(dtype, dim, value_dim)
        if dtype == mx.float32:  # its keys' gradients, which other GPUs take from stored weights
            for dim, value_dim in product(HEAD_DIMS, HEAD_DIMS):
                yield for_matrix_units(_attention_gradients(dtype, dim, value_dim))
        else:
            yield from map(for_matrix_units, _attention_by_matrix_units(dtype))
            yield from (for_matrix_units(call, group_products=True) for call in _attention_by_group_products(dtype))
        for queries, return_lse in product((1, QUERIES), (False, True)):
            for options in _attention_options(dtype, queries, KEYS):
                yield _attention(dtype, 64, 64, queries, return_lse=return_lse, **options)
        for options in _attention_options(dtype, QUERIES, QUERIES):
            yield _attention_gradients(dtype, 64, 64, **options)
        for queries in (1, QUERIES):
            yield from _ragged(dtype, queries)
        yield from _ragged_gradients(dtype)


# ---- models ----------------------------------------------------------------------------------------------------------


def _of_model(
    dtype: mx.Dtype, dim: int, queries: int, keys: int, mask: str | mx.Dtype | None, **options: object
) -> Call:
    """If `mask` is a dtype, the mask is an array of that dtype."""
    q = projected_heads(dtype, 4, queries, dim)
    k, v = (cached(dtype, 2, keys, dim) for _ in range(2))
    given = mx.zeros((1, 1, queries, keys), mask) if isinstance(mask, mx.Dtype) else mask
    return partial(mlx_anvil.flash_attention, q, k, v, mask=given, **options)


def _gradients_of_model(dtype: mx.Dtype, dim: int, length: int, **options: object) -> Call:
    q, k, v = (projected_heads(dtype, count, length, dim) for count in (4, 2, 2))
    return partial(
        mx.vjp, partial(mlx_anvil.flash_attention, **options), [q, k, v], [projected_heads(dtype, 4, length, dim)]
    )


def _with_quantized_cache(dtype: mx.Dtype, dim: int, queries: int, keys: int, bits: int, mask: str | None) -> Call:
    form = {"group_size": 64, "bits": bits, "mode": "affine"}
    k, v = (tuple(x[:, :, :keys] for x in _codes(dtype, 2, keys + 256, dim, form)) for _ in range(2))
    q = projected_heads(dtype, 4, queries, dim)
    return partial(mlx_anvil.flash_attention, q, k, v, mask=mask, kv_group_size=64, kv_bits=bits)


def of_models() -> Iterator[Call]:
    for dtype in MODEL_DTYPES:
        for dim, bits in product((64, 128), (4, 8)):
            for keys in (SHORT_CACHE, LONG_CACHE):
                yield _with_quantized_cache(dtype, dim, 1, keys, bits, None)
                yield _with_quantized_cache(dtype, dim, FEW_TOKENS, keys, bits, "causal")
            yield _with_quantized_cache(dtype, dim, PROMPT, PROMPT, bits, "causal")
        sinks = mx.zeros((4,), dtype)
        for dim in (64, 96, 128, 256):
            features: list[dict[str, object]] = [{}]
            if dim >= 128:
                features.append({"softcap": 50.0})  # Gemma 2
            if dim == 64:
                features.append({"sinks": sinks})  # GPT-OSS
            for feature in features:
                # Masks: sequences of several lengths in a batch, and windows in a cache that goes around.
                for length, mask in product((PROMPT, RAGGED_PROMPT), ("causal", mx.bool_)):
                    yield _of_model(dtype, dim, length, length, mask, **feature)
                for keys in (SHORT_CACHE, LONG_CACHE):
                    yield _of_model(dtype, dim, 1, keys, None, **feature)
                    # Several tokens: speculative decoding, the end of a prompt.
                    yield _of_model(dtype, dim, FEW_TOKENS, keys, "causal", **feature)
                yield _of_model(dtype, dim, FEW_TOKENS, SHORT_CACHE, mx.bool_, **feature)
            yield _of_model(dtype, dim, PROMPT, PROMPT, None)  # an encoder
        for dim in (64, 128):
            yield _of_model(dtype, dim, PROMPT, PROMPT, dtype)
            yield _gradients_of_model(dtype, dim, PROMPT, mask="causal")
