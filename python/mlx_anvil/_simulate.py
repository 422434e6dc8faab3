"""``simulate()``: runs the Metal kernels of the ops on the CPU, optionally race-checked or profiled."""

import itertools
import json
import operator
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from rich.console import Console

from mlx_anvil import _ext
from mlx_anvil._block import Block

if TYPE_CHECKING:
    from mlx_anvil.mslc import LaunchProfile, Library


class Profiles(list["LaunchProfile"]):
    """The profiles of the kernels that ran in one block, in order."""


_profiles: WeakValueDictionary[int, Profiles] = WeakValueDictionary()
_profile_keys = itertools.count(1)

# Keyed by path, so that a finding can be traced to its source.
_libraries: dict[str, "Library"] = {}


def _compile(op: str, kernel: str, constants: dict[int | str, object], checked: bool, profiled: bool) -> str:
    """Compiles a kernel for the simulator, and returns the path of the library."""
    from mlx_anvil.mslc import CHECKED, PROFILED, UNCHECKED, Library, Source

    options = CHECKED if checked else PROFILED if profiled else UNCHECKED
    source = Source(text=_ext._kernel_source(kernel), name=f"metal/{op}")
    console = Console(stderr=True)
    # A kernel that is not in the cache takes seconds.
    with console.status(f"compiling {kernel} for the simulator") if console.is_terminal else nullcontext():
        library = Library(source, constants=constants, options=options)
        path = str(library.compiled.path)
    _libraries[path] = library
    return path


def _describe(path: str, report: int) -> str:
    """Text of the findings in the report at an address, one per line."""
    return "\n".join(str(finding) for finding in _libraries[path].findings_at(report))


def _keep_profile(path: str, kernel: str, report: int, profile: int, key: int) -> None:
    """Appends the profile of a launch to a block's list, unless the caller has dropped it."""
    if (kept := _profiles.get(key)) is not None:
        kept.append(_libraries[path].profile_at(kernel, report, profile))


def _use_compiler(compile: Callable[[str, str, dict[int | str, object], bool, bool], str] = _compile) -> None:
    _ext._set_simulator_toolchain(compile, _describe, _keep_profile)


@cache
def _register_toolchain() -> None:
    from mlx_anvil.mslc import find_zig

    find_zig()  # if it is missing, the error names the package to install
    _use_compiler()


def _seed(value: object) -> int:
    """The seed as an unsigned 64-bit integer."""
    try:
        seed = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        seed = None
    if seed is None or isinstance(value, bool):
        raise TypeError(f"[simulate] seed is a {type(value).__name__}; allowed: an int.")
    if not 0 <= seed < 2**64:
        raise ValueError(f"[simulate] seed is {seed}; allowed: 0 to 2**64 - 1.")
    return seed


@cache
def _chips() -> tuple[str, ...]:
    """Apple's chips: those with published numbers (docs/estimates.md), and the M5 family, which has none yet."""
    known = json.loads((Path(__file__).parent / "mslc" / "chips.json").read_text(encoding="utf-8"))["chips"]
    return (*known, "M5", "M5 Pro", "M5 Max")


def _metal_names(chip: object) -> tuple[str, str]:
    """Metal's names of a chip: the architecture and the device, such as ``applegpu_g16s`` and ``Apple M4 Max``."""
    if chip is None:
        return "", ""
    if not isinstance(chip, str):
        raise TypeError(f"[simulate] chip is a {type(chip).__name__}; allowed: None, or a str.")
    if chip not in _chips():
        raise ValueError(f"[simulate] chip is {chip!r}; allowed: {', '.join(_chips())}.")
    generation, _, size = chip.removeprefix("M").partition(" ")
    letter = {"": "g", "Ultra": "d"}.get(size, "s")
    return f"applegpu_g{int(generation) + 12}{letter}", f"Apple {chip}"


def simulate(
    *,
    checked: bool = False,
    seed: int = 0,
    matrix_units: bool = False,
    group_products: bool = False,
    chip: str | None = None,
    profiled: bool = False,
) -> Block[Profiles]:
    """Inside the block, ops of this thread (or asyncio task) on CPU streams run their Metal kernels in the simulator.

    The launch is the one that Metal gets: the same kernel, function constants, bindings, params and grid. Use it to
    test kernels without a Mac. It is slow. An op that was called inside the block is simulated wherever it is
    evaluated, and so are its derivatives.

    The ``sim`` extra provides the compiler.

    Args:
        checked: detect races, out-of-bounds accesses and the other errors that docs/mslc.md lists; several times
            slower. A finding raises RuntimeError, with its line in the ``.metal`` file, when the op is evaluated.
        seed: shuffles the order in which threads run, unless it is 0. Results must not depend on it.
        matrix_units: choose the kernels of a GPU that has matrix units for 16-bit types, such as NVIDIA's.
        group_products: and whose units multiply for four SIMD groups at once, as those of NVIDIA's H100. Implies
            ``matrix_units``.
        chip: choose the kernels of this chip of Apple's: ``"M4 Max"``. From the M5 on, the ops leave some calls to
            MLX's own kernels (docs/backends.md); MLX's CPU ops stand in for these.
        profiled: count each launch's accesses to memory, barriers and matrix multiplies; several times slower. The
            counts describe the source and are the same on every machine. Cannot be combined with ``checked``.

    Returns:
        Block: use it as ``with simulate():``, or as a decorator. With ``profiled``, ``with simulate(profiled=True) as
        profiles:`` gives a list that gets an ``mslc.LaunchProfile`` for each kernel when it runs.

    Raises:
        ToolchainError: the ``sim`` extra is not installed, or the platform is not Linux.
        TypeError: ``seed`` is not an int, ``chip`` not a str, or another argument not a bool.
        ValueError: ``seed`` is negative or needs more than 64 bits, ``chip`` is not known, or two arguments exclude
            each other: ``checked`` and ``profiled``, ``chip`` and ``matrix_units``.
        RuntimeError: with ``checked``, a finding, raised by the evaluation; or the same block is entered twice.
    """
    for name, value in (
        ("checked", checked),
        ("matrix_units", matrix_units),
        ("group_products", group_products),
        ("profiled", profiled),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"[simulate] {name} is a {type(value).__name__}; allowed: a bool.")
    if checked and profiled:
        raise ValueError("[simulate] checked and profiled are both True; allowed: at most one of them.")
    matrix_units = matrix_units or group_products
    if matrix_units and chip is not None:
        raise ValueError("[simulate] chip and matrix_units are both given; allowed: at most one of them.")
    seed = _seed(seed)
    names = _metal_names(chip)

    def enter() -> tuple[_ext._Block, Profiles]:
        _register_toolchain()
        profiles = Profiles()
        key = next(_profile_keys) if profiled else 0
        if profiled:
            _profiles[key] = profiles
        return _ext._enter_simulate(checked, seed, matrix_units, group_products, names, key), profiles

    return Block("simulate", enter)
