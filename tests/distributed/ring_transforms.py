"""Transforms of ring attention, in each process beside the same of the whole arrays."""

from collections.abc import Callable
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
from ring_programs import rows_of

import mlx_anvil
from mlx_anvil.distributed import ring_attention

PART, HEADS, KV_HEADS, DIM = 6, 4, 2, 8
Function = Callable[..., mx.array]


class Sides:
    """The function of this rank's part, and that of the whole arrays."""

    def __init__(self, seed: int, layout: str, **options: object) -> None:
        self.group = mx.distributed.init()
        self.rows = rows_of(self.group.rank(), self.group.size(), PART, layout)
        self._draw = np.random.default_rng(seed)
        self._layout, self._options = layout, options

    def ours(self, *arrays: mx.array) -> mx.array:
        return ring_attention(*arrays, group=self.group, layout=self._layout, **self._options)

    def theirs(self, *arrays: mx.array) -> mx.array:
        return mlx_anvil.flash_attention(*arrays, **self._options)

    def draw(self, count: int, *front: int) -> list[mx.array]:
        """Queries, keys and values of the whole sequence, in turn."""
        length = PART * self.group.size()
        heads = [HEADS, KV_HEADS, KV_HEADS, HEADS]
        shapes = [(*front, 2, heads[i % 4], length, DIM) for i in range(count)]
        return [mx.array(self._draw.standard_normal(shape).astype(np.float32)) for shape in shapes]

    def part(self, x: mx.array, axis: int = 2) -> mx.array:
        return mx.contiguous(mx.take(x, mx.array(self.rows), axis=axis))

    def error(self, ours: list[mx.array], theirs: list[mx.array], axis: int = 2) -> float:
        """The largest deviation, relative to the largest number of each array."""
        worst = 0.0
        for x, whole in zip(ours, theirs, strict=True):
            want = self.part(whole, axis)
            assert x.shape == want.shape, (x.shape, want.shape)
            worst = max(worst, float(mx.abs(x - want).max() / mx.abs(whole).max()))
        return worst


def first_derivatives(function: Function) -> Callable[..., list[mx.array]]:
    """The gradients of the sum of squares: these depend on the result too."""
    return mx.grad(lambda q, k, v: function(q, k, v).square().sum(), argnums=(0, 1, 2))


def second_derivatives(function: Function) -> Callable[..., list[mx.array]]:
    def of_gradients(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return sum(x.square().sum() for x in first_derivatives(function)(q, k, v))

    return mx.grad(of_gradients, argnums=(0, 1, 2))


def deviations(seed: int, layout: str, options: dict[str, object], simulated: bool = False) -> dict[str, float]:
    with mlx_anvil.simulate() if simulated else nullcontext():
        return _deviations(seed, layout, options)


def _deviations(seed: int, layout: str, options: dict[str, object]) -> dict[str, float]:
    sides = Sides(seed, layout, **options)
    whole = sides.draw(3)
    own = [sides.part(x) for x in whole]
    found = {}

    def compare(name: str, transform: Callable[[Function], Callable[..., list[mx.array]]]) -> None:
        ours, theirs = list(transform(sides.ours)(*own)), list(transform(sides.theirs)(*whole))
        found[name] = sides.error(ours, theirs)

    compare("gradient", first_derivatives)
    compare("second gradient", second_derivatives)
    compare("compiled", lambda f: lambda *x: [mx.compile(f)(*x)])
    compare("shapeless", lambda f: lambda *x: [mx.compile(f, shapeless=True)(*x)])
    compare("compiled gradient", lambda f: mx.compile(first_derivatives(f)))
    compare("shapeless gradient", lambda f: mx.compile(first_derivatives(f), shapeless=True))
    compare("checkpoint", lambda f: first_derivatives(mx.checkpoint(f)))
    tangents = sides.draw(3)
    part_of_tangents = [sides.part(x) for x in tangents]
    ours = mx.jvp(sides.ours, own, part_of_tangents)[1]
    found["tangent"] = sides.error(ours, mx.jvp(sides.theirs, whole, tangents)[1])
    return found | _batched(sides)


def _batched(sides: Sides) -> dict[str, float]:
    """vmap over an axis of each subset of the arrays, at each place, and gradients through it."""
    found = {}
    whole, with_axis = sides.draw(3), sides.draw(3, 3)
    for subset in range(1, 8):
        axis = subset % 5
        mapped = [bool(subset >> i & 1) for i in range(3)]
        axes = tuple(axis if is_mapped else None for is_mapped in mapped)
        arrays = [b if is_mapped else a for a, b, is_mapped in zip(whole, with_axis, mapped, strict=True)]
        own = [sides.part(x, 3 if is_mapped else 2) for x, is_mapped in zip(arrays, mapped, strict=True)]
        for name, transform in {"vmap": lambda f: f, "vmap of gradients": first_derivatives}.items():
            results = []
            for function, given in ((sides.ours, own), (sides.theirs, arrays)):
                moved = [
                    mx.moveaxis(x, 0, axis) if is_mapped else x for x, is_mapped in zip(given, mapped, strict=True)
                ]
                result = mx.vmap(transform(function), in_axes=axes)(*moved)
                results.append([result] if isinstance(result, mx.array) else list(result))
            found[f"{name} {axes}"] = sides.error(*results, axis=3)
    return found
