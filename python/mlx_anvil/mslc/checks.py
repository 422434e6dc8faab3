"""Checked runs: one launch under several schedules, with no findings and bit-identical results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .compiler import CHECKED, Constants
from .preprocess import Source
from .simulator import DEFAULT_STEP_LIMIT, Finding, Library, Report, SimulationError, as_array

SCHEDULE = "schedule dependence"


def verify(
    source: str | Path | Source | Library,
    kernel: str,
    buffers: Mapping[int | str, object],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    threadgroup_memory: Mapping[int, int] | Sequence[int] = (),
    dispatch: str = "threadgroups",
    *,
    seeds: Sequence[int] = (0, 1, 2),
    deterministic: bool = True,
    step_limit: int = DEFAULT_STEP_LIMIT,
    include_dirs: Sequence[str | Path] = (),
    constants: Constants | None = None,
    defines: Mapping[str, object] | None = None,
) -> Report:
    """Runs a launch once per seed, each with a different schedule and all checks enabled.

    Every run starts from the given contents of `buffers`, which hold the results afterwards.

    Args:
      source: anything `Library` accepts, or a library compiled with `options=CHECKED`.
      kernel: the kernel's host name.
      buffers: as for `Library.run`.
      grid: as for `Library.run`.
      threadgroup: as for `Library.run`.
      threadgroup_memory: as for `Library.run`.
      dispatch: as for `Library.run`.
      seeds: one schedule per seed.
      deterministic: requires the same bits from every schedule. Set it to False for kernels whose results depend on the
        order of execution, such as float sums by atomics.
      step_limit: as for `Library.run`.
      include_dirs: as for `Library`.
      constants: as for `Library`.
      defines: as for `Library`.

    Returns:
      The report of the last run.

    Raises:
      SimulationError: a check failed under some schedule, or results differ between schedules.
      CompileError: the source is not valid Metal.
      ValueError: `Library.run` raises it, `seeds` is empty, or the library was compiled without checks.
    """
    library = source
    if not isinstance(library, Library):
        library = Library(library, include_dirs, constants, defines, CHECKED)
    if not library.options.checked:
        raise ValueError("verify needs a library with options=CHECKED")
    if not seeds:
        raise ValueError("verify needs at least one seed")
    given = {key: as_array(value) for key, value in buffers.items()}
    before = {key: array.copy() for key, array in given.items()}
    first: dict[int | str, np.ndarray] = {}
    for number, seed in enumerate(seeds):
        for key, array in given.items():
            _restore(array, before[key])
        report = library.run(
            kernel, given, grid, threadgroup, threadgroup_memory, dispatch, seed, step_limit=step_limit
        )
        if number == 0:
            first = {key: array.copy() for key, array in given.items()}
        elif deterministic:
            differences = [
                _difference(kernel, key, first[key], array, (seeds[0], seed))
                for key, array in given.items()
                if first[key].tobytes() != array.tobytes()
            ]
            if differences:
                raise SimulationError(differences)
    return report


def _restore(array: np.ndarray, contents: np.ndarray) -> None:
    if array.flags.writeable:
        array[...] = contents


def _difference(kernel: str, key: int | str, first: np.ndarray, now: np.ndarray, seeds: tuple[int, int]) -> Finding:
    width = first.itemsize
    bytes_differ = np.frombuffer(first.tobytes(), np.uint8) != np.frombuffer(now.tobytes(), np.uint8)
    elements = bytes_differ.reshape(-1, width).any(1)
    where = int(elements.argmax())
    message = (
        f"buffer {key!r} depends on the order in which threads run: element {where} is {first.reshape(-1)[where]} with "
        f"seed {seeds[0]} and {now.reshape(-1)[where]} with seed {seeds[1]}; {int(elements.sum())} of "
        f"{elements.size} elements differ"
    )
    return Finding(SCHEDULE, message, kernel, offset=where * width, size=width)
