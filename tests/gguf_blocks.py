"""Random matrices in the blocks of GGUF's formats, and their exact weights as the gguf package reads them."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

# Bytes of a block, its columns, and where its float16 scales are.
BLOCKS = {
    "q4_0": (18, 32, (0,)),
    "q8_0": (34, 32, (0,)),
    "q4_k": (144, 256, (0, 2)),
    "q5_k": (176, 256, (0, 2)),
    "q6_k": (210, 256, (208,)),
    "iq4_nl": (18, 32, (0,)),
    "iq4_xs": (136, 256, (0,)),
}
MODES = tuple(BLOCKS)


def type_of(mode: str) -> Any:
    return gguf.GGMLQuantizationType[mode.upper()]


def dequantized(mode: str, blocks: np.ndarray) -> np.ndarray:
    """Float32 [..., columns], of uint8 [..., bytes of a row]."""
    with np.errstate(invalid="ignore", over="ignore"):  # scales may be infinite or not a number
        rows = gguf.quants.dequantize(blocks.reshape(-1, blocks.shape[-1]), type_of(mode))
    return rows.reshape(*blocks.shape[:-1], -1)


@dataclass
class GgufMatrix:
    """A matrix [..., rows, columns] of random codes and scales."""

    mode: str
    w: mx.array
    weights: np.ndarray  # float32

    @classmethod
    def random(cls, rng: np.random.Generator, mode: str, *shape: int, scale: float = 0.01) -> "GgufMatrix":
        """Scales of blocks are random numbers of both signs, about ``scale``; everything else is random bytes."""
        size, columns, halves = BLOCKS[mode]
        blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // columns, size), np.uint8)
        for at in halves:
            scales = scale * rng.uniform(0.5, 1.5, blocks.shape[:-1]) * rng.choice([-1, 1], blocks.shape[:-1])
            blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
        return cls.of_bytes(mode, blocks.reshape(*shape[:-1], -1))

    @classmethod
    def of_bytes(cls, mode: str, rows: np.ndarray) -> "GgufMatrix":
        return cls(mode, mx.array(rows), dequantized(mode, rows))
