"""What ``trace()``, ``strict()``, ``simulate()`` and ``composed()`` return."""

from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Generic, TypeVar

from mlx_anvil import _ext

Value = TypeVar("Value", covariant=True)


class Block(ContextDecorator, Generic[Value]):
    """A ``with`` block of this thread or asyncio task, to be entered once; also a decorator, which makes one for each call.

    It is kept in a context variable: tasks that are started inside the block, and functions that ``asyncio.to_thread`` runs,
    are in it too, until it ends.
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
