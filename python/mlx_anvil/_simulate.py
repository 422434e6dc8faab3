"""``simulate()``: run the Metal kernels of the ops on this machine's CPU, race-checked if asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from mlx_anvil import _ext


def _compile(op: str, constants: dict[int, bool], checked: bool) -> str:
    """Compiles the kernels of an op for the simulator; returns the path of the library."""
    from mlx_anvil.mslc.compiler import Options, compile_library
    from mlx_anvil.mslc.preprocess import Source

    source = Source(text=_ext._kernel_source(op), name=f"metal/{op}")
    return str(compile_library(source, constants, Options(checked=checked)).path)


@cache
def _register_compiler() -> None:
    from mlx_anvil.mslc.toolchain import find_zig

    find_zig()  # raises, with what to install, before anything is called
    _ext._set_simulator_compiler(_compile)


@contextmanager
def simulate(*, checked: bool = False, seed: int = 0) -> Iterator[None]:
    """Inside the block, ops of this thread on CPU streams run their Metal kernels in the simulator.

    The dispatch is the one that Metal gets: same kernel, function constants, bindings, params and grid. Nothing but
    the order in which threads run differs from a GPU's semantics, and it is slow: this is for testing kernels where
    there is no Mac. An op remembers that it was called inside the block, and so do its derivatives, wherever they are
    evaluated.

    Needs the ``sim`` extra, which brings a compiler: ``pip install "mlx-anvil[sim]"``.

    Args:
        checked: find races, accesses out of bounds and the other mistakes that docs/mslc.md lists; several times
            slower. A finding raises RuntimeError, with its place in the ``.metal`` file, when the op is evaluated.
        seed: other than 0 shuffles the order in which threads run; results must not depend on it.
    """
    if seed < 0:
        raise ValueError(f"[simulate] seed is {seed}; allowed: 0 or more.")
    _register_compiler()
    before = _ext._set_simulation_mode((True, checked, seed))
    try:
        yield
    finally:
        _ext._set_simulation_mode(before)
