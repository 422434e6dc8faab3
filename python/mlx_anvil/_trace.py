"""``trace()`` and ``strict()``: see, or refuse, what an op does behind its name."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from mlx_anvil import _ext
from mlx_anvil._block import Block


@dataclass(frozen=True)
class Event:
    """One kernel launch, or one op replaced by a graph of MLX ops.

    Attributes:
        op: Python name of the op.
        kernel: name of the kernel, with its specialisation; empty for a fall-back.
        device: where it ran, such as ``"metal"`` or ``"cpu (avx512)"``; ``"cuda (sm_90)"`` if its machine code came with the
            package, ``"cuda"`` if the driver assembled it. Empty for a fall-back.
        grid: threadgroups launched; zeros on the CPU.
        threadgroup: threads per threadgroup; zeros on the CPU.
        is_fallback: whether MLX ops ran in place of a kernel.
        reason: why this route was taken.
        bindings: what a GPU's kernel was given, in the order of its bindings: ``"float16 in"``, ``"float32 out"``,
            ``"params 40"`` (bytes); ``"float16 in =0"`` is the array of binding 0 again, where the call has none.
    """

    op: str
    kernel: str
    device: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    is_fallback: bool
    reason: str
    bindings: tuple[str, ...] = ()


def _extent(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = sizes
    return (x, y, z)


class Trace:
    """What happened inside one ``with trace()`` block, in order. Prints as a table."""

    def __init__(self, log: _ext._TraceLog) -> None:
        self._log = log

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        return [
            Event(
                op=e.op,
                kernel=e.kernel,
                device=e.device,
                grid=_extent(e.grid),
                threadgroup=_extent(e.threadgroup),
                is_fallback=e.is_fallback,
                reason=e.reason,
                bindings=tuple(e.bindings),
            )
            for e in self._log.events()
        ]

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels launched so far."""
        return [event.kernel for event in self.events if not event.is_fallback]

    @property
    def fallbacks(self) -> list[Event]:
        """Ops that MLX ops stood in for."""
        return [event for event in self.events if event.is_fallback]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table("op", "kernel", "device", "grid", "threadgroup", "reason")
        for event in self.events:
            kernel = "[yellow]MLX ops[/yellow]" if event.is_fallback else event.kernel
            grid, threadgroup = (
                " x ".join(map(str, extent)) if any(extent) else "" for extent in (event.grid, event.threadgroup)
            )
            table.add_row(event.op, kernel, event.device, grid, threadgroup, Text(event.reason))
        yield table

    def __str__(self) -> str:
        console = Console(width=160, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def trace() -> Block[Trace]:
    """Records every kernel launched by this thread (or asyncio task) inside the block, and every fall-back with its reason.

    MLX is lazy: a kernel is launched when its result is evaluated, so evaluate inside the block. Blocks nest.

    Returns:
        Block: for ``with trace() as t``, where ``t`` is a ``Trace``: what happened so far, complete when the block ends.

    Raises:
        RuntimeError: one block is entered twice.

    Example:
        >>> with mlx_anvil.trace() as t:
        ...     mx.eval(mlx_anvil.silu_gate(gate, up))
        >>> print(t)
    """

    def enter() -> tuple[_ext._Block, Trace]:
        block = _ext._enter_trace()
        return block, Trace(block.log)

    return Block("trace", enter)


def strict() -> Block[None]:
    """Inside the block, an op of this thread (or asyncio task) that would fall back to a graph of MLX ops raises RuntimeError.

    The error is raised when the op (or its gradient) is called, before anything is evaluated. Blocks nest.

    Returns:
        Block: for ``with strict():``, or as a decorator.

    Raises:
        RuntimeError: an op inside the block falls back; the text has the op and the reason that ``trace()`` would show. Or
            one block is entered twice.
    """
    return Block("strict", lambda: (_ext._enter_strict(), None))
