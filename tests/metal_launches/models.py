"""What language models launch on an NVIDIA GPU: python -m tests.metal_launches.models > tools/cubins.txt

These specialisations of the kernels come assembled with the package (tools/build_cubins.py). With `--apple`, it prints
what the same models launch on an Apple GPU, for bench/agx.py. Nothing is run: launches are recorded, as in record.py, and
in a process of its own for the same reason. Sizes are those of models where a dispatch goes by them, and small elsewhere.
"""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from tests.metal_launches.calls import Call
from tests.metal_launches.record import recording

HEADER = """\
# Specialisations that language models launch, as op/pipeline key: cubins of these come with the package.
# Written by `python -m tests.metal_launches.models > tools/cubins.txt`; its source has the calls.
"""

DTYPES = (mx.float16, mx.bfloat16)  # of weights and activations
WIDTH = 2048  # of the residual stream
PROMPT, RAGGED_PROMPT = 512, 77
SHORT_CACHE, LONG_CACHE = 64, 4096
FEW_TOKENS = 4


# ---- attention -------------------------------------------------------------------------------------------------------


def _heads(dtype: mx.Dtype, count: int, length: int, dim: int) -> mx.array:
    """Of a projection's output, as models have them: rows of one head are not next to each other."""
    return mx.zeros((1, length, count, dim), dtype).swapaxes(1, 2)


def _cached(dtype: mx.Dtype, count: int, length: int, dim: int) -> mx.array:
    """A part of a buffer that grows in steps."""
    return mx.zeros((1, count, length + 256, dim), dtype)[:, :, :length]


def _attention(
    dtype: mx.Dtype, dim: int, queries: int, keys: int, mask: str | mx.Dtype | None, **options: object
) -> Call:
    """`mask`: an array of it, where it is a dtype."""
    q = _heads(dtype, 4, queries, dim)
    k, v = (_cached(dtype, 2, keys, dim) for _ in range(2))
    given = mx.zeros((1, 1, queries, keys), mask) if isinstance(mask, mx.Dtype) else mask
    return partial(mlx_anvil.flash_attention, q, k, v, mask=given, **options)


def _attention_gradients(dtype: mx.Dtype, dim: int, length: int, **options: object) -> Call:
    q, k, v = (_heads(dtype, count, length, dim) for count in (4, 2, 2))
    return partial(mx.vjp, partial(mlx_anvil.flash_attention, **options), [q, k, v], [_heads(dtype, 4, length, dim)])


def attention() -> Iterator[Call]:
    for dtype in DTYPES:
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
                    yield _attention(dtype, dim, length, length, mask, **feature)
                for keys in (SHORT_CACHE, LONG_CACHE):
                    yield _attention(dtype, dim, 1, keys, None, **feature)
                    # Several tokens: speculative decoding, the end of a prompt.
                    yield _attention(dtype, dim, FEW_TOKENS, keys, "causal", **feature)
                yield _attention(dtype, dim, FEW_TOKENS, SHORT_CACHE, mx.bool_, **feature)
            yield _attention(dtype, dim, PROMPT, PROMPT, None)  # an encoder
        for dim in (64, 128):
            yield _attention(dtype, dim, PROMPT, PROMPT, dtype)
            yield _attention_gradients(dtype, dim, PROMPT, mask="causal")


# ---- quantized matrices ----------------------------------------------------------------------------------------------

FORMATS = [{"group_size": group_size, "bits": bits} for bits in (4, 8) for group_size in (32, 64, 128)]
MANY, SEVERAL, FEW = 65536, 8192, 1024  # rows of a matrix: a vocabulary; an MLP's; the keys' projection
ODD_WIDTH = 896  # no multiple of the 256 columns that kernels by matrix units take at a time: Qwen 2.5 0.5B


def _matrix(
    dtype: mx.Dtype, rows: int, columns: int, group_size: int, bits: int
) -> tuple[mx.array, mx.array, mx.array]:
    factors = mx.zeros((rows, columns // group_size), dtype)
    return mx.zeros((rows, columns * bits // 32), mx.uint32), factors, factors


def quantized() -> Iterator[Call]:
    for dtype, form in product(DTYPES, FORMATS):
        widths = (256, ODD_WIDTH) if form == {"group_size": 64, "bits": 4} else (256,)
        for rows, columns, outputs in product((1, 8), widths, (FEW, SEVERAL, MANY)):
            x, matrix = mx.zeros((rows, columns), dtype), _matrix(dtype, outputs, columns, **form)
            yield partial(mlx_anvil.quantized_matmul, x, *matrix, **form)
        for rows, columns in product((1, 8), widths):
            x, matrix = mx.zeros((rows, columns), dtype), _matrix(dtype, SEVERAL, columns, **form)
            yield partial(mlx_anvil.quantized_swiglu, x, matrix, matrix, **form)
            yield partial(mlx_anvil.quantized_argmax, x, *_matrix(dtype, MANY, columns, **form), **form)
        matrix = _matrix(dtype, FEW, 256, **form)
        for rows in (PROMPT, RAGGED_PROMPT):
            yield partial(mlx_anvil.quantized_matmul, mx.zeros((rows, 256), dtype), *matrix, **form)
            # The gradient in x, where adapters are trained.
            back = partial(mlx_anvil.quantized_matmul, transpose=False, **form)
            yield partial(back, mx.zeros((rows, FEW), dtype), *matrix)
        for ids in (mx.zeros((1, 1), mx.int32), mx.zeros((1, PROMPT), mx.uint32)):
            yield partial(mlx_anvil.quantized_embedding, ids, *matrix, dtype=dtype, **form)
        # A vocabulary that one merge is enough for, and one that takes two.
        for vocabulary in (MANY, 2 * MANY + 4096):
            vocabulary_matrix = _matrix(dtype, vocabulary, 256, **form)
            for sample in (mlx_anvil.quantized_argmax, partial(mlx_anvil.quantized_topk, k=64)):
                yield partial(sample, mx.zeros((1, 256), dtype), *vocabulary_matrix, **form)


# ---- norms -----------------------------------------------------------------------------------------------------------


def norm() -> Iterator[Call]:
    for dtype in DTYPES:
        x, weight = mx.zeros((8, WIDTH), dtype), mx.ones((WIDTH,), dtype)
        yield partial(mlx_anvil.rms_norm, x, weight)
        yield partial(mlx_anvil.rms_norm, x, weight, residual=x)
        yield partial(mlx_anvil.layer_norm, x, weight, weight)
        yield partial(mlx_anvil.layer_norm, x, weight, weight, residual=x)
        yield partial(mlx_anvil.layer_norm, x, weight)  # Cohere
        for dim in (64, 128, 256):  # of queries and keys: Qwen 3, Gemma 3
            yield partial(mlx_anvil.rms_norm, _heads(dtype, 4, PROMPT, dim), mx.ones((dim,), dtype))
        # Trained: adapters alone, all weights.
        for trained in ([x], [x, weight]):
            given = [x, weight][len(trained) :]
            yield partial(mx.vjp, lambda *arrays, g=given: mlx_anvil.rms_norm(*arrays, *g), trained, [x])
            with_residual = partial(lambda *arrays, g, r: mlx_anvil.rms_norm(*arrays, *g, residual=r), g=given, r=x)
            yield partial(mx.vjp, with_residual, trained, [x, x])


# ---- rope ------------------------------------------------------------------------------------------------------------


def rope() -> Iterator[Call]:
    dim = 128
    for dtype, traditional, freqs in product(DTYPES, (False, True), (None, mx.ones((dim // 2,)))):
        options = {"dims": dim, "traditional": traditional, "freqs": freqs}
        # A prompt, a token, a batch of sequences that are not at the same position: one kernel for all.
        for length, offset in ((PROMPT, 0), (1, LONG_CACHE), (1, mx.array([LONG_CACHE]))):
            q, k = (_heads(dtype, heads, length, dim) for heads in (4, 2))
            yield partial(mlx_anvil.rope, q, offset=offset, **options)
            yield partial(mlx_anvil.rope_qk, q, k, offset=offset, **options)


# ---- the rest --------------------------------------------------------------------------------------------------------


def router() -> Iterator[Call]:
    for dtype in (*DTYPES, mx.float32):
        # Mixtral and Qwen 3; Qwen 3 without renormalised weights; DeepSeek V3.
        for experts, norm, scoring in ((8, True, "softmax"), (128, False, "softmax"), (256, True, "sigmoid")):
            logits = mx.zeros((4, experts), dtype)
            yield partial(mlx_anvil.softmax_topk, logits, k=4, norm=norm, scoring=scoring)


def float32_parts() -> Iterator[Call]:
    """What some models compute in float32, whatever their weights are."""
    x, weight = mx.zeros((8, WIDTH)), mx.ones((WIDTH,))
    yield partial(mlx_anvil.rms_norm, x, weight)
    yield partial(mlx_anvil.silu_gate, x, x)
    yield partial(mx.vjp, mlx_anvil.silu_gate, [x, x], [x])


def silu_gate() -> Iterator[Call]:
    for dtype in DTYPES:
        whole = [mx.zeros((8, WIDTH), dtype) for _ in range(3)]
        halves = mx.split(mx.zeros((8, 2 * WIDTH), dtype), 2, axis=-1)  # gate and up of one product: Phi 3
        for gate, up in (whole[:2], halves):
            yield partial(mlx_anvil.silu_gate, gate, up)
            yield partial(mx.vjp, mlx_anvil.silu_gate, [gate, up], whole[2:])


def gated() -> Iterator[Call]:
    """Gemma 1 (gelu) to 4, BitNet, GPT-OSS, and the clamped SwiGLU of DeepSeek V4."""
    for dtype, activation in product(DTYPES, ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")):
        gate, up, out = (mx.zeros((8, WIDTH), dtype) for _ in range(3))
        function = partial(mlx_anvil.gated, activation=activation)
        yield partial(function, gate, up)
        yield partial(mx.vjp, function, [gate, up], [out])


GROUPS = (attention, quantized, norm, rope, router, silu_gate, gated, float32_parts)


def keys(*, matrix_units: bool) -> set[str]:
    found = set()
    with recording(), mlx_anvil.simulate(matrix_units=matrix_units):
        for group in GROUPS:
            for call in group():
                with mlx_anvil.trace() as trace:
                    mx.eval(call())
                assert not trace.fallbacks, trace
                found.update(f"{event.op}/{event.kernel}" for event in trace.events)
    return found


if __name__ == "__main__":
    apple = sys.argv[1:] == ["--apple"]
    listed = "".join(f"{key}\n" for key in sorted(keys(matrix_units=not apple)))
    sys.stdout.write(listed if apple else HEADER + listed)
