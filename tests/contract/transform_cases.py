"""Calls of every op for the tests of transformations: each input at each rank that it may have."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import OPS

Arrays = list[mx.array]


@dataclass(frozen=True)
class Call:
    """An op as a function of arrays that returns one array. ``shapes`` has those of two calls with the same ranks.
    Dimensions that cannot change, such as those of matrices whose codes the call holds, are equal in both."""

    id: str
    op: str
    function: Callable[..., mx.array]
    make: Callable[[int], Arrays]  # of the first call and of the second


def _normal(*shapes: tuple[int, ...]) -> Arrays:
    return [mx.random.normal(shape) for shape in shapes]


def _of_registry() -> list[Call]:
    return [
        Call(
            f"{spec.id}",
            spec.name,
            spec.function,
            lambda call, spec=spec: spec.make_inputs(spec.contract_shapes[-2 + call], mx.float32),
        )
        for spec in OPS.values()
    ]


# ---- attention: masks of every rank, with and without kernels --------------------------------------------------------


def _attention(head_dim: int, mask_axes: int, kind: str) -> Call:
    """Attention with a mask that has the last ``mask_axes`` axes of the scores."""

    def function(q, k, v, mask, sinks, **options):
        return mlx_anvil.flash_attention(q, k, v, mask=mask, sinks=sinks, **options)

    def make(call: int) -> Arrays:
        heads, q_len, kv_len = (2, 3, 5) if call == 0 else (4, 5, 6)
        scores = (2, heads, q_len, kv_len)[4 - mask_axes :]
        mask = mx.random.bernoulli(0.7, scores) if kind == "bool" else mx.random.normal(scores)
        q, k, v = _normal((2, heads, q_len, head_dim), (2, 2, kv_len, head_dim), (2, 2, kv_len, head_dim))
        return [q, k, v, mask, mx.random.normal((heads,))]

    return Call(f"attention, {kind} mask of rank {mask_axes}, head_dim {head_dim}", "flash_attention", function, make)


def _attention_lse() -> Call:
    def function(q, k, v, **options):
        out, lse = mlx_anvil.flash_attention(q, k, v, mask="causal", return_lse=True, **options)
        return out + lse[..., None]

    def make(call: int) -> Arrays:
        q_len, kv_len, dim = (3, 5, 8) if call == 0 else (4, 7, 6)
        return _normal((1, 2, q_len, dim), (1, 1, kv_len, dim), (1, 1, kv_len, dim))

    return Call("attention, lse", "flash_attention", function, make)


# ---- rope: ranks of x, offsets and frequencies -----------------------------------------------------------------------


def _rope(rank: int, offset_shape: tuple[int, ...] | None = None, with_freqs: bool = False) -> Call:
    def function(x, *more, **options):
        given = list(more)
        offset = 3 if offset_shape is None else given.pop(0)
        base = {"freqs": given.pop(0), "base": None} if with_freqs else {}
        return mlx_anvil.rope(x, 4, offset=offset, **base, **options)

    def make(call: int) -> Arrays:
        shape = (2, *(2 + call,) * (rank - 3), 3 + call, 6 + call)
        offset = [] if offset_shape is None else [mx.arange(mx.zeros(offset_shape).size).reshape(offset_shape) + 7]
        freqs = [mx.random.uniform(1.0, 3.0, (2,))] if with_freqs else []
        return [mx.random.normal(shape), *offset, *freqs]

    return Call(f"rope of rank {rank}, offset {offset_shape}{', freqs' * with_freqs}", "rope", function, make)


def _rope_qk() -> Call:
    def function(q, k, offset, **options):
        a, b = mlx_anvil.rope_qk(q, k, 4, offset=offset, **options)
        return a + b

    def make(call: int) -> Arrays:
        length, dim = 3 + call, 5 + call
        return [*_normal((2, 3, length, dim), (2, 3, length, dim)), mx.array([3, 11])]

    return Call("rope_qk, offsets", "rope_qk", function, make)


def _rope_and_cache() -> Call:
    def function(q, k, v, k_cache, v_cache, offset, **options):
        a, b, c = mlx_anvil.rope_and_cache(q, k, v, k_cache, v_cache, 4, offset=offset, **options)
        return a + b + c

    def make(call: int) -> Arrays:
        return [*_normal(*[(2, 2, 3 + call, 5 + call)] * 5), mx.array([1, -2])]

    return Call("rope_and_cache, offsets", "rope_and_cache", function, make)


def _kv_append() -> Call:
    def function(cache_k, cache_v, k, v, offset, **options):
        a, b = mlx_anvil.kv_append(cache_k, cache_v, k, v, offset=offset, rope={"dims": 4}, **options)
        return a + b

    def make(call: int) -> Arrays:
        cache, rows = (2, 2, 6 + call, 5 + call), (2, 2, 3 + call, 5 + call)
        return [*_normal(cache, cache, rows, rows), mx.array([1, 3])]

    return Call("kv_append, offsets", "kv_append", function, make)


# ---- convolutions: lengths of sequences ------------------------------------------------------------------------------


def _conv(activation: str | None) -> Call:
    def function(x, weight, bias, state, lengths, **options):
        y, kept = mlx_anvil.causal_conv1d(x, weight, bias, state, activation=activation, lengths=lengths, **options)
        return y + mx.array([[1.0, 2.0, 3.0]]) @ kept

    def make(call: int) -> Arrays:
        length, channels = 5 + call, 6 + call
        arrays = _normal((2, length, channels), (channels, 4), (channels,), (2, 3, channels))
        return [*arrays, mx.array([1, 4])]

    return Call(f"causal_conv1d, lengths, {activation}", "causal_conv1d", function, make)


# ---- quantized matrices ----------------------------------------------------------------------------------------------


def _quantized(id: str, op: str, x: tuple[int, ...], leading: tuple[int, ...] = (), **options) -> Call:
    """``x`` is given without its last axis, ``leading`` are the leading axes of the matrix. The function holds the
    codes."""
    codes = {}

    def packed(shape: tuple[int, ...]) -> mx.array:
        if shape not in codes:
            codes[shape] = mx.random.randint(0, 2**31 - 1, (*shape[:-1], shape[-1] * 8)).astype(mx.uint32)
            mx.eval(codes[shape])
        return codes[shape]

    def function(x, scales, biases, **more):
        matrix = (packed((*leading, 4, 2)), scales, biases)
        if op == "quantized_swiglu":
            return mlx_anvil.quantized_swiglu(x, matrix, matrix, **options, **more)
        if op == "quantized_argmax":
            return mlx_anvil.quantized_argmax(x, *matrix, return_values=True, **more)[1]
        return getattr(mlx_anvil, op)(x, *matrix, **options, **more)

    def make(call: int) -> Arrays:
        wide = 4 if options.get("transpose") is False else 128
        shape = tuple(n + call for n in x)
        scales, biases = _normal((*leading, 4, 2), (*leading, 4, 2))
        return [0.1 * mx.random.normal((*shape, wide)), 0.05 * scales, biases]

    return Call(id, op, function, make)


def _embedding(ids_shape: tuple[int, ...]) -> Call:
    codes = mx.random.randint(0, 2**31 - 1, (7, 16)).astype(mx.uint32)
    mx.eval(codes)

    def function(ids, scales, biases, **options):
        return mlx_anvil.quantized_embedding(ids, codes, scales, biases, **options)

    def make(call: int) -> Arrays:
        ids = mx.random.randint(-7, 3, tuple(n + call for n in ids_shape))
        return [ids, *_normal((7, 2), (7, 2))]

    return Call(f"embedding, ids of rank {len(ids_shape)}", "quantized_embedding", function, make)


# ---- the rest --------------------------------------------------------------------------------------------------------


def _silu(gate: tuple[int, ...], up: tuple[int, ...]) -> Call:
    def make(call: int) -> Arrays:
        return _normal(*(tuple(n if n == 1 else n + call for n in shape) for shape in (gate, up)))

    return Call(f"silu_gate of {gate} and {up}", "silu_gate", mlx_anvil.silu_gate, make)


def _gated(gate: tuple[int, ...], up: tuple[int, ...]) -> Call:
    def function(gate, up, **options):
        return mlx_anvil.gated(gate, up, activation="swiglu_oai", limit=1.0, **options)

    call = _silu(gate, up)
    return Call(f"gated of {gate} and {up}", "gated", function, call.make)


def _norm(rank: int) -> Call:
    def function(x, weight, residual, gate, **options):
        y, h = mlx_anvil.rms_norm(x, weight, residual=residual, gate=gate, **options)
        return y + h

    def make(call: int) -> Arrays:
        rows = (*(2 + call,) * (rank - 1), 9 + call)
        return [mx.random.normal(shape) for shape in (rows, rows[-1:], rows, rows)]

    return Call(f"rms_norm of rank {rank}", "rms_norm", function, make)


def _router(rank: int, k: int, experts: int, scoring: str = "softmax") -> Call:
    def function(logits, **options):
        return mlx_anvil.softmax_topk(logits, k, norm=scoring == "sigmoid", scoring=scoring, **options)[0]

    def make(call: int) -> Arrays:
        shape = (*(2 + call,) * (rank - 1), experts + call)
        return [0.1 * mx.argsort(mx.random.uniform(shape=shape), axis=-1).astype(mx.float32)]

    return Call(f"softmax_topk of rank {rank}, k {k}, {scoring}", "softmax_topk", function, make)


def _steered(k: int) -> Call:
    """A router with a bias and groups; the groups are of other sizes in the next call."""

    def function(logits, bias, **options):
        router = mlx_anvil.softmax_topk
        options |= {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "masked_score": 0.0}
        return router(logits, k, scoring="sigmoid", e_score_correction_bias=bias, **options)[0]

    def make(call: int) -> Arrays:
        shape = (2 + call, 3 * (5 + call))
        ranks = mx.argsort(mx.random.uniform(shape=shape), axis=-1).astype(mx.float32)
        return [0.2 * ranks - 1, 2.0 * (mx.arange(shape[-1]) % 3) - 1]

    return Call(f"softmax_topk with a bias and groups, k {k}", "softmax_topk", function, make)


# ---- experts ---------------------------------------------------------------------------------------------------------


def _moe_permute(rank: int) -> Call:
    def function(x, ids, **options):
        return mlx_anvil.moe_permute(x, ids % 5, 5, **options)[0]

    def make(call: int) -> Arrays:
        tokens = (2 + call,) * (rank - 1)
        return [mx.random.normal((*tokens, 6 + call)), mx.random.randint(0, 5, (*tokens, 3))]

    return Call(f"moe_permute of rank {rank}", "moe_permute", function, make)


def _moe_combine(rank: int, weighted: bool) -> Call:
    """Of all terms, with places that stay a permutation if a number is added to all of them."""

    def function(y, inverse, residual, shared, gate, weights=None, **options):
        terms = {"residual": residual, "shared": shared, "shared_gate": gate}
        return mlx_anvil.moe_combine(y, weights, inverse % inverse.size, **terms, **options)

    def make(call: int) -> Arrays:
        tokens, k, columns = (2,) * (rank - 1), 2, 6 + call
        pairs = k * 2 ** (rank - 1)
        shapes = ((pairs, columns), (*tokens, columns), (*tokens, columns), (*tokens, 1), (*tokens, k))
        y, *rest = _normal(*(shapes if weighted else shapes[:-1]))
        return [y, mx.random.permutation(pairs).reshape(*tokens, k), *rest]

    return Call(f"moe_combine of rank {rank}{', weights' * weighted}", "moe_combine", function, make)


CALLS = [
    *_of_registry(),
    *(_attention(8, rank, "additive") for rank in (1, 2, 3)),
    *(_attention(8, rank, "bool") for rank in (1, 2, 3, 4)),
    *(_attention(260, rank, "additive") for rank in (1, 2)),
    _attention_lse(),
    _rope(3),
    _rope(5),
    _rope(4, offset_shape=()),
    _rope(3, offset_shape=(1,)),
    _rope(4, offset_shape=(2,)),
    _rope(4, with_freqs=True),
    _rope(4, offset_shape=(2,), with_freqs=True),
    _rope_qk(),
    _rope_and_cache(),
    _kv_append(),
    _conv("silu"),
    _conv(None),
    _quantized("quantized_matmul, x of rank 1", "quantized_matmul", ()),
    _quantized("quantized_matmul, x of rank 3", "quantized_matmul", (2, 3)),
    _quantized("quantized_matmul, plain, x of rank 1", "quantized_matmul", (), transpose=False),
    _quantized("quantized_matmul, w of rank 3", "quantized_matmul", (3,), (2,)),
    _quantized("quantized_gemv, x of rank 1", "quantized_gemv", ()),
    _quantized("quantized_gemv, x of rank 3", "quantized_gemv", (2, 1)),
    _quantized("quantized_swiglu, x of rank 1", "quantized_swiglu", ()),
    _quantized("quantized_swiglu, x of rank 3", "quantized_swiglu", (2, 3)),
    _quantized("quantized_swiglu, swiglu_oai", "quantized_swiglu", (2,), activation="swiglu_oai", limit=3.0),
    _quantized("quantized_argmax, x of rank 1", "quantized_argmax", ()),
    _quantized("quantized_argmax, x of rank 3", "quantized_argmax", (2, 2)),
    _embedding(()),
    _embedding((3,)),
    _embedding((2, 3)),
    _silu((), (3,)),
    _silu((4,), (2, 4)),
    _silu((2, 1), (3, 1, 4)),
    _gated((), (3,)),
    _gated((2, 1), (3, 1, 4)),
    _norm(1),
    _norm(2),
    _norm(4),
    _router(1, 3, 9),
    _router(3, 3, 9, "sigmoid"),
    _router(2, 66, 70),
    _steered(4),
    _moe_permute(1),
    _moe_permute(3),
    _moe_combine(1, weighted=True),
    _moe_combine(2, weighted=True),
    _moe_combine(2, weighted=False),
]
