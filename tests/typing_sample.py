"""Uses the whole public interface; tests/test_typing.py has a type checker read it, and runs it."""

import mlx.core as mx

import mlx_anvil
from mlx_anvil import Event, Trace, nn, reference


def gated(x: mx.array, y: mx.array) -> mx.array:
    on_cpu: mx.array = mlx_anvil.silu_gate(x, y, stream=mx.cpu)
    on_stream: mx.array = mlx_anvil.silu_gate(x, y, stream=mx.default_stream(mx.cpu))
    default: mx.array = mlx_anvil.silu_gate(gate=x, up=y)
    return on_cpu + on_stream + default


def attended(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    out: mx.array = mlx_anvil.flash_attention(q, k, v, mask="causal", window_size=(16, 0), softcap=30.0)
    lse: mx.array
    masked, lse = mlx_anvil.flash_attention(
        q, k, v, scale=0.1, mask=mx.ones((4, 4), mx.bool_), sinks=mx.zeros((2,)), window_size=3, return_lse=True
    )
    return out + masked * lse[..., None]


def traced(x: mx.array) -> tuple[Trace, list[Event]]:
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(mlx_anvil.silu_gate(x, x))
    fallbacks: list[Event] = trace.fallbacks
    kernels: list[str] = trace.kernels
    assert len(kernels) == 1
    return trace, fallbacks + trace.events


def simulated(x: mx.array) -> mx.array:
    with mlx_anvil.simulate(checked=True, seed=3):
        return mlx_anvil.silu_gate(x, x)


def facts() -> str:
    info = mlx_anvil.info()
    usable: bool = info["backends"]["cpu"]["usable"]
    return f"{mlx_anvil.__version__} {info['mlx']} {usable}"


def module(x: mx.array) -> mx.array:
    mlp = nn.SwiGLU(8, 16, bias=True)
    return mlp(x)


def registry() -> list[str]:
    spec: reference.OpSpec = reference.OPS["silu_gate"]
    return [spec.name, *spec.arguments]


if __name__ == "__main__":
    ones = mx.ones((4, 8))
    heads = mx.ones((1, 2, 4, 8))
    mx.eval(attended(heads, heads, heads))
    mx.eval(gated(ones, ones), module(ones), simulated(ones))
    print(traced(ones)[0], facts(), registry())
