"""Problems for flash_attention over quantized keys and values, and the criterion for its results."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_anvil import flash_attention
from support import poison_memory
from tests.flash_attention.cases import FLOAT32_TOLERANCE, OUTPUT_FACTOR, Case, assert_close, error_of
from tests.flash_attention.formulas import ROUNDING, attention


def form_of(bits: int = 4, group: int = 64) -> dict[str, Any]:
    return {"mode": "affine", "bits": bits, "group_size": group}


FOUR_BITS = form_of()


@dataclass
class QuantizedCase:
    """A case whose keys and values are codes, with the numbers that the codes stand for."""

    plain: Case  # k and v in float32
    k: tuple[mx.array, ...]
    v: tuple[mx.array, ...]
    formats: dict[str, Any]

    def attend(self, k: tuple[mx.array, ...] | None = None, v: tuple[mx.array, ...] | None = None) -> Any:
        poison_memory(1 << 16)
        results = flash_attention(
            self.plain.q, k or self.k, v or self.v, return_lse=True, **self.formats, **self.plain.options
        )
        mx.eval(results)
        return results

    def assert_right(self, out: mx.array, lse: mx.array) -> None:
        case, dtype = self.plain, self.plain.q.dtype
        exact, composed = case.reference(), None
        if dtype in ROUNDING:
            k, v = (x.astype(dtype) for x in (case.k, case.v))
            composed = attention(case.q, k, v, case.d_out, round_to=ROUNDING[dtype], **case.options)
        assert out.dtype == dtype
        assert_close("out", out, exact.out, composed and composed.out, OUTPUT_FACTOR)
        tolerance = FLOAT32_TOLERANCE
        if composed and case.q.shape[2] > 8:  # keys are rounded to the dtype, as in the composed graph
            tolerance = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]
        assert error_of(lse, exact.lse) <= tolerance * max(1.0, np.abs(exact.lse).max(initial=0))


def encoded(x: mx.array, form: dict[str, Any]) -> tuple[tuple[mx.array, ...], mx.array]:
    """The arrays of ``mx.quantize``, and what they stand for in float32."""
    rows = mx.quantize(mx.flatten(x, 0, -2), **form)
    exact = [y.astype(mx.float32) if form["mode"] == "affine" and i > 0 else y for i, y in enumerate(rows)]
    values = mx.dequantize(*exact, **form, dtype=None if form["mode"] == "affine" else mx.float32)
    return tuple(mx.unflatten(y, 0, x.shape[:-1]) for y in rows), values.reshape(x.shape)


def quantized(case: Case, form: dict[str, Any] = FOUR_BITS, v_bits: int | None = None) -> QuantizedCase:
    v_form = {**form, "bits": v_bits or form["bits"]}
    k, case.k = encoded(case.k, form)
    v, case.v = encoded(case.v, v_form)
    bits = (form["bits"], v_form["bits"])
    formats = {"kv_group_size": form["group_size"], "kv_mode": form["mode"]}
    formats["kv_bits"] = bits if v_bits else bits[0]
    return QuantizedCase(case, k, v, formats)
