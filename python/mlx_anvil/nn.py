"""Modules that use the ops, as drop-in replacements for those of ``mlx.nn``."""

from typing import Any, cast, overload

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil._calls import checks_arguments
from mlx_anvil._ext import (
    gated,
    gather_matmul,
    gather_quantized_matmul,
    layer_norm,
    moe_combine,
    quantized_embedding,
    quantized_experts,
    quantized_matmul,
    quantized_swiglu,
    rms_norm,
    rope,
    silu_gate,
)
from mlx_anvil._gguf_layers import GgufEmbedding as GgufEmbedding
from mlx_anvil._gguf_layers import GgufLinear as GgufLinear
from mlx_anvil._quantized_layers import format_of, matrix_of, options_of


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

    Attributes:
        activation_bits: that argument of the op, which you may set at any time. Default: ``None``.
    """

    activation_bits: int | None = None

    @classmethod
    def from_mlx(cls, layer: nn.QuantizedLinear) -> "QuantizedLinear":
        """Makes a layer that shares the parameters of MLX's layer."""
        outputs, packed = layer.weight.shape
        inputs = packed * 32 // layer.bits
        ours = cls(inputs, outputs, "bias" in layer, layer.group_size, layer.bits, layer.mode)
        ours.update(layer.parameters())  # type: ignore[no-untyped-call]
        return ours

    def __call__(self, x: mx.array) -> mx.array:
        y = quantized_matmul(x, self["weight"], self["scales"], self.get("biases"), **options_of(self))
        return y + self["bias"] if "bias" in self else y


@checks_arguments
class QuantizedEmbedding(nn.QuantizedEmbedding):
    """``mlx.nn.QuantizedEmbedding``, computed by :func:`mlx_anvil.quantized_embedding`.

    Takes integer ids of any shape and returns ``[..., dims]``. ``as_linear``, for models whose output head shares the
    table, is computed by :func:`mlx_anvil.quantized_matmul`. Arguments and parameters are those of MLX's layer, so
    weights load and save unchanged. ``from_embedding`` is inherited.

    Attributes:
        activation_bits: that argument of the product in ``as_linear``. Default: ``None``.
    """

    activation_bits: int | None = None

    @classmethod
    def from_mlx(cls, layer: nn.QuantizedEmbedding) -> "QuantizedEmbedding":
        """Makes a layer that shares the parameters of MLX's layer."""
        ours = cls(1, layer.dims, layer.group_size, layer.bits, layer.mode)
        ours.update(layer.parameters())  # type: ignore[no-untyped-call]
        ours.num_embeddings = layer.num_embeddings
        return ours

    def _matrix(self) -> dict[str, Any]:
        arrays = {"w": self["weight"], "scales": self["scales"], "biases": self.get("biases")}
        return arrays | format_of(self)

    def __call__(self, x: mx.array) -> mx.array:
        return quantized_embedding(x, **self._matrix())

    def as_linear(self, x: mx.array) -> mx.array:
        """``x W^T``: logits of ``[..., dims]`` over the rows of the table."""
        return quantized_matmul(x, **self._matrix(), activation_bits=self.activation_bits)


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
        gate, up = matrix_of(self.gate_proj), matrix_of(self.up_proj)
        return self.down_proj(quantized_swiglu(x, gate, up, **options_of(self.gate_proj)))


@checks_arguments
class SwitchLinear(nn.Module):
    """One linear layer for each expert: ``y = x W[e]^T + b[e]``. See :func:`mlx_anvil.gather_matmul`.

    The parameters have the names of mlx-lm's layer of that name, and ``mlx.nn.quantize`` makes it a
    :class:`QuantizedSwitchLinear`.

    Args:
        input_dims: size of the last axis of the input.
        output_dims: size of the last axis of the output.
        num_experts: number of layers.
        bias: if True, every layer has a bias. Default: ``False``.
    """

    def __init__(self, input_dims: int, output_dims: int, num_experts: int, bias: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        scale = input_dims**-0.5
        self.weight = mx.random.uniform(-scale, scale, (num_experts, output_dims, input_dims))
        if bias:
            self.bias = mx.zeros((num_experts, output_dims))

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        """``[*ids.shape, output_dims]``, of x ``[..., input_dims]``, whose leading axes broadcast with ``ids``."""
        rows = mx.expand_dims(x, -2)
        y = gather_matmul(rows, self["weight"].swapaxes(-1, -2), rhs_indices=ids).squeeze(-2)
        return y + self["bias"][ids] if "bias" in self else y

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
    ) -> "QuantizedSwitchLinear":
        """The layer with quantized weights."""
        experts, outputs, inputs = self["weight"].shape
        ours = QuantizedSwitchLinear(inputs, outputs, experts, "bias" in self, group_size, bits, mode)
        ours.quantize(self["weight"])
        if "bias" in self:
            ours.bias = self["bias"]
        return ours


@checks_arguments
class QuantizedSwitchLinear(nn.Module):
    """:class:`SwitchLinear` with quantized weights. See :func:`mlx_anvil.gather_quantized_matmul`.

    The parameters have the names of mlx-lm's layer of that name. They are frozen.

    Args:
        input_dims: size of the last axis of the input.
        output_dims: size of the last axis of the output.
        num_experts: number of layers.
        bias: if True, every layer has a bias. Default: ``False``.
        group_size: see ``mlx.nn.QuantizedLinear``.
        bits: see ``mlx.nn.QuantizedLinear``.
        mode: see ``mlx.nn.QuantizedLinear``.

    Attributes:
        activation_bits: that argument of the op. Default: ``None``.
    """

    activation_bits: int | None = None

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        num_experts: int,
        bias: bool = False,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        defaults = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}.get(mode, (64, 4))
        self.group_size, self.bits = group_size or defaults[0], bits or defaults[1]
        self.mode = mode
        scale = input_dims**-0.5
        self.quantize(mx.random.uniform(-scale, scale, (num_experts, output_dims, input_dims)))
        if bias:
            self.bias = mx.zeros((num_experts, output_dims))
        self.freeze()

    def quantize(self, weight: mx.array) -> None:
        """Replaces the weights by those of ``weight``, ``[num_experts, output_dims, input_dims]``."""
        self.weight, self.scales, *biases = mx.quantize(weight, self.group_size, self.bits, mode=self.mode)
        if biases:
            self.biases = biases[0]

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        """``[*ids.shape, output_dims]``, of x ``[..., input_dims]``, whose leading axes broadcast with ``ids``."""
        matrix = self["weight"], self["scales"], self.get("biases")
        y = gather_quantized_matmul(mx.expand_dims(x, -2), *matrix, rhs_indices=ids, **options_of(self)).squeeze(-2)
        return y + self["bias"][ids] if "bias" in self else y


@checks_arguments
class SwitchGLU(nn.Module):
    """The experts of a mixture of experts: of each token's experts, ``down(activation(gate(x)) * up(x))``.

    The parameters have the names of mlx-lm's module of that name. After ``mlx.nn.quantize``, one call of
    :func:`mlx_anvil.quantized_experts` computes it, with the sum over a token's experts.

    Args:
        dims: size of the last axis of input and output.
        hidden_dims: size of the last axis between the projections.
        num_experts: number of experts.
        bias: if True, the projections have biases. Default: ``False``.
        activation: as for :func:`mlx_anvil.gated`. Default: ``"silu"``.
        limit: as for :func:`mlx_anvil.gated`. Default: ``None``.
    """

    def __init__(
        self,
        dims: int,
        hidden_dims: int,
        num_experts: int,
        bias: bool = False,
        activation: str = "silu",
        limit: float | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj = SwitchLinear(dims, hidden_dims, num_experts, bias)
        self.up_proj = SwitchLinear(dims, hidden_dims, num_experts, bias)
        self.down_proj = SwitchLinear(hidden_dims, dims, num_experts, bias)
        self.activation = activation
        self.limit = limit

    def __call__(self, x: mx.array, ids: mx.array, weights: mx.array | None = None) -> mx.array:
        """The sum over the experts ``ids``, times ``weights``, of x ``[..., dims]``; ids and weights are ``[..., k]``.

        Without weights, returns the rows ``[..., k, dims]`` of the experts.
        """
        layers = {side: self[f"{side}_proj"] for side in ("gate", "up", "down")}
        gate, up, down = layers.values()
        if all(type(layer) is QuantizedSwitchLinear for layer in layers.values()) and options_of(gate) == options_of(
            up
        ):
            options: dict[str, Any] = {"activation": self.activation, "limit": self.limit, **options_of(gate)}
            options |= {f"down_{key}": value for key, value in format_of(down).items()}
            options |= {f"{side}_bias": layer.get("bias") for side, layer in layers.items()}
            return quantized_experts(x, ids, weights, *map(matrix_of, layers.values()), **options)
        x = mx.expand_dims(x, -2)
        rows = down(gated(gate(x, ids), up(x, ids), activation=self.activation, limit=self.limit), ids)
        if weights is None:
            return cast(mx.array, rows)
        places = mx.arange(ids.size, dtype=mx.int32).reshape(ids.shape)
        return moe_combine(rows.flatten(0, -2), weights, places)


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
