"""The context manager that ``trace()``, ``strict()``, ``simulate()`` and ``composed()`` return."""

from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Generic, TypeVar

from mlx_anvil import _ext

Value = TypeVar("Value", covariant=True)


class Block(ContextDecorator, Generic[Value]):
    """A ``with`` block of one thread or asyncio task. Enter it once. As a decorator, it makes a new block for each
    call.

    The state is a context variable: asyncio tasks that start inside the block inherit it, and so do functions that
    ``asyncio.to_thread`` runs, until the block ends.
    """

    def __init__(self, name: str, enter: Callable[[], tuple[_ext._Block, Value]]) -> None:
        self._name = name
        self._enter = enter
        self._block: _ext._Block | None = None

    def _recreate_cm(self) -> "Block[Value]":
        return Block(self._name, self._enter)

    def __enter__(self) -> Value:
        if self._block is not None:
            raise RuntimeError(
                f"[{self._name}] this block has been entered before; allowed: a new {self._name}() for each `with`."
            )
        self._block, value = self._enter()
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._block is not None:
            _ext._leave_block(self._block)
