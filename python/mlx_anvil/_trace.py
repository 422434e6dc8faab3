"""``trace()`` records the kernels that ops launch; ``strict()`` raises if an op would fall back to MLX ops."""

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
        kernel: name of the kernel, with its specialisation; empty for a fallback.
        device: where it ran, such as ``"metal"`` or ``"cpu (avx512)"``. ``"cuda (sm_90)"`` ran a cubin of the package,
            ``"cuda"`` ran PTX that the driver assembled. Empty for a fallback.
        grid: threadgroups launched; zeros on the CPU.
        threadgroup: threads per threadgroup; zeros on the CPU.
        is_fallback: True if MLX ops ran instead of a kernel.
        reason: why the op chose this kernel or fallback.
        bindings: buffers of a GPU kernel in binding order: ``"float16 in"``, ``"float32 out"``, ``"params 40"``
            (bytes). ``"float16 in =0"`` repeats the array of binding 0 for an operand that the call does not have.
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
    """The events of one ``with trace()`` block, in order. Prints as a table."""

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
        """Events of the ops that MLX ops replaced so far."""
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
    """Records every kernel that this thread (or asyncio task) launches inside the block, and every fallback with its
    reason.

    MLX is lazy and launches a kernel when its result is evaluated, so evaluate inside the block. Blocks nest.

    Returns:
        Block: use it as ``with trace() as t``. ``t`` is a ``Trace`` with the events so far.

    Raises:
        RuntimeError: the same block is entered twice.

    Examples:
        >>> with mlx_anvil.trace() as t:
        ...     mx.eval(mlx_anvil.silu_gate(gate, up))
        >>> print(t)
    """

    def enter() -> tuple[_ext._Block, Trace]:
        block = _ext._enter_trace()
        return block, Trace(block.log)

    return Block("trace", enter)


def strict() -> Block[None]:
    """Inside the block, an op of this thread (or asyncio task) raises instead of falling back to a graph of MLX ops.

    The op, or its gradient, raises when it is called, before anything is evaluated. Blocks nest.

    Returns:
        Block: use it as ``with strict():``, or as a decorator.

    Raises:
        RuntimeError: an op inside the block would fall back; the text names the op and the reason that ``trace()``
            shows. Also if the same block is entered twice.
    """
    return Block("strict", lambda: (_ext._enter_strict(), None))
