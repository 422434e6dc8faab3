"""``prebuild(model)``: a model's pipelines, built in background threads before the first token needs them."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_anvil import _ext

PROMPT_LENGTHS = (16, 512, 2048)  # mlx-lm reads prompts by 2048 tokens
_MOST_THREADS = 8


class Prebuilt:
    """Pipelines that are being built, or have been. What :func:`mlx_anvil.prebuild` returns.

    Attributes:
        kernels: their names, in the order in which the model launches them first; empty where it launches none.
        reason: why there are none; empty where there are some.
    """

    def __init__(self, planned: Sequence[_ext._PlannedKernel], reason: str = "") -> None:
        self.kernels: tuple[str, ...] = tuple(kernel.name for kernel in planned)
        self.reason = reason
        self._queue: SimpleQueue[_ext._PlannedKernel] = SimpleQueue()
        for kernel in planned:
            self._queue.put(kernel)
        self._left = len(planned)
        self._errors: list[tuple[str, Exception]] = []
        self._changed = threading.Condition()
        for _ in range(min(len(planned), _MOST_THREADS, os.cpu_count() or 1)):
            # Daemons: a process may end while they work.
            threading.Thread(target=self._work, name="mlx_anvil.prebuild", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether every pipeline has been built, or has failed to."""
        return self._left == 0

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all are built. A launch that needs one of them waits for that one by itself.

        Args:
            timeout: seconds; forever by default.

        Raises:
            TimeoutError: some are still being built after that time.
            RuntimeError: some could not be built; the text has the first error.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._left:
                rest = None if deadline is None else deadline - time.monotonic()
                if rest is not None and rest <= 0:
                    raise TimeoutError(f"[prebuild] {self._left} of {len(self.kernels)} kernels are not built yet.")
                self._changed.wait(rest)
        if self._errors:
            name, error = self._errors[0]
            message = (
                f"[prebuild] {len(self._errors)} of {len(self.kernels)} kernels could not be built; {name}: {error}"
            )
            raise RuntimeError(message) from error

    def _work(self) -> None:
        while True:
            try:
                kernel = self._queue.get_nowait()
            except Empty:
                return
            error: Exception | None = None
            try:
                kernel.build()
            except Exception as raised:
                error = raised
            with self._changed:
                if error is not None:
                    self._errors.append((kernel.name, error))
                self._left -= 1
                self._changed.notify_all()

    def __repr__(self) -> str:
        state = f"{len(self.kernels) - self._left} of {len(self.kernels)} kernels built"
        return f"Prebuilt({self.reason or state})"


def prebuild(
    model: nn.Module,
    inputs: Callable[[], Any] | None = None,
    *,
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS,
    batch_size: int = 1,
) -> Prebuilt:
    """Builds the pipelines that a model is going to launch, in background threads, before its first token.

    The model is called, but nothing is evaluated: the ops in the graph that it returns say which kernels they would launch.
    No memory is taken, no weight is read. On Metal, MLX builds one pipeline at a time and makes launches wait for it; on
    CUDA the threads build at once. Ops whose pipelines are built differ by the sizes of arrays: a kernel that these calls
    do not need is built when it is launched, as without this function.

    Args:
        model (mlx.nn.Module): a model, as a rule after :func:`mlx_anvil.patch`. It is not changed.
        inputs: calls the model as it is going to be called, and returns what that returns, not evaluated. By default the
            model is one of mlx-lm, called with a prompt of each length and then with one token, as its generation does.
        prompt_lengths: how many tokens the prompts have; of mlx-lm's models.
        batch_size: how many prompts there are at once; of mlx-lm's models.

    Returns:
        Prebuilt: the kernels; ``wait()`` for the end of it. Empty, with a ``reason``, where the model launches none, such
            as on the CPU.

    Raises:
        TypeError: ``model`` is not an ``mlx.nn.Module``, ``inputs`` cannot be called, or ``prompt_lengths`` is no sequence.
        ValueError: a length or a batch size less than 1; without ``inputs``, a model that is not like those of mlx-lm.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"[prebuild] model is a {type(model).__name__}; allowed: an mlx.nn.Module.")
    if inputs is not None and not callable(inputs):
        raise TypeError(
            f"[prebuild] inputs is a {type(inputs).__name__}; allowed: a function without arguments, or None."
        )
    if not isinstance(prompt_lengths, Sequence):
        raise TypeError(
            f"[prebuild] prompt_lengths is a {type(prompt_lengths).__name__}; allowed: a sequence of whole numbers."
        )
    for name, values in (("prompt_lengths", prompt_lengths), ("batch_size", (batch_size,))):
        if any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in values):
            raise ValueError(f"[prebuild] {name} is {values!r}; allowed: whole numbers of 1 or more.")
    planned: dict[str, _ext._PlannedKernel] = {}
    for results in [inputs()] if inputs is not None else _generation(model, prompt_lengths, batch_size):
        leaves = [item[1] for item in tree_flatten(results)]
        arrays = [leaf for leaf in leaves if isinstance(leaf, mx.array)]
        for kernel in _ext._plan_kernels(arrays):
            planned.setdefault(kernel.name, kernel)
    return Prebuilt(list(planned.values()), "" if planned else _why_none())


def _generation(model: nn.Module, prompt_lengths: Sequence[int], batch_size: int) -> Iterator[Any]:
    """What a model of mlx-lm returns for a prompt of each length and the token after it."""
    if not hasattr(model, "layers"):
        raise ValueError(
            f"[prebuild] {type(model).__name__} has no layers, as mlx-lm's models have; allowed: such a model, or inputs=."
        )
    from mlx_lm.models.cache import make_prompt_cache

    for length in prompt_lengths:
        cache = make_prompt_cache(model)
        tokens = mx.zeros((batch_size, length), mx.int32)
        yield [model(tokens, cache=cache), model(tokens[:, :1], cache=cache)]


def _why_none() -> str:
    if why_no_gpu := _ext._why_no_gpu():
        return why_no_gpu
    if mx.default_device() == mx.cpu:
        return "the default device is the CPU, whose kernels need no building"
    return "none of these calls launches a kernel of mlx-anvil; patch(model) puts them in"
