"""Serves eight requests of unequal length from one paged cache, as many at once as its pages allow:

python examples/serve.py                          # random weights: for the speed only
python examples/serve.py --kv-bits 8 --pages 16
python examples/serve.py --model path/to/model

Each request begins with the same prompt, whose pages are shared.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import DTYPES, check_heads, dtype_option, random_llama, size

import click
import mlx.core as mx
import mlx.nn as nn
from rich.console import Console
from rich.table import Table

import mlx_anvil
from generate import load

LENGTHS = ((6, 40), (90, 12), (33, 25), (4, 60), (150, 8), (17, 30), (61, 18), (9, 45))  # tokens of prompt and answer


@dataclass(eq=False)
class Request:
    prompt: mx.array
    wanted: int
    tokens: list[int] = field(default_factory=list)
    sequence: Any = None  # while it runs
    started: int = 0  # the server's step count on admission
    ended: int = 0

    def pages(self, shared: int, page_size: int) -> int:
        """How many it takes at most, beside those that it shares."""
        return -(-(shared + self.prompt.size + self.wanted) // page_size) - shared // page_size


class Server:
    """Batches what runs, and admits what waits as soon as there are pages for it."""

    def __init__(self, model: nn.Module, cache: Any, prefix: mx.array) -> None:
        self.model, self.cache = model, cache
        self.running: list[Request] = []
        self.steps = 0
        self.prefix = cache.new_sequence()
        self._next_tokens([self.prefix], prefix[None])

    def serve(self, requests: list[Request]) -> None:
        waiting = deque(requests)
        while waiting or self.running:
            while waiting and self._has_pages_for(waiting[0]):
                self._start(waiting.popleft())
            if not self.running:
                raise click.UsageError("--pages: too few for one request alone.")
            last = mx.array([[request.tokens[-1]] for request in self.running])
            new = self._next_tokens([request.sequence for request in self.running], last)
            self.steps += 1
            for request, token in zip(list(self.running), new, strict=True):
                self._take(request, token)

    def _start(self, request: Request) -> None:
        request.sequence, request.started = self.prefix.fork(), self.steps
        self.running.append(request)
        self._take(request, *self._next_tokens([request.sequence], request.prompt[None]))

    def _next_tokens(self, sequences: list[Any], tokens: mx.array) -> list[int]:
        logits = self.model(tokens, cache=self.cache.step(sequences, tokens.shape[1]))
        return list(logits[:, -1].argmax(-1).tolist())

    def _take(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        if len(request.tokens) == request.wanted:
            request.ended = self.steps
            request.sequence.release()
            self.running.remove(request)

    def _has_pages_for(self, request: Request) -> bool:
        shared, page_size = len(self.prefix), self.cache.page_size
        promised = sum(r.pages(shared, page_size) - len(r.sequence.pages) + shared // page_size for r in self.running)
        return request.pages(shared, page_size) + promised <= self.cache.free_pages


def one_by_one(model: nn.Module, prefix: mx.array, requests: list[Request]) -> list[list[int]]:
    """What mlx-lm generates for each request alone."""
    from mlx_lm.generate import generate_step

    return [
        [int(token) for token, _ in generate_step(mx.concatenate([prefix, r.prompt]), model, max_tokens=r.wanted)]
        for r in requests
    ]


def table_of(requests: list[Request]) -> Table:
    table = Table("request", "prompt", "answer", "first step", "last step")
    for column in table.columns:
        column.justify = "right"
    for number, r in enumerate(requests, 1):
        table.add_row(*map(str, (number, r.prompt.size, len(r.tokens), r.started, r.ended)))
    return table


@click.command()
@click.option(
    "--model",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A local model directory in the format of mlx-lm; without it, random weights of the shape below.",
)
@click.option("--pages", type=click.IntRange(1), default=20, show_default=True, help="Pages of the cache.")
@click.option("--page-size", type=click.IntRange(1), default=32, show_default=True, help="Tokens of a page.")
@click.option("--kv-bits", type=click.Choice(["4", "8"]), help="Quantize the cache.")
@click.option("--prefix-tokens", type=click.IntRange(1), default=100, show_default=True, help="Shared first tokens.")
@click.option("--dims", type=click.IntRange(2), default=512, show_default=True, help="Hidden size.")
@click.option("--layers", type=click.IntRange(1), default=4, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--kv-heads", type=click.IntRange(1), default=4, show_default=True)
@dtype_option("bfloat16")
def main(
    folder: Path | None,
    pages: int,
    page_size: int,
    kv_bits: str | None,
    prefix_tokens: int,
    dims: int,
    layers: int,
    heads: int,
    kv_heads: int,
    dtype: str,
) -> None:
    """Serves eight requests from one paged cache, and each alone by mlx-lm's generator."""
    if folder is None:
        check_heads(dims, heads, kv_heads)
        shape = {"dims": dims, "layers": layers, "heads": heads, "kv_heads": kv_heads, "mlp": 3 * dims}
        model, vocabulary = random_llama(**shape, vocabulary=4096, dtype=DTYPES[dtype]), 4096
    else:
        model, tokenizer = load(folder)
        vocabulary = len(tokenizer.vocab)
    mlx_anvil.patch(model)
    prefix = mx.random.randint(0, vocabulary, (prefix_tokens,))
    requests = [Request(mx.random.randint(0, vocabulary, (length,)), wanted) for length, wanted in LENGTHS]
    options = {"kv_bits": int(kv_bits)} if kv_bits else {}
    cache = mlx_anvil.lm.PagedCache(model, pages=pages, page_size=page_size, **options)
    try:
        server = Server(model, cache, prefix)
        start = time.perf_counter()
        server.serve(requests)
        seconds = time.perf_counter() - start
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error

    console = Console()
    console.print(table_of(requests))
    start = time.perf_counter()
    alone = one_by_one(model, prefix, requests)
    seconds_alone = time.perf_counter() - start
    count = sum(len(r.tokens) for r in requests)
    same = sum(a == b for r, own in zip(requests, alone, strict=True) for a, b in zip(r.tokens, own, strict=True))
    console.print(f"in pages:   {count / seconds:,.0f} tokens/s, {server.steps} steps, {size(cache.nbytes)} of pages")
    console.print(f"one by one: {count / seconds_alone:,.0f} tokens/s; {same} of {count} tokens are the same")


if __name__ == "__main__":
    main()
