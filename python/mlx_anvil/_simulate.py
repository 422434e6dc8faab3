"""``simulate()``: run the Metal kernels of the ops on this machine's CPU, race-checked if asked."""

import operator
from functools import cache
from typing import TYPE_CHECKING

from mlx_anvil import _ext
from mlx_anvil._block import Block

if TYPE_CHECKING:
    from mlx_anvil.mslc import Library

# By path, so that findings can be traced back to the source they come from.
_libraries: dict[str, "Library"] = {}


def _compile(op: str, kernel: str, constants: dict[int | str, object], checked: bool) -> str:
    """Compiles a kernel of an op for the simulator; returns the path of the library."""
    from mlx_anvil.mslc import CHECKED, UNCHECKED, Library, Source

    source = Source(text=_ext._kernel_source(kernel), name=f"metal/{op}")
    library = Library(source, constants=constants, options=CHECKED if checked else UNCHECKED)
    path = str(library.compiled.path)
    _libraries[path] = library
    return path


def _describe(path: str, report: int) -> str:
    """What the findings in a report at an address say, a line each."""
    return "\n".join(str(finding) for finding in _libraries[path].findings_at(report))


@cache
def _register_toolchain() -> None:
    from mlx_anvil.mslc import find_zig

    find_zig()  # raises, with what to install, before anything is called
    _ext._set_simulator_toolchain(_compile, _describe)


def _seed(value: object) -> int:
    """As 64 bits without a sign."""
    try:
        seed = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        seed = None
    if seed is None or isinstance(value, bool):
        raise TypeError(f"[simulate] seed is a {type(value).__name__}; allowed: an int.")
    if not 0 <= seed < 2**64:
        raise ValueError(f"[simulate] seed is {seed}; allowed: a 64-bit unsigned integer.")
    return seed


def simulate(*, checked: bool = False, seed: int = 0, matrix_units: bool = False) -> Block[None]:
    """Inside the block, ops of this thread (or asyncio task) on CPU streams run their Metal kernels in the simulator.

    The dispatch is the one that Metal gets: same kernel, function constants, bindings, params and grid. Nothing but
    the order in which threads run differs from a GPU's semantics, and it is slow: this is for testing kernels where
    there is no Mac. An op remembers that it was called inside the block, and so do its derivatives, wherever they are
    evaluated.

    Needs the ``sim`` extra, which brings a compiler: ``pip install "mlx-anvil[sim]"``.

    Args:
        checked: find races, accesses out of bounds and the other mistakes that docs/mslc.md lists; several times
            slower. A finding raises RuntimeError, with its place in the ``.metal`` file, when the op is evaluated.
        seed: other than 0 shuffles the order in which threads run; results must not depend on it.
        matrix_units: choose kernels as for a GPU with units for matrix products of 16-bit numbers, such as NVIDIA's.

    Returns:
        Block: for ``with simulate():``, or as a decorator.

    Raises:
        ToolchainError: there is no compiler (the ``sim`` extra), or this is not Linux.
        TypeError: a seed that is no int, another argument that is no bool.
        ValueError: a negative seed, or one of more than 64 bits.
        RuntimeError: with ``checked``, a finding; raised by the evaluation, not by the call. Or one block is entered twice.
    """
    for name, value in (("checked", checked), ("matrix_units", matrix_units)):
        if not isinstance(value, bool):
            raise TypeError(f"[simulate] {name} is a {type(value).__name__}; allowed: a bool.")
    seed = _seed(seed)

    def enter() -> tuple[_ext._Block, None]:
        _register_toolchain()
        return _ext._enter_simulate(checked, seed, matrix_units), None

    return Block("simulate", enter)
