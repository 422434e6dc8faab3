"""Small calls of quantized_experts."""

import mlx.core as mx

from support import Arrays

EXPERTS, DIMS, HIDDEN = 6, 64, 96
MODES = {"affine": {"group_size": 32, "bits": 4}, "mxfp4": {}, "mxfp8": {}, "nvfp4": {}}
DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


def quantized(outputs: int, columns: int, mode: str = "affine", experts: int = EXPERTS, **options) -> tuple:
    matrix = mx.random.normal((experts, outputs, columns)) * columns**-0.5
    return tuple(mx.quantize(matrix, mode=mode, **options))


def matrices(mode: str = "affine", experts: int = EXPERTS, hidden: int = HIDDEN, **options) -> list[tuple]:
    shapes = ((hidden, DIMS), (hidden, DIMS), (DIMS, hidden))
    return [quantized(*shape, mode, experts, **options) for shape in shapes]


def tokens_of(*shape: int, k: int = 3, experts: int = EXPERTS) -> Arrays:
    """Tokens, ids and weights."""
    scores = mx.random.normal((*shape, experts))
    ids = mx.argsort(scores, axis=-1)[..., :k]
    return [mx.random.normal((*shape, DIMS)), ids, mx.softmax(mx.take_along_axis(scores, ids, axis=-1), axis=-1)]


def explicit(mode: str, options: dict) -> dict:
    """The definition has no defaults that depend on the mode."""
    group_size, bits = DEFAULTS[mode]
    return {"group_size": group_size, "bits": bits, "mode": mode} | options
