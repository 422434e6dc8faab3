"""The suites of ``python -m mlx_anvil bench``: single ops, layers, and a small model."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil import _check
from mlx_anvil._check import dtype_name
from mlx_anvil._op_spec import DTYPES
from mlx_anvil.bench.random_weights import patched_twin, quantized_embedding, quantized_linear
from mlx_anvil.bench.results import Row
from mlx_anvil.bench.timing import measure

Run = Callable[[], Any]


@dataclass(frozen=True)
class Settings:
    """How much to measure. ``--compare`` needs at least five rounds per side for a verdict.

    Attributes:
        rounds: rounds per row, after a warm-up.
        round_seconds: duration of a round; short calls are repeated to fill it.
        row_seconds: time limit of a row; when it is exceeded, the row ends after five rounds.
        quick: measure float32 and small shapes only.
    """

    rounds: int = 9
    round_seconds: float = 0.004
    row_seconds: float = 0.4
    quick: bool = False

    @property
    def dtypes(self) -> tuple[mx.Dtype, ...]:
        """The dtypes to measure."""
        return (mx.float32,) if self.quick else DTYPES


@dataclass(frozen=True)
class Case:
    """One row to measure. ``contestants`` makes random inputs, and returns our call and MLX's."""

    suite: str
    name: str
    backend: str
    dtype: mx.Dtype
    shape: str
    contestants: Callable[[], tuple[Run, Run]]

    @property
    def label(self) -> str:
        """Text for the progress bar."""
        return f"{self.name} {dtype_name(self.dtype)} {self.shape} {self.backend}"

    def run(self, settings: Settings) -> Row:
        """Measures ours and MLX's, interleaved."""
        with mx.stream(mx.cpu if self.backend == "cpu" else mx.gpu):
            ours, mlx = self.contestants()
            timings = measure(
                {"ours": ours, "MLX": mlx},
                rounds=settings.rounds,
                least_rounds=5,
                least_seconds=settings.round_seconds,
                budget_seconds=settings.row_seconds,
            )
        identity = (self.suite, self.name, self.backend, dtype_name(self.dtype), self.shape)
        return Row(*identity, ours=timings["ours"], mlx=timings["MLX"])


# ---- op --------------------------------------------------------------------------------------------------------------


def op_cases(settings: Settings, backends: Iterable[str], ops: Iterable[str]) -> Iterator[Case]:
    """Every op at its ``check_shapes``, forward and gradient."""
    for case in _check.cases(list(ops), list(backends)):
        shapes = case.spec.check_shapes
        if case.dtype not in settings.dtypes or (settings.quick and case.shape != shapes[0]):
            continue

        def contestants(case: _check.Case = case) -> tuple[Run, Run]:
            arrays = _check.inputs(case)
            ours, mlx = (_check.results_of(f, case) for f in (case.spec.function, case.spec.reference))
            return lambda: mx.eval(ours(*arrays)), lambda: mx.eval(mlx(*arrays))

        name = f"{case.spec.id}, gradient" if case.gradient else case.spec.id
        yield Case("op", name, case.backend, case.dtype, "x".join(map(str, case.shape)), contestants)


# ---- layer -----------------------------------------------------------------------------------------------------------


class _SwiGLU(nn.Module):
    """The MLP as models implement it."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down

    def __call__(self, x: mx.array) -> mx.array:
        return cast(mx.array, self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x)))


def _quantized_swiglu(dims: int, hidden: int, dtype: mx.Dtype) -> _SwiGLU:
    gate, up = (quantized_linear(dims, hidden, dtype) for _ in range(2))
    return _SwiGLU(gate, up, quantized_linear(hidden, dims, dtype))


def _swiglu(dims: int, hidden: int, dtype: mx.Dtype) -> _SwiGLU:
    gate, up = (nn.Linear(dims, hidden, bias=False) for _ in range(2))
    mlp = _SwiGLU(gate, up, nn.Linear(hidden, dims, bias=False))
    mlp.set_dtype(dtype)
    return mlp


def _normal(*shape: int) -> Callable[[mx.Dtype], mx.array]:
    return lambda dtype: mx.random.normal(shape).astype(dtype)


@dataclass(frozen=True)
class _Layer:
    name: str
    shape: str
    make: Callable[[mx.Dtype], Any]
    draw: Callable[[mx.Dtype], mx.array]


_LAYERS = (
    _Layer("RMSNorm", "64x2048", lambda dtype: nn.RMSNorm(2048), _normal(64, 2048)),
    _Layer("LayerNorm", "64x2048", lambda dtype: nn.LayerNorm(2048), _normal(64, 2048)),
    _Layer("RoPE", "1x32x64x64", lambda dtype: nn.RoPE(64), _normal(1, 32, 64, 64)),
    _Layer(
        "QuantizedEmbedding",
        "64 of 8000x2048",
        lambda dtype: quantized_embedding(8000, 2048, dtype),
        lambda dtype: mx.random.randint(0, 8000, (64,)),
    ),
    _Layer("QuantizedLinear", "1x2048x5632", lambda dtype: quantized_linear(2048, 5632, dtype), _normal(1, 2048)),
    _Layer("QuantizedLinear", "32x512x1408", lambda dtype: quantized_linear(512, 1408, dtype), _normal(32, 512)),
    _Layer("SwiGLU", "64x512x1408", lambda dtype: _swiglu(512, 1408, dtype), _normal(64, 512)),
    _Layer("SwiGLU, quantized", "1x512x1408", lambda dtype: _quantized_swiglu(512, 1408, dtype), _normal(1, 512)),
)


def layer_cases(settings: Settings, backends: Iterable[str], ops: Iterable[str]) -> Iterator[Case]:
    """Layers of ``mlx.nn``, unchanged and after ``mlx_anvil.patch``."""
    for layer in _LAYERS:
        for backend in backends:
            for dtype in settings.dtypes:

                def contestants(layer: _Layer = layer, dtype: mx.Dtype = dtype) -> tuple[Run, Run]:
                    plain, x = layer.make(dtype), layer.draw(dtype)
                    patched = patched_twin(plain)
                    mx.eval(plain.parameters(), x)
                    return lambda: mx.eval(patched(x)), lambda: mx.eval(plain(x))

                yield Case("layer", layer.name, backend, dtype, layer.shape, contestants)


# ---- model -----------------------------------------------------------------------------------------------------------


def model_cases(settings: Settings, backends: Iterable[str], ops: Iterable[str]) -> Iterator[Case]:
    """A small 4-bit Llama of mlx-lm with random weights: decode and prefill."""
    from mlx_anvil.bench import model

    shape = model.LlamaShape(hidden=256, layers=2, intermediate=704, heads=8, kv_heads=4, vocabulary=1000)
    for backend in backends:
        for dtype in settings.dtypes:
            for name, step, prompt in (("decode", model.decode_step, 1), ("prefill", model.prefill, 16)):

                def contestants(dtype: mx.Dtype = dtype, step: Any = step, prompt: int = prompt) -> tuple[Run, Run]:
                    plain = model.random_llama(shape, dtype)
                    tokens = model.random_tokens(shape, prompt)
                    ours, mlx = (step(m, tokens) for m in (patched_twin(plain), plain))
                    return ours, mlx

                yield Case("model", f"Llama, {name}", backend, dtype, str(shape), contestants)


SUITES = {"op": op_cases, "layer": layer_cases, "model": model_cases}
