"""Progress of ``lm benchmark``, with the time left: mlx-lm's command prints nothing during a trial."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_EVERY = 1.0  # seconds between two drawings, each of which takes about a millisecond


@contextlib.contextmanager
def benchmark_progress(module: ModuleType, arguments: Sequence[str], console: Console) -> Iterator[None]:
    """Inside the block, each run of the command has a bar, on a terminal only. It is removed before results are
    printed.

    No thread draws it, so it takes no time from the kernels: the loop over tokens does, once a second.

    Args:
        module: ``mlx_lm.benchmark``.
        arguments: those of the command.
        console: where the bar is drawn.
    """
    parser = getattr(module, "setup_arg_parser", None)
    if parser is None or not console.is_terminal or mx.distributed.init().rank() > 0:
        yield
        return
    options = parser().parse_known_args(arguments)[0]
    runs = _Runs(console, options.num_trials, options.generation_tokens)
    wrappers = {"stream_generate": runs.of_stream, "batch_generate": runs.of_batch}
    originals = {name: getattr(module, name) for name in wrappers if hasattr(module, name)}
    try:
        for name, original in originals.items():
            setattr(module, name, wrappers[name](original))
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


class _Runs:
    """The warm-up and the trials of one benchmark."""

    def __init__(self, console: Console, trials: int, tokens: int) -> None:
        self._console = console
        self._trials = trials
        self._tokens = max(tokens, 1)
        self._done = 0
        self._start = time.perf_counter()

    def of_stream(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self._run() as show:
                drawn = time.perf_counter()
                for count, response in enumerate(original(*args, **kwargs), 1):
                    if (now := time.perf_counter()) - drawn >= _EVERY:
                        show(count)
                        drawn = now
                    yield response

        return stream

    def of_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def batch(*args: Any, **kwargs: Any) -> Any:
            with self._run():
                return original(*args, **kwargs)

        return batch

    @contextlib.contextmanager
    def _run(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that shows how many tokens of the run are generated."""
        title = f"Trial {self._done} of {self._trials}" if self._done else "Warm-up"
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        bar = Progress(
            *columns,
            console=self._console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with bar:
            task = bar.add_task(title, total=self._tokens, left=self._left(0))

            def show(tokens: int) -> None:
                bar.update(task, completed=tokens, left=self._left(tokens), refresh=True)

            bar.refresh()
            yield show
        self._done += 1

    def _left(self, tokens: int) -> str:
        """By the mean of the runs so far; of the first one, by its tokens."""
        done = self._done + tokens / self._tokens
        if not done:
            return ""
        seconds = round((time.perf_counter() - self._start) / done * max(self._trials + 1 - done, 0))
        return f"{seconds // 60}:{seconds % 60:02d} left"
