"""MLX's quantized formats in NumPy, independent of MLX: exact weights in float64, and matrices of random codes and
scales in which all of them appear."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

import support
from mlx_anvil._check import OUTPUT_FACTOR
from support import FLOAT32_TOLERANCE, to_numpy

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Format:
    """A quantized format: mode, group_size and bits."""

    mode: str
    group_size: int
    bits: int

    @property
    def options(self) -> dict[str, Any]:
        return {"mode": self.mode, "group_size": self.group_size, "bits": self.bits}

    @property
    def affine(self) -> bool:
        return self.mode == "affine"

    def __str__(self) -> str:
        return f"{self.mode}-{self.bits}bit-g{self.group_size}"


AFFINE_FORMATS = tuple(Format("affine", group, bits) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128))
FLOAT_FORMATS = (Format("mxfp4", 32, 4), Format("mxfp8", 32, 8), Format("nvfp4", 16, 4))
FORMATS = AFFINE_FORMATS + FLOAT_FORMATS


def any_format_of_each_kind(rng: np.random.Generator) -> list[Format]:
    """One format for each mode and number of bits, which have separate kernels, with a random group size."""
    kinds = dict.fromkeys((format.mode, format.bits) for format in FORMATS)
    alike = ([format for format in FORMATS if (format.mode, format.bits) == kind] for kind in kinds)
    return [formats[rng.integers(len(formats))] for formats in alike]


@dataclass
class Matrix:
    """A quantized matrix [..., rows, columns]: the arrays that an op takes."""

    format: Format
    w: mx.array
    scales: mx.array
    biases: mx.array | None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.w, self.scales) if self.biases is None else (self.w, self.scales, self.biases)

    @classmethod
    def of_codes(
        cls,
        format: Format,
        codes: np.ndarray,
        *,
        scale: float = 1.0,
        bias: float = 0.0,
        raw_scales: np.ndarray | None = None,
        dtype: mx.Dtype = mx.float32,
    ) -> "Matrix":
        """Given codes, with one scale and bias for all groups; ``raw_scales`` are codes of scales, one for each
        group."""
        per_group = (*codes.shape[:-1], codes.shape[-1] // format.group_size)
        w = mx.array(pack(codes, format.bits))
        if format.affine:
            return cls(format, w, *(mx.full(per_group, value, dtype) for value in (scale, bias)))
        one = 0x38 if format.mode == "nvfp4" else 127
        raw = np.full(per_group, one) if raw_scales is None else raw_scales
        return cls(format, w, mx.array(raw.astype(np.uint8)), None)

    @property
    def weights(self) -> np.ndarray:
        """Every weight, in float64."""
        return decode(self.format, np.array(self.w), self.scales, self.biases)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The codes of rows of uint32, which are streams of bits from the lowest bit of the first word."""
    stream = np.unpackbits(np.ascontiguousarray(packed.astype("<u4")).view(np.uint8), axis=-1, bitorder="little")
    digits = stream.reshape(*stream.shape[:-1], stream.shape[-1] // bits, bits).astype(np.int64)
    return digits @ (1 << np.arange(bits))


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack`."""
    digits = (codes[..., None] >> np.arange(bits)) & 1
    stream = digits.reshape(*codes.shape[:-1], codes.shape[-1] * bits).astype(np.uint8)
    return np.packbits(stream, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def e2m1(code: np.ndarray) -> np.ndarray:
    return np.where(code & 8, -1.0, 1.0) * E2M1[code & 7]


def e4m3(code: np.ndarray) -> np.ndarray:
    """One sign bit, four of exponent with bias 7, three of fraction; no infinities, 0x7f and 0xff are NaN."""
    exponent, fraction = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.where(code & 128, -1.0, 1.0) * np.where((code & 127) == 127, np.nan, magnitude)


def e8m0(code: np.ndarray) -> np.ndarray:
    return 2.0 ** (code.astype(np.float64) - 127)


def decode(format: Format, packed: np.ndarray, scales: mx.array, biases: mx.array | None) -> np.ndarray:
    codes = unpack(packed, format.bits)
    if format.affine:
        value, scale = codes.astype(np.float64), to_numpy(scales)
    else:
        raw = np.array(scales).astype(np.int64)
        value = e4m3(codes) if format.bits == 8 else e2m1(codes)
        scale = e4m3(raw) if format.mode == "nvfp4" else e8m0(raw)
    weights = value * np.repeat(scale, format.group_size, axis=-1)
    return weights if biases is None else weights + np.repeat(to_numpy(biases), format.group_size, axis=-1)


def draw(format: Format, shape: tuple[int, ...], rng: np.random.Generator, dtype: mx.Dtype = mx.float32) -> Matrix:
    """Weights of magnitude about 1. Every code is as likely as any other; scales have both signs where the format has
    them."""
    top = 2**format.bits
    codes = rng.integers(0, top, shape)
    if format.mode == "mxfp8":
        codes = np.where((codes & 127) == 127, codes - 1, codes)  # not NaN
    per_group = (*shape[:-1], shape[-1] // format.group_size)
    w = mx.array(pack(codes, format.bits))
    if format.affine:
        scales = rng.standard_normal(per_group) * 2 / top
        biases = rng.standard_normal(per_group)
        return Matrix(format, w, *(mx.array(x.astype(np.float32)).astype(dtype) for x in (scales, biases)))
    if format.mode == "nvfp4":
        raw = rng.integers(0x20, 0x38, per_group) | (rng.integers(0, 2, per_group) << 7)
    else:
        raw = rng.integers(117, 121, per_group) if format.bits == 8 else rng.integers(122, 128, per_group)
    return Matrix(format, w, mx.array(raw.astype(np.uint8)), None)


def normal(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def exact_product(x: mx.array, matrix: Matrix, transpose: bool = True) -> np.ndarray:
    """x W^T, or x W without ``transpose``, in float64."""
    weights = matrix.weights
    return to_numpy(x) @ (weights.swapaxes(-1, -2) if transpose else weights)


def gradients(x: mx.array, matrix: Matrix, dy: mx.array) -> list[np.ndarray]:
    """The exact gradients of x W^T in x and, for affine formats, in scales and biases."""
    d_x = to_numpy(dy) @ matrix.weights
    if not matrix.format.affine:
        return [d_x]
    d_weights = to_numpy(dy).T @ to_numpy(x)
    per_group = (*matrix.scales.shape, matrix.format.group_size)
    codes = unpack(np.array(matrix.w), matrix.format.bits)
    return [d_x, (d_weights * codes).reshape(per_group).sum(-1), d_weights.reshape(per_group).sum(-1)]


# Among more, one is off by nearly half a unit of the largest once it is rounded.
FEW_OUTPUTS = 64


def half_units(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Half the distance between adjacent numbers of a 16-bit format at x."""
    bits = 10 if dtype == mx.float16 else 7
    return np.where(x == 0, 0.0, np.ldexp(1.0, np.frexp(x)[1] - bits - 2))


def dense_factor(rows: int, dense: bool = support.backend == "cuda") -> float:
    """The factor of :func:`assert_rounded` for a product. For more than 8 rows, CUDA also rounds the weights to 16
    bits."""
    return 2 * OUTPUT_FACTOR if dense and rows > 8 else OUTPUT_FACTOR


def assert_rounded(
    result: mx.array,
    exact: np.ndarray,
    dtype: mx.Dtype,
    *,
    factor: float = OUTPUT_FACTOR,
    float32_tolerance: float = FLOAT32_TOLERANCE,
    terms: float = 0,
) -> None:
    """Checks a result against the exact one. The limit of float32 is a fraction of the output's scale. That of 16-bit
    formats is ``factor`` times the error of the exact result rounded to the format, which is stricter than the error of
    a composed graph. ``terms`` is the number of terms of a sum, each about 1: the scale is at least its square root,
    because a single output may be small by chance."""
    assert result.dtype == dtype
    assert result.shape == exact.shape
    if exact.size == 0:
        return
    scale = max(np.abs(exact).max(), terms**0.5)
    limit = float32_tolerance * scale
    if dtype != mx.float32:
        rounded = to_numpy(mx.array(exact.astype(np.float32)).astype(dtype))
        off = np.abs(rounded - exact).max()
        if exact.size < FEW_OUTPUTS:  # all of which may happen to lie near numbers of the format
            off = max(off, half_units(np.abs(exact).max(), dtype))
        # x may be taken as integers of 16 bits, which are off by an eighth of float16's unit at most.
        limit = factor * off + 6e-5 * scale
    error = np.abs(to_numpy(result) - exact)
    assert np.isfinite(error).all()
    assert error.max() <= limit, f"{error.max():.2e} is more than {limit:.2e}"
