"""Layers whose weights are GGUF's own blocks of bytes."""

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil._calls import checks_arguments
from mlx_anvil._ext import quantized_embedding, quantized_matmul

# Columns and bytes of a block. tests/gguf_matmul checks them against the ops.
BLOCKS = {
    "q4_0": (32, 18),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
}


def _row_bytes(layer: str, columns: int, mode: str) -> int:
    if mode not in BLOCKS:
        raise ValueError(f"[{layer}] mode is {mode!r}; allowed: {', '.join(map(repr, BLOCKS))}.")
    block, size = BLOCKS[mode]
    if columns % block:
        raise ValueError(f"[{layer}] {columns} columns; allowed in mode {mode!r}: a multiple of {block}.")
    return columns // block * size


@checks_arguments
class GgufLinear(nn.Module):
    """A linear layer whose weight is a GGUF tensor as it is in the file: ``y = x W^T + b``.

    ``x`` is ``[..., input_dims]``, the result ``[..., output_dims]``. ``weight`` is uint8 ``[output_dims, bytes of a
    row]``; it is zero at first, and frozen. See :func:`mlx_anvil.quantized_matmul`.

    Args:
        input_dims: size of the last axis of the input, a multiple of the block of ``mode``.
        output_dims: size of the last axis of the output.
        bias: if True, the layer has a bias. Default: ``True``, as in ``mlx.nn.Linear``.
        mode: GGUF's format, such as ``"q4_k"``. Default: ``"q4_k"``.

    Attributes:
        activation_bits: that argument of the op, which you may set at any time. Default: ``None``.

    Raises:
        ValueError: an unknown ``mode``, or ``input_dims`` that are not a multiple of its block.
    """

    activation_bits: int | None = None

    def __init__(self, input_dims: int, output_dims: int, bias: bool = True, mode: str = "q4_k") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.weight = mx.zeros((output_dims, _row_bytes("GgufLinear", input_dims, mode)), mx.uint8)
        if bias:
            self.bias = mx.zeros((output_dims,))
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        y = quantized_matmul(x, self["weight"], mode=self.mode, activation_bits=self.activation_bits)
        return y + self["bias"] if "bias" in self else y


@checks_arguments
class GgufEmbedding(nn.Module):
    """An embedding whose table is a GGUF tensor as it is in the file.

    Takes integer ids of any shape and returns ``[..., dims]``. ``as_linear``, for models whose output head shares the
    table, is computed by :func:`mlx_anvil.quantized_matmul`. ``weight`` is uint8 ``[num_embeddings, bytes of a row]``;
    it is zero at first, and frozen. See :func:`mlx_anvil.quantized_embedding`.

    Args:
        num_embeddings: number of rows.
        dims: columns, a multiple of the block of ``mode``.
        mode: GGUF's format, such as ``"q4_k"``. Default: ``"q4_k"``.
        dtype: dtype of the rows: float32, float16 or bfloat16. Default: ``None``, bfloat16.

    Attributes:
        activation_bits: that argument of the product in ``as_linear``. Default: ``None``.

    Raises:
        ValueError: an unknown ``mode``, or ``dims`` that are not a multiple of its block.
    """

    activation_bits: int | None = None

    def __init__(self, num_embeddings: int, dims: int, mode: str = "q4_k", dtype: mx.Dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.dtype = dtype
        self.weight = mx.zeros((num_embeddings, _row_bytes("GgufEmbedding", dims, mode)), mx.uint8)
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        return quantized_embedding(x, self["weight"], mode=self.mode, dtype=self.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """``x W^T``: logits of ``[..., dims]`` over the rows of the table."""
        return quantized_matmul(x, self["weight"], mode=self.mode, activation_bits=self.activation_bits)
