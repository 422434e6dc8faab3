"""Modules that use the ops: drop-in parts for models built with ``mlx.nn``."""

from typing import Any, cast, overload

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil._ext import (
    layer_norm,
    quantized_embedding,
    quantized_matmul,
    quantized_swiglu,
    rms_norm,
    rope,
    silu_gate,
)


class SwiGLU(nn.Module):
    """The Llama MLP: ``down(silu(gate(x)) * up(x))``, with the gate in one fused kernel.

    Parameters are named as in mlx-lm's Llama (``gate_proj``, ``up_proj``, ``down_proj``), so weights load unchanged.

    Args:
        dims: size of the last axis of input and output.
        hidden_dims: size of the hidden axis.
        bias: whether the three projections have a bias. Default: ``False``.
    """

    def __init__(self, dims: int, hidden_dims: int, bias: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj = nn.Linear(dims, hidden_dims, bias=bias)
        self.up_proj = nn.Linear(dims, hidden_dims, bias=bias)
        self.down_proj = nn.Linear(hidden_dims, dims, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(silu_gate(self.gate_proj(x), self.up_proj(x)))


class QuantizedLinear(nn.QuantizedLinear):
    """``mlx.nn.QuantizedLinear`` through :func:`mlx_anvil.quantized_matmul`.

    Arguments, parameters and their names are those of MLX's, so weights load and save unchanged; ``from_linear`` is
    inherited.
    """

    @classmethod
    def from_mlx(cls, layer: nn.QuantizedLinear) -> "QuantizedLinear":
        """With the parameters of MLX's layer, which are shared, not copied."""
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


class QuantizedEmbedding(nn.QuantizedEmbedding):
    """``mlx.nn.QuantizedEmbedding`` through :func:`mlx_anvil.quantized_embedding`; ``as_linear``, for models that share
    the table with their last layer, through :func:`mlx_anvil.quantized_matmul`.

    Arguments, parameters and their names are those of MLX's, so weights load and save unchanged; ``from_embedding`` is
    inherited.
    """

    @classmethod
    def from_mlx(cls, layer: nn.QuantizedEmbedding) -> "QuantizedEmbedding":
        """With the parameters of MLX's layer, which are shared, not copied."""
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
        return quantized_matmul(x, **self._matrix())


class RoPE(nn.RoPE):
    """``mlx.nn.RoPE`` through :func:`mlx_anvil.rope`; it has no parameters."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return rope(x, self.dims, traditional=self.traditional, base=self.base, scale=self.scale, offset=offset)


class QuantizedSwiGLU(nn.Module):
    """The Llama MLP with quantized projections: gate and up in one kernel for up to 8 rows.

    Args:
        dims: size of the last axis of input and output.
        hidden_dims: size of the hidden axis.
        group_size: as for ``mlx.nn.QuantizedLinear``.
        bits: likewise.
        mode: likewise.
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
        """Quantizes the projections of ``module``, which have to be without a bias."""
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
        """From an MLP after ``mlx.nn.quantize``: its ``gate_proj``, ``up_proj`` and ``down_proj`` are MLX's
        ``QuantizedLinear`` without a bias, gate and up in one format. Parameters are shared, not copied."""
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


class RMSNorm(nn.RMSNorm):
    """``mlx.nn.RMSNorm`` through :func:`mlx_anvil.rms_norm`; its parameter is that of MLX's.

    Args:
        dims: size of the last axis.
        eps: added to the mean of squares. Default: ``1e-5``.
        weight_offset: added to the weight; 1 for Gemma's weights. The weight starts at what makes 1 with it. Default: 0.
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
        """With a residual: the norm of ``x + residual``, and that sum."""
        options: dict[str, Any] = {"residual": residual, "gate": gate, "weight_offset": self.weight_offset}
        return cast(mx.array, rms_norm(x, self["weight"], self.eps, **options))


class LayerNorm(nn.LayerNorm):
    """``mlx.nn.LayerNorm`` through :func:`mlx_anvil.layer_norm`; arguments and parameters are those of MLX's."""

    @overload
    def __call__(self, x: mx.array, residual: None = None) -> mx.array: ...
    @overload
    def __call__(self, x: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]: ...
    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array | tuple[mx.array, mx.array]:
        """With a residual: the norm of ``x + residual``, and that sum."""
        options: dict[str, Any] = {"residual": residual}
        return cast(mx.array, layer_norm(x, self.get("weight"), self.get("bias"), self.eps, **options))
