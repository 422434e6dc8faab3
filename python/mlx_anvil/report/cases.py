"""The cases that the report runs, and their backends."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, zip_longest

import mlx.core as mx

from mlx_anvil import _info
from mlx_anvil._check import Case
from mlx_anvil._simulate import simulate
from mlx_anvil.reference import DTYPES, OPS

GPUS, SIMULATOR = ("metal", "cuda"), "simulator"


def backends() -> list[str]:
    """All backends that are usable here, GPUs first."""
    facts = _info.info()["backends"]
    return [name for name in (*GPUS, "cpu", SIMULATOR) if facts[name]["usable"]]


def small(backend: str, quick: bool) -> list[Case]:
    """Cases for correctness, at the small odd shapes of the contract tests; one shape per op if ``quick`` or simulated.

    The first shape of every op comes before the second of any, so that a time limit leaves out no op.
    """
    brief = quick or backend == SIMULATOR
    of_ops = [[(spec, shape) for shape in _full(spec.contract_shapes)[-1 if brief else 0 :]] for spec in OPS.values()]
    return [
        Case(pair[0], gradient, dtype, pair[1], backend)
        for pair in chain.from_iterable(zip_longest(*of_ops))
        if pair is not None
        for gradient in (False, True)
        for dtype in ((mx.float16,) if brief else DTYPES)
    ]


def large(backend: str, quick: bool) -> list[Case]:
    """Cases for times, at the size of a model. The simulator has none, because its times mean nothing."""
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
    """Inside the block, ops run on the backend."""
    if backend == SIMULATOR:
        with mx.stream(mx.cpu), simulate():
            yield
    else:
        with mx.stream(mx.cpu if backend == "cpu" else mx.gpu):
            yield
