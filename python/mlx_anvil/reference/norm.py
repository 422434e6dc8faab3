"""rms_norm and layer_norm: their definitions in MLX ops, and their entries in the registry."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64


def rms_norm(
    x: mx.array,
    weight: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: mx.array | None = None,
    gate: mx.array | None = None,
    gate_activation: str = "silu",
    weight_offset: float = 0.0,
) -> mx.array | tuple[mx.array, mx.array]:
    """``h / sqrt(mean(h**2) + eps) * (weight_offset + weight) * silu(gate)`` with ``h = x + residual``.

    ``x``, ``residual`` and ``gate`` are ``[..., N]``, ``weight`` is ``[N]``. Returns ``(result, h)`` with a residual.
    """
    h = x if residual is None else x + residual
    y = h * mx.rsqrt(mx.mean(h * h, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * (weight_offset + weight)
    if gate is not None:
        sigmoid = _float64.sigmoid(gate)
        y = y * (sigmoid if gate_activation == "sigmoid" else gate * sigmoid)
    return y if residual is None else (y, h)


def layer_norm(
    x: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: mx.array | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """``(h - mean(h)) / sqrt(var(h) + eps) * weight + bias`` with ``h = x + residual``.

    ``x`` and ``residual`` are ``[..., N]``, ``weight`` and ``bias`` are ``[N]``. Returns ``(result, h)`` with a
    residual.
    """
    h = x if residual is None else x + residual
    centred = h - mx.mean(h, axis=-1, keepdims=True)
    y = centred * mx.rsqrt(mx.mean(centred * centred, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y if residual is None else (y, h)


# Rows have 8 columns or more: with very few, the gradient of a norm is the difference of two nearly equal numbers.
# Widths lie near multiples of the vector width, the simdgroup size, and the elements per thread.
_SHAPES = ((0, 9), (3, 0, 8), (8,), (1, 1, 257), (3, 1031), (1, 8200), (7, 3, 40), (2, 5, 31))
_FEW_SHAPES = ((0, 9), (2, 517), (7, 3, 40), (2, 5, 31))


def _inputs(roles: tuple[str, ...], shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """Random arrays of ``shape`` for x, residual and gate, and of its last axis for weight and bias."""
    of_columns = {"weight": 1.0, "bias": 0.0}
    return [
        (
            of_columns[role] + 0.3 * mx.random.normal(shape[-1:]) if role in of_columns else mx.random.normal(shape)
        ).astype(dtype)
        for role in roles
    ]


def _of_arrays(norm: Callable[..., Any], roles: tuple[str, ...], **options: Any) -> Callable[..., mx.array]:
    """The norm as a function of its arrays. Two results are added."""

    def function(*arrays: mx.array, **more: Any) -> mx.array:
        result = norm(**dict(zip(roles, arrays, strict=True)), **options, **more)
        return cast(mx.array, result[0] + result[1] if isinstance(result, tuple) else result)

    return function


def _spec(
    name: str, variant: str, roles: tuple[str, ...], check_shapes: tuple[tuple[int, ...], ...], **options: Any
) -> OpSpec:
    definitions: dict[str, Callable[..., Any]] = {"rms_norm": rms_norm, "layer_norm": layer_norm}
    ours, definition = getattr(_ext, name), definitions[name]
    return OpSpec(
        name=name,
        variant=variant,
        function=_of_arrays(ours, roles, **options),
        reference=_of_arrays(definition, roles, **options),
        make_inputs=partial(_inputs, roles),
        arguments=roles,
        operands=("x",),
        contract_shapes=_FEW_SHAPES if variant else _SHAPES,
        check_shapes=check_shapes,
    )


SPECS = (
    _spec("rms_norm", "", ("x", "weight"), check_shapes=((3, 1021), (256, 4096))),
    _spec("rms_norm", "residual", ("x", "weight", "residual"), check_shapes=((64, 4096),), weight_offset=1.0),
    _spec("rms_norm", "gate", ("x", "weight", "gate"), check_shapes=((64, 4096),)),
    _spec("rms_norm", "sigmoid gate", ("x", "weight", "gate"), check_shapes=((64, 4096),), gate_activation="sigmoid"),
    _spec("layer_norm", "", ("x", "weight", "bias"), check_shapes=((3, 1021), (256, 4096))),
    _spec("layer_norm", "residual", ("x", "bias", "residual"), check_shapes=((64, 4096),)),
)
