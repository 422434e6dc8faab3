"""quantized_experts: its definition in MLX ops, and its entries in the registry."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64
from mlx_anvil.reference._quantized import SPECIAL_VALUES, dequantized
from mlx_anvil.reference.gated import gated

Matrix = tuple[mx.array, ...]


def quantized_experts(
    x: mx.array,
    ids: mx.array,
    weights: mx.array | None,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    *,
    activation: str = "silu",
    limit: float | None = None,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
    down_group_size: int | None = None,
    down_bits: int | None = None,
    down_mode: str | None = None,
    gate_bias: mx.array | None = None,
    up_bias: mx.array | None = None,
    down_bias: mx.array | None = None,
    residual: mx.array | None = None,
    shared: mx.array | None = None,
    shared_gate: mx.array | None = None,
) -> mx.array:
    """The sum over j of ``weights[..., j]`` times what expert ``ids[..., j]`` makes of ``x``, plus a residual and a
    gated shared expert.

    Every expert computes every token; the outputs of the chosen ones are taken. Without ``weights``, there is no sum.
    """
    dtype = x.dtype
    for matrix in (gate, up, down):
        dtype = mx.result_type(mx.zeros(0, dtype), *matrix[1:]) if len(matrix) == 3 else dtype
    own = (group_size, bits, mode)
    other = (down_group_size or group_size, down_bits or bits, down_mode or mode)

    def product(x: mx.array, matrix: Matrix, expert: int, form: tuple[Any, ...], bias: mx.array | None) -> mx.array:
        w, scales, *biases = (array[expert] for array in matrix)
        y = x @ dequantized(w, scales, biases[0] if biases else None, *form).astype(dtype).T
        return y if bias is None else y + bias[expert].astype(dtype)

    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    outputs = []
    for expert in range(gate[0].shape[0]):
        hidden = gated(
            product(rows, gate, expert, own, gate_bias),
            product(rows, up, expert, own, up_bias),
            activation=activation,
            limit=limit,
        )
        outputs.append(product(hidden, down, expert, other, down_bias))
    chosen = mx.stop_gradient(ids.reshape(-1, ids.shape[-1], 1)).astype(mx.int32)
    out = mx.take_along_axis(mx.stack(outputs, axis=1), chosen, axis=1)
    if weights is not None:
        wide = mx.result_type(out, mx.zeros(0, mx.float32))
        factors = weights.reshape(-1, weights.shape[-1], 1).astype(wide)
        out = (out.astype(wide) * factors).sum(axis=1)
        for term in (residual, shared):
            dtype = dtype if term is None else mx.result_type(mx.zeros(0, dtype), term)
        out = out if residual is None else out + residual.reshape(out.shape)
        if shared is not None:
            share = 1 if shared_gate is None else _float64.sigmoid(shared_gate.astype(wide).reshape(-1, 1))
            out = out + share * shared.reshape(out.shape)
        out = out.astype(dtype)
    return out.reshape(*(ids.shape if weights is None else ids.shape[:-1]), out.shape[-1])


# ---- a shape is (tokens, k, experts, groups of D, groups of H); the function holds ids for a number of tokens --------


@cache
def expert_codes(experts: int, outputs: int, groups: int, copy: int = 0) -> mx.array:
    """Random 4-bit codes that depend on the arguments alone."""
    draw = random.Random(copy)
    words = groups * 8
    numbers = [draw.getrandbits(32) for _ in range(experts * outputs * words)]
    return mx.array(numbers, mx.uint32).reshape(experts, outputs, words)


@cache
def expert_ids(tokens: int, k: int, experts: int) -> mx.array:
    """Distinct experts of each token that depend on the arguments alone."""
    draw = random.Random(tokens)
    return mx.array([draw.sample(range(experts), k) for _ in range(tokens)], mx.uint32).reshape(tokens, k)


def _inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """A small ``x``, so that the activation is nearly linear over the steps of finite differences."""
    tokens, k, experts, groups, hidden = shape
    x, weights = 0.05 * mx.random.normal((tokens, groups * 64)), mx.random.uniform(shape=(tokens, k))
    arrays = [x, weights]
    for outputs, columns in ((hidden * 64, groups), (groups * 64, hidden)):
        arrays += [0.02 * mx.random.normal((experts, outputs, columns)) for _ in range(2)]
    return [a.astype(dtype) for a in arrays]


def _with_codes(function: Callable[..., mx.array], **options: Any) -> Callable[..., mx.array]:
    def of_floats(
        x: mx.array,
        weights: mx.array,
        scales: mx.array,
        biases: mx.array,
        down_scales: mx.array,
        down_biases: mx.array,
        **more: Any,
    ) -> mx.array:
        ids = expert_ids(*weights.shape, scales.shape[0])
        gate, up = ((expert_codes(*scales.shape, copy), scales, biases) for copy in range(2))
        down = (expert_codes(*down_scales.shape, 2), down_scales, down_biases)
        return function(x, ids, weights, gate, up, down, **options, **more)

    return of_floats


def _spec(variant: str, contract_shapes: tuple[tuple[int, ...], ...], **options: Any) -> OpSpec:
    return OpSpec(
        name="quantized_experts",
        variant=variant,
        function=_with_codes(_ext.quantized_experts, **options),
        reference=_with_codes(quantized_experts, **options),
        make_inputs=_inputs,
        arguments=("x", "weights", "scales", "biases", "down_scales", "down_biases"),
        operands=("x",),
        contract_shapes=contract_shapes,
        check_shapes=((3, 2, 5, 1, 2), (96, 4, 8, 4, 2)),
        float32_tolerance=5e-5,
        special_values=SPECIAL_VALUES,
    )


SPECS = (
    _spec("", ((1, 1, 1, 1, 1), (0, 2, 3, 1, 1), (17, 4, 6, 1, 2), *((5, 2, 5, 2, 1),) * 2)),
    _spec("swiglu_oai", ((23, 3, 4, 1, 1), *((5, 2, 3, 1, 1),) * 2), activation="swiglu_oai"),
)
