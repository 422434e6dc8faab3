"""Which calls the report makes, and on which backends."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from mlx_anvil import _info
from mlx_anvil._check import Case
from mlx_anvil._simulate import simulate
from mlx_anvil.reference import DTYPES, OPS

SIMULATOR = "simulator"


def backends() -> list[str]:
    """All on which ops can run here, the simulator last."""
    usable = [name for name in _info.usable_backends() if name != SIMULATOR]
    return usable + [SIMULATOR] * _info.info()["backends"][SIMULATOR]["usable"]


def small(backend: str, quick: bool) -> list[Case]:
    """Odd, small shapes of the contract tests: for correctness. One of each op where running them takes long."""
    brief = quick or backend == SIMULATOR
    return [
        Case(spec, gradient, dtype, shape, backend)
        for spec in OPS.values()
        for shape in _full(spec.contract_shapes)[-1 if brief else 0 :]
        for gradient in (False, True)
        for dtype in ((mx.float16,) if brief else DTYPES)
    ]


def large(backend: str, quick: bool) -> list[Case]:
    """Shapes of a model's size: for times. None in the simulator, whose times say nothing."""
    if quick or backend == SIMULATOR:
        return []
    return [
        Case(spec, gradient, dtype, spec.check_shapes[-1], backend)
        for spec in OPS.values()
        for gradient in (False, True)
        for dtype in (mx.float16, mx.bfloat16)
    ]


def _full(shapes: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    return [shape for shape in shapes if 0 not in shape]


@contextmanager
def running_on(backend: str) -> Iterator[None]:
    """Inside, ops run on the backend."""
    if backend == SIMULATOR:
        with mx.stream(mx.cpu), simulate():
            yield
    else:
        with mx.stream(mx.cpu if backend == "cpu" else mx.gpu):
            yield
