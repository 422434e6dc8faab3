"""``prebuild(model)``: builds a model's pipelines in background threads, before the first token needs them."""

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

PROMPT_LENGTHS = (16, 512, 2048)  # mlx-lm splits prompts into chunks of 2048 tokens
_MOST_THREADS = 8


class Prebuilt:
    """The pipelines that :func:`mlx_anvil.prebuild` builds, finished or in progress.

    Attributes:
        kernels: names of the kernels, in the order of their first launch; empty if the model launches none.
        reason: why there are no kernels; empty if there are some.
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
            # Daemon threads, so that the process can exit before they finish.
            threading.Thread(target=self._work, name="mlx_anvil.prebuild", daemon=True).start()

    @property
    def done(self) -> bool:
        """True once every pipeline was built or failed to build."""
        return self._left == 0

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all pipelines are built. You need not call it: a launch waits for its own pipeline.

        Args:
            timeout: seconds. Default: no limit.

        Raises:
            TimeoutError: the timeout expired before all pipelines were built.
            RuntimeError: a pipeline failed to build; the text has the first error.
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
    """Builds the pipelines that a model will launch, in background threads, before its first token.

    The model is called, but nothing is evaluated: the ops in the returned graph report which kernels they would launch.
    This allocates no memory for results and reads no weight. On Metal, MLX builds one pipeline at a time and blocks
    launches meanwhile; on CUDA the threads build in parallel. The choice of kernels depends on the shapes of the
    arrays. A kernel that these calls do not reach is built on its first launch.

    Args:
        model (mlx.nn.Module): a model, usually after :func:`mlx_anvil.patch`. It is not changed.
        inputs: a function that calls the model as the program will, and returns the result unevaluated. By default, the
            model is called as mlx-lm generates text: with a prompt of each length, then with one token.
        prompt_lengths: numbers of tokens of the prompts; ignored with ``inputs``.
        batch_size: number of prompts per batch; ignored with ``inputs``.

    Returns:
        Prebuilt: the kernels. Its ``wait()`` blocks until they are built. It is empty and has a ``reason`` if the model
            launches no kernel that needs building, as on the CPU.

    Raises:
        TypeError: ``model`` is not an ``mlx.nn.Module``, ``inputs`` is not callable, or ``prompt_lengths`` is not a
            sequence.
        ValueError: a length or the batch size is below 1; or ``inputs`` is None and the model has no ``layers``, as
            mlx-lm's models have.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"[prebuild] model is a {type(model).__name__}; allowed: an mlx.nn.Module.")
    if inputs is not None and not callable(inputs):
        raise TypeError(
            f"[prebuild] inputs is a {type(inputs).__name__}; allowed: a function without arguments, or None."
        )
    if not isinstance(prompt_lengths, Sequence):
        raise TypeError(
            f"[prebuild] prompt_lengths is a {type(prompt_lengths).__name__}; allowed: a sequence of positive integers."
        )
    for name, values in (("prompt_lengths", prompt_lengths), ("batch_size", (batch_size,))):
        if any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in values):
            raise ValueError(f"[prebuild] {name} is {values!r}; allowed: positive integers.")
    planned: dict[str, _ext._PlannedKernel] = {}
    for results in [inputs()] if inputs is not None else _generation(model, prompt_lengths, batch_size):
        leaves = [item[1] for item in tree_flatten(results)]
        arrays = [leaf for leaf in leaves if isinstance(leaf, mx.array)]
        for kernel in _ext._plan_kernels(arrays):
            planned.setdefault(kernel.name, kernel)
    return Prebuilt(list(planned.values()), "" if planned else _why_none())


def _generation(model: nn.Module, prompt_lengths: Sequence[int], batch_size: int) -> Iterator[Any]:
    """Unevaluated results of an mlx-lm model, for a prompt of each length and the token that follows."""
    if not hasattr(model, "layers"):
        raise ValueError(
            f"[prebuild] {type(model).__name__} has no layers, as mlx-lm's models have; allowed: such a model, or "
            "inputs=."
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
        return "the default device is the CPU, whose kernels are compiled in advance"
    return "these calls launch no kernel of mlx-anvil; call patch(model) first"
