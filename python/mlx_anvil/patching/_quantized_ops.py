"""The quantized products that the modules of one patched model call."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext


@dataclass(frozen=True)
class QuantizedOps:
    """Our products, with the options that ``patch`` was given for them.

    Attributes:
        swapped: whether quantized layers run them; experts do in any case.
        activation_bits: that argument of the ops.
    """

    swapped: bool = True
    activation_bits: int | None = None

    def matmul(self, *args: Any, **options: Any) -> mx.array:
        """``quantized_matmul``."""
        return _ext.quantized_matmul(*args, activation_bits=self.activation_bits, **options)

    def swiglu(self, *args: Any, **options: Any) -> mx.array:
        """``quantized_swiglu``."""
        return _ext.quantized_swiglu(*args, activation_bits=self.activation_bits, **options)

    def experts(self, *args: Any, **options: Any) -> mx.array:
        """``quantized_experts``."""
        return _ext.quantized_experts(*args, activation_bits=self.activation_bits, **options)

    def gather_qmm(self, *args: Any, global_scale: mx.array | None = None, **options: Any) -> mx.array:
        """``gather_quantized_matmul``, with the arguments of ``mx.gather_qmm``."""
        if global_scale is not None:
            raise ValueError("[gather_quantized_matmul] global_scale is an array; allowed: None.")
        return _ext.gather_quantized_matmul(*args, activation_bits=self.activation_bits, **options)
