"""Modules that use the ops, as drop-in replacements for those of ``mlx.nn``."""

from typing import Any, cast, overload

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil._calls import checks_arguments
from mlx_anvil._ext import (
    layer_norm,
    quantized_embedding,
    quantized_matmul,
    quantized_swiglu,
    rms_norm,
    rope,
    silu_gate,
)


@checks_arguments
class SwiGLU(nn.Module):
    """The Llama MLP, ``down(silu(gate(x)) * up(x))``. One kernel computes ``silu(gate) * up``.

    Input and output are ``[..., dims]``, in float32, float16 or bfloat16. The parameters have the names of mlx-lm's
    Llama (``gate_proj``, ``up_proj``, ``down_proj``), so its weights load unchanged.

    Args:
        dims: size of the last axis of input and output.
        hidden_dims: size of the last axis between the projections.
        bias: if True, the three projections have a bias. Default: ``False``.
    """

    def __init__(self, dims: int, hidden_dims: int, bias: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj = nn.Linear(dims, hidden_dims, bias=bias)
        self.up_proj = nn.Linear(dims, hidden_dims, bias=bias)
        self.down_proj = nn.Linear(hidden_dims, dims, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(silu_gate(self.gate_proj(x), self.up_proj(x)))


@checks_arguments
class QuantizedLinear(nn.QuantizedLinear):
    """``mlx.nn.QuantizedLinear``, computed by :func:`mlx_anvil.quantized_matmul`: ``y = x W^T + b``.

    ``x`` is ``[..., input_dims]``, the result ``[..., output_dims]``. Arguments and parameters are those of MLX's
    layer, so weights load and save unchanged. ``from_linear`` is inherited.
    """

    @classmethod
    def from_mlx(cls, layer: nn.QuantizedLinear) -> "QuantizedLinear":
        """Makes a layer that shares the parameters of MLX's layer."""
        outputs, packed = layer.weight.shape
        inputs = packed * 32 // layer.bits
        ours = cls(inputs, outputs, "bias" in layer, layer.group_size, layer.bits, layer.mode)
        ours.update(layer.parameters())  # type: ignore[no-untyped-call]
        return ours

    def __call__(self, x: mx.array) -> mx.array:
        y = quantized_matmul(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        return y + self["bias"] if "bias" in self else y


@checks_arguments
class QuantizedEmbedding(nn.QuantizedEmbedding):
    """``mlx.nn.QuantizedEmbedding``, computed by :func:`mlx_anvil.quantized_embedding`.

    Takes integer ids of any shape and returns ``[..., dims]``. ``as_linear``, for models whose output head shares the
    table, is computed by :func:`mlx_anvil.quantized_matmul`. Arguments and parameters are those of MLX's layer, so
    weights load and save unchanged. ``from_embedding`` is inherited.
    """

    @classmethod
    def from_mlx(cls, layer: nn.QuantizedEmbedding) -> "QuantizedEmbedding":
        """Makes a layer that shares the parameters of MLX's layer."""
        ours = cls(1, layer.dims, layer.group_size, layer.bits, layer.mode)
        ours.update(layer.parameters())  # type: ignore[no-untyped-call]
        ours.num_embeddings = layer.num_embeddings
        return ours

    def _matrix(self) -> dict[str, Any]:
        arrays = {"w": self["weight"], "scales": self["scales"], "biases": self.get("biases")}
        return arrays | {key: getattr(self, key) for key in ("group_size", "bits", "mode")}

    def __call__(self, x: mx.array) -> mx.array:
        return quantized_embedding(x, **self._matrix())

    def as_linear(self, x: mx.array) -> mx.array:
        """``x W^T``: logits of ``[..., dims]`` over the rows of the table."""
        return quantized_matmul(x, **self._matrix())


@checks_arguments
class RoPE(nn.RoPE):
    """``mlx.nn.RoPE``, computed by :func:`mlx_anvil.rope`. It has no parameters.

    ``x`` is ``[batch, heads, length, head_dim]``; ``offset`` is the position of its first element, an int or one per
    batch.
    """

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return rope(x, self.dims, traditional=self.traditional, base=self.base, scale=self.scale, offset=offset)


@checks_arguments
class QuantizedSwiGLU(nn.Module):
    """The Llama MLP with quantized projections. For up to 8 rows, one kernel computes ``silu(x Wg^T) * (x Wu^T)``.

    Input and output are ``[..., dims]``. See :func:`mlx_anvil.quantized_swiglu`.

    Args:
        dims: size of the last axis of input and output.
        hidden_dims: size of the last axis between the projections.
        group_size: see ``mlx.nn.QuantizedLinear``.
        bits: see ``mlx.nn.QuantizedLinear``.
        mode: see ``mlx.nn.QuantizedLinear``.
    """

    def __init__(
        self,
        dims: int,
        hidden_dims: int,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        options: dict[str, Any] = {"bias": False, "group_size": group_size, "bits": bits, "mode": mode}
        self.gate_proj = QuantizedLinear(dims, hidden_dims, **options)
        self.up_proj = QuantizedLinear(dims, hidden_dims, **options)
        self.down_proj = QuantizedLinear(hidden_dims, dims, **options)

    @classmethod
    def from_swiglu(
        cls, module: SwiGLU, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
    ) -> "QuantizedSwiGLU":
        """Quantizes the projections of ``module``.

        Raises:
            ValueError: a projection has a bias.
        """
        projections = {name: module[name] for name in ("gate_proj", "up_proj", "down_proj")}
        if any("bias" in projection for projection in projections.values()):
            raise ValueError("[QuantizedSwiGLU] module has biases; allowed: SwiGLU(..., bias=False).")
        hidden_dims, dims = module.gate_proj.weight.shape
        options: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
        ours = cls(dims, hidden_dims, **options)
        for name, projection in projections.items():
            ours[name] = QuantizedLinear.from_linear(projection, **options)
        return ours

    @classmethod
    def from_mlx(cls, mlp: nn.Module) -> "QuantizedSwiGLU":
        """Makes a module that shares the parameters of an MLP after ``mlx.nn.quantize``.

        Raises:
            ValueError: ``gate_proj``, ``up_proj`` or ``down_proj`` is not an ``mlx.nn.QuantizedLinear`` without a bias,
                or gate and up differ in format.
        """
        names = ("gate_proj", "up_proj", "down_proj")
        layers = []
        for name in names:
            layer = getattr(mlp, name, None)
            if not isinstance(layer, nn.QuantizedLinear) or "bias" in layer:
                raise ValueError(
                    f"[QuantizedSwiGLU] {name} is {layer!r}; allowed: mlx.nn.QuantizedLinear without a bias."
                )
            layers.append(QuantizedLinear.from_mlx(layer))
        gate, up, down = layers
        formats = [(layer.mode, layer.bits, layer.group_size) for layer in (gate, up)]
        if formats[0] != formats[1]:
            raise ValueError(
                f"[QuantizedSwiGLU] gate_proj has (mode, bits, group_size) {formats[0]} and up_proj {formats[1]};"
                " allowed: equal formats."
            )
        hidden_dims, dims = down.weight.shape[1] * 32 // down.bits, down.weight.shape[0]
        ours = cls(dims, hidden_dims, gate.group_size, gate.bits, gate.mode)
        ours.gate_proj, ours.up_proj, ours.down_proj = gate, up, down
        return ours

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = (
            tuple(layer[name] for name in ("weight", "scales", "biases") if layer.get(name) is not None)
            for layer in (self.gate_proj, self.up_proj)
        )
        options = {key: getattr(self.gate_proj, key) for key in ("group_size", "bits", "mode")}
        return self.down_proj(quantized_swiglu(x, gate, up, **options))


@checks_arguments
class RMSNorm(nn.RMSNorm):
    """``mlx.nn.RMSNorm``, computed by :func:`mlx_anvil.rms_norm`. It has the parameter of MLX's layer.

    Args:
        dims: size of the last axis.
        eps: added to the mean of squares. Default: ``1e-5``.
        weight_offset: added to the weight; 1 for Gemma's weights. The weight is initialized to ``1 - weight_offset``.
            Default: 0.
    """

    def __init__(self, dims: int, eps: float = 1e-5, weight_offset: float = 0.0) -> None:
        super().__init__(dims, eps)
        self.weight = self.weight - weight_offset
        self.weight_offset = weight_offset

    @overload
    def __call__(self, x: mx.array, residual: None = None, gate: mx.array | None = None) -> mx.array: ...
    @overload
    def __call__(self, x: mx.array, residual: mx.array, gate: mx.array | None = None) -> tuple[mx.array, mx.array]: ...
    def __call__(
        self, x: mx.array, residual: mx.array | None = None, gate: mx.array | None = None
    ) -> mx.array | tuple[mx.array, mx.array]:
        """The norm of ``x``, times ``silu(gate)`` if there is a gate. All arrays are ``[..., dims]``.

        With a residual, returns the norm of ``x + residual``, and that sum.
        """
        options: dict[str, Any] = {"residual": residual, "gate": gate, "weight_offset": self.weight_offset}
        return cast(mx.array, rms_norm(x, self["weight"], self.eps, **options))


@checks_arguments
class LayerNorm(nn.LayerNorm):
    """``mlx.nn.LayerNorm``, computed by :func:`mlx_anvil.layer_norm`. It has the arguments and parameters of MLX's."""

    @overload
    def __call__(self, x: mx.array, residual: None = None) -> mx.array: ...
    @overload
    def __call__(self, x: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]: ...
    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array | tuple[mx.array, mx.array]:
        """The norm of ``x``. All arrays are ``[..., dims]``.

        With a residual, returns the norm of ``x + residual``, and that sum.
        """
        options: dict[str, Any] = {"residual": residual}
        return cast(mx.array, layer_norm(x, self.get("weight"), self.get("bias"), self.eps, **options))
