"""mx.fast.metal_kernel for machines without Metal: the simulator runs the same kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np

from .compiler import CHECKED, PROFILED, UNCHECKED, Options
from .diagnostics import CompileError, Diagnostic
from .kernel_source import PRELUDE, GeneratedKernel, InputInfo, TemplateArgument, generate, metal_type
from .mlx_arrays import BoundInput, bind_input, new_output, to_mlx
from .preprocess import Source
from .profile import Site
from .simulator import Finding, Library, Report, SimulationError

MAX_THREADS_PER_THREADGROUP = 1024
Located = TypeVar("Located", Diagnostic, Finding, Site)


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, Any] | None = None,
    *,
    simulate: bool | None = None,
    checked: bool = False,
    profiled: bool = False,
    seed: int = 0,
) -> Callable[..., list[mx.array]]:
    """Creates a custom Metal kernel like `mx.fast.metal_kernel`, which also runs without Metal.

    Where Metal is available, this function returns `mx.fast.metal_kernel(...)` itself, unless `simulate=True`.
    Elsewhere it returns a kernel that takes the same arguments and runs in the simulator immediately: it evaluates the
    inputs, and the outputs are not lazy. `stream` is accepted and ignored. As in MLX, the kernel has no derivative:
    `mx.grad` and `mx.jvp` raise ValueError when they reach it. Define one with `mx.custom_function`.

    Args:
      name: the kernel's name, as for `mx.fast.metal_kernel`.
      input_names: as for `mx.fast.metal_kernel`.
      output_names: as for `mx.fast.metal_kernel`.
      source: the kernel's body, as for `mx.fast.metal_kernel`.
      header: code before the kernel, as for `mx.fast.metal_kernel`.
      ensure_row_contiguous: as for `mx.fast.metal_kernel`.
      atomic_outputs: as for `mx.fast.metal_kernel`.
      compile_options: as for `mx.fast.metal_kernel`.
      simulate: run in the simulator. The default is to do so only where Metal is not available.
      checked: detect races, out-of-bounds accesses and other errors; the first launch with findings raises
        SimulationError (simulator only).
      profiled: count memory accesses; the kernel's `report.profile` holds the counts of its latest launch (simulator
        only).
      seed: a value other than 0 shuffles the order of threads between synchronisation points (simulator only).

    Returns:
      A function of `inputs`, `template`, `grid`, `threadgroup`, `output_shapes`, `output_dtypes`, `init_value` and
      `verbose`, as in MLX. It returns a list of arrays. Elements that the kernel does not write are undefined in MLX;
      here they are NaN, all ones or true.

    Raises:
      TypeError: `checked`, `profiled` or `simulate` is not a bool, or `seed` is not an int.
      ValueError: `checked` and `profiled` are both set, or arguments do not match, as in MLX.
      CompileError: the source is not valid Metal; raised by the first call.
      SimulationError: a check failed; raised by the call.
    """
    for option, value in (("simulate", simulate), ("checked", checked), ("profiled", profiled)):
        if not isinstance(value, bool) and not (option == "simulate" and value is None):
            raise TypeError(f"[metal_kernel] `{option}` is a {type(value).__name__}; allowed: a bool.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"[metal_kernel] `seed` is a {type(seed).__name__}; allowed: an int.")
    if not 0 <= seed < 2**64:
        raise ValueError(f"[metal_kernel] `seed` is {seed}; allowed: a 64-bit unsigned integer.")
    if simulate is None:
        simulate = not mx.metal.is_available()
    if not simulate:
        # Older versions of MLX do not accept compile_options.
        options = {} if compile_options is None else {"compile_options": compile_options}
        native: Callable[..., list[mx.array]] = mx.fast.metal_kernel(  # type: ignore[assignment]
            name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs, **options
        )
        return native
    if checked and profiled:
        raise ValueError("[metal_kernel] A kernel is either checked or profiled.")
    return SimulatedKernel(
        name,
        input_names,
        output_names,
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        compile_options,
        options=CHECKED if checked else PROFILED if profiled else UNCHECKED,
        seed=seed,
    )


class SimulatedKernel:
    """A kernel that runs in the simulator, returned by metal_kernel. `report` describes its latest launch."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
        compile_options: dict[str, Any] | None,
        *,
        options: Options,
        seed: int,
    ):
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        self.name = name
        self.source = source
        self.header = header
        self.input_infos = [InputInfo.of(input_name, source) for input_name in input_names]
        self.output_names = list(output_names)
        self.ensure_row_contiguous = ensure_row_contiguous
        self.atomic_outputs = atomic_outputs
        self.options = options
        self.seed = seed
        self.report = Report()
        # Kernels can test this macro for the math mode. The simulator's functions are accurate in every mode.
        self._defines = {"__FAST_MATH__": "1"} if _math_mode(compile_options) == "fast" else {}
        self._libraries: dict[str, Library] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[bool | int | float | complex | mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[TemplateArgument] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        """Runs the kernel. The arguments are those of a kernel from `mx.fast.metal_kernel`."""
        _check_size(len(inputs), len(self.input_infos), "inputs")
        _check_size(len(output_shapes), len(self.output_names), "output_shapes")
        _check_size(len(output_dtypes), len(self.output_names), "output_dtypes")
        grid, threadgroup = _extent(grid, "grid"), _extent(threadgroup, "threadgroup")
        arrays = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        generated = generate(
            self.name,
            self.header,
            self.source,
            list(zip(self.input_infos, arrays, strict=True)),
            list(zip(self.output_names, output_dtypes, strict=True)),
            [(key, _template_argument(value)) for key, value in template or ()],
            self.atomic_outputs,
        )
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{generated.text}\n```")
        library = self._library(generated)
        _check_threadgroup(threadgroup, library.max_threads(generated.name))
        buffers = self._bind([bind_input(array, self.ensure_row_contiguous) for array in arrays])
        outputs = [new_output(s, d, init_value) for s, d in zip(output_shapes, output_dtypes, strict=True)]
        self._run(library, generated, [*buffers, *outputs], grid, threadgroup)
        results = [to_mlx(memory, dtype) for memory, dtype in zip(outputs, output_dtypes, strict=True)]
        return _without_derivatives(self.name, [value for value in inputs if isinstance(value, mx.array)], results)

    def _library(self, generated: GeneratedKernel) -> Library:
        if generated.text not in self._libraries:
            text = PRELUDE + generated.text
            directories = (str(_mlx_include_directory()),)
            source = Source(text, f"{self.name}.metal", directories, tuple(self._defines.items()))
            try:
                library = Library(source, options=self.options)
            except CompileError as error:
                located = [
                    replace(self._in_strings(d, generated), notes=[self._in_strings(n, generated) for n in d.notes])
                    for d in error.diagnostics
                ]
                raise CompileError(located) from None
            self._libraries[generated.text] = library
        return self._libraries[generated.text]

    def _bind(self, inputs: Sequence[BoundInput]) -> list[np.ndarray]:
        """Returns the inputs and the properties that the body names, in the order of the generated parameters."""
        buffers: list[np.ndarray] = []
        for info, bound in zip(self.input_infos, inputs, strict=True):
            buffers.append(bound.memory)
            if bound.shape:
                if info.shape:
                    buffers.append(np.array(bound.shape, np.int32))
                if info.strides:
                    buffers.append(np.array(bound.strides, np.int64))
                if info.ndim:
                    buffers.append(np.array(len(bound.shape), np.int32))
        return buffers

    def _run(
        self,
        library: Library,
        generated: GeneratedKernel,
        buffers: list[np.ndarray],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> None:
        if 0 in grid:
            self.report = Report()
            return
        # MLX clamps the threadgroup to the grid.
        size = tuple(min(t, g) for t, g in zip(threadgroup, grid, strict=True))
        try:
            self.report = library.run(
                generated.name, dict(enumerate(buffers)), grid, size, dispatch="threads", seed=self.seed
            )
        except SimulationError as error:
            raise SimulationError([self._in_strings(f, generated) for f in error.findings]) from None
        self.report.findings = [self._in_strings(f, generated) for f in self.report.findings]
        if self.report.profile:
            self.report.profile.sites = [self._in_strings(site, generated) for site in self.report.profile.sites]
        if self.report.findings:
            raise SimulationError(self.report.findings)

    def _in_strings(self, found: Located, generated: GeneratedKernel) -> Located:
        """Maps a position in the compiled text to one in the author's strings."""
        if found.file != f"{self.name}.metal":
            return found
        string, line = generated.place(found.line)
        return replace(found, file=f"{self.name}[{string}]", line=line)


def _without_derivatives(name: str, inputs: list[mx.array], results: list[mx.array]) -> list[mx.array]:
    """Returns `results` in a graph that depends on `inputs`. A derivative then raises instead of seeing constants."""

    def kernel(*_: mx.array) -> list[mx.array]:
        return results

    def refuse(transformation: str) -> Callable[..., Any]:
        def rule(*_: Any) -> Any:
            raise ValueError(
                f"[metal_kernel] {transformation} of `{name}`: a kernel has no derivative; allowed: an "
                "mx.custom_function around it that defines the derivative."
            )

        return rule

    function = mx.custom_function(kernel)
    function.vjp(refuse("mx.vjp"))
    function.jvp(refuse("mx.jvp"))
    return cast(list[mx.array], function(*inputs)) if inputs else results


def _mlx_include_directory() -> Path:
    return Path(mx.__file__).parent / "include"


def _math_mode(compile_options: dict[str, Any] | None) -> str:
    if compile_options is None:
        return "safe"
    if not isinstance(compile_options, dict):
        raise ValueError("[metal_kernel] Expected `compile_options` to be a dict.")
    for key in compile_options:
        if key != "math_mode":
            raise ValueError(f"[metal_kernel] Unknown compile option `{key}`.")
    mode = compile_options.get("math_mode", "safe")
    if mode not in ("safe", "relaxed", "fast"):
        raise ValueError("[metal_kernel] Expected math_mode to be 'safe', 'relaxed', or 'fast'.")
    return str(mode)


def _check_size(actual: int, expected: int, name: str) -> None:
    if actual != expected:
        raise ValueError(f"[metal_kernel] Expected `{name}` to have size {expected} but got size {actual}.")


def _extent(value: Sequence[int], name: str) -> tuple[int, int, int]:
    try:
        extent = tuple(operator.index(v) for v in value)
    except TypeError:
        extent = ()
    if len(extent) != 3:
        raise TypeError(f"[metal_kernel] `{name}` must be a tuple of three ints, not {value!r}.")
    if min(extent) < 0:
        raise ValueError(f"[metal_kernel] `{name}` must not be negative: {extent}.")
    return extent


def _check_threadgroup(threadgroup: tuple[int, int, int], declared: int) -> None:
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    limit = declared or MAX_THREADS_PER_THREADGROUP
    if threads > limit:
        raise ValueError(
            f"[metal_kernel] Thread group size ({threads}) is greater than the maximum allowed threads per threadgroup "
            f"({limit})."
        )
    if threads == 0:
        raise ValueError(f"[metal_kernel] `threadgroup` must not be empty: {threadgroup}.")


def _template_argument(value: object) -> bool | int | mx.Dtype:
    if isinstance(value, mx.Dtype):
        metal_type(value)
        return value
    if isinstance(value, (bool, int)):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"[metal_kernel] Template argument {value} does not fit an `int`.")
        if value < 0:  # MLX would put the sign into the function name, which Metal rejects
            raise ValueError(f"[metal_kernel] Template argument {value} is negative, which MLX cannot compile.")
        return value
    raise ValueError("[metal_kernel] Invalid template argument. Must be `mlx.core.Dtype`, `int` or `bool`.")
