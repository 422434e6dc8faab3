"""Measures what has a kernel: the table of docs/ops.md. ``python tests/support_matrix.py`` writes it there."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import OPS, OpSpec

PAGE = Path(__file__).parents[1] / "docs" / "ops.md"
KERNELS, GRAPH = "kernels", "MLX ops"
HEADER = ("op", "forward", "gradient by kernels", "gradient by MLX ops", "forward mode", "vmap")


def _as_list(results: mx.array | Sequence[mx.array]) -> list[mx.array]:
    return [results] if isinstance(results, mx.array) else list(results)


def _has_kernels(run: Callable[[], object]) -> bool:
    with mlx_anvil.trace() as trace:
        mx.eval(run())
    return bool(trace.events) and not trace.fallbacks


class _Support:
    """How one entry of the registry runs, on the CPU in float32."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self.inputs = spec.make_inputs(spec.contract_shapes[-1], mx.float32)

    def _of_argument(self, index: int) -> Callable[[mx.array], list[mx.array]]:
        def function(x: mx.array) -> list[mx.array]:
            return _as_list(self.spec.function(*self.inputs[:index], x, *self.inputs[index + 1 :]))

        return function

    def forward(self) -> bool:
        return _has_kernels(lambda: self.spec.function(*self.inputs))

    def gradient(self, index: int) -> bool:
        function, x = self._of_argument(index), self.inputs[index]
        cotangents = [mx.ones_like(out) for out in function(x)]
        return _has_kernels(lambda: mx.vjp(function, [x], cotangents)[1])

    def forward_mode(self, index: int) -> bool:
        function, x = self._of_argument(index), self.inputs[index]
        return _has_kernels(lambda: mx.jvp(function, [x], [mx.ones_like(x)])[1])

    def vmap(self) -> bool:
        return _has_kernels(lambda: mx.vmap(self.spec.function)(*(mx.stack([x, x]) for x in self.inputs)))


def _row(name: str) -> tuple[str, ...]:
    """The row of an op, which has kernels where all its entries have."""
    gradient: dict[str, bool] = {}
    forward, forward_mode, vmap = [], [], []
    for support in (_Support(spec) for spec in OPS.values() if spec.name == name):
        forward.append(support.forward())
        vmap.append(support.vmap())
        for index, argument in enumerate(support.spec.arguments):
            if argument in support.spec.without_gradient:
                continue
            gradient[argument] = gradient.get(argument, True) and support.gradient(index)
            forward_mode.append(support.forward_mode(index))
    by_kernels, by_graph = (
        ", ".join(a for a, fused in gradient.items() if fused is wanted) for wanted in (True, False)
    )
    words = [KERNELS if all(fused) else GRAPH for fused in (forward, forward_mode, vmap)]
    return f"`{name}`", words[0], by_kernels, by_graph, *words[1:]


def table() -> str:
    """The table in Markdown."""
    names = dict.fromkeys(spec.name for spec in OPS.values())
    rows = [HEADER, tuple("---" for _ in HEADER), *map(_row, names)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_table(page: str) -> str:
    """The page with the current table."""
    header = re.escape(f"| {' | '.join(HEADER)} |")
    new, count = re.subn(rf"^{header}\n(?:\|.*\n)+", lambda _: table() + "\n", page, flags=re.MULTILINE)
    assert count == 1, "the page has no such table, or several"
    return new


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
