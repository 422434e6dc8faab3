"""Uses the whole public interface; test_typing.py has a type checker read it, and runs it."""

import mlx.core as mx
import mlx.nn

import mlx_anvil
from mlx_anvil import Event, Trace, nn, patching, reference


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


def positions(q: mx.array, k: mx.array) -> mx.array:
    turned_q, turned_k = mlx_anvil.rope_qk(q, k, 4, traditional=True, offset=3)
    back: mx.array = mlx_anvil.rope(turned_q, 4, base=None, freqs=mx.ones((2,)), offset=mx.array([1]))
    cache = mx.zeros((1, 2, 9, 4))
    written, keys, values = mlx_anvil.rope_and_cache(back, turned_k, turned_k, cache, cache, 4, offset=1)
    return written + (keys + values)[:, :, :3]


def quantized(x: mx.array, w: mx.array) -> mx.array:
    codes, scales, biases = mx.quantize(w, group_size=32, bits=4)
    y: mx.array = mlx_anvil.quantized_matmul(x, codes, scales, biases, group_size=32, bits=4, mode="affine")
    back: mx.array = mlx_anvil.quantized_matmul(y, codes, scales, biases, transpose=False, group_size=32, stream=mx.cpu)
    rows: mx.array = mlx_anvil.quantized_embedding(mx.array([1]), *mx.quantize(w), dtype=mx.float32)
    one: mx.array = mlx_anvil.quantized_gemv(x[:1], codes, scales, biases, group_size=32)
    matrix = (codes, scales, biases)
    gated: mx.array = mlx_anvil.quantized_swiglu(x, matrix, matrix, group_size=32)
    coded = mx.quantize(w, mode="mxfp4")
    return (
        one
        + gated
        + back.sum()
        + rows.sum()
        + mlx_anvil.quantized_gemv(x[0], *coded, group_size=32, bits=4, mode="mxfp4")
    )


def normed(x: mx.array, weight: mx.array) -> mx.array:
    y: mx.array = mlx_anvil.rms_norm(x, weight, 1e-6, gate=x, weight_offset=1.0)
    z, h = mlx_anvil.layer_norm(x, weight, weight, residual=y)
    w, _ = nn.RMSNorm(8)(z, residual=h)
    return nn.LayerNorm(8, bias=False)(w)


def routed(x: mx.array) -> mx.array:
    weights, indices = mlx_anvil.softmax_topk(x, 2, norm=False, scoring="sigmoid", sorted=False)
    more, chosen = mlx_anvil.softmax_topk(
        x, 2, e_score_correction_bias=x[0], n_group=4, topk_group=2, group_scoring="max", routed_scaling_factor=2.5
    )
    rows, offsets, _, inverse = mlx_anvil.moe_permute(x, indices, 8)
    summed: mx.array = mlx_anvil.moe_combine(rows, weights, inverse, residual=x, shared=x, shared_gate=x[:, :1])
    return weights * indices + more * chosen + summed.sum() + offsets.sum()


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


def profiled(x: mx.array) -> float | None:
    with mlx_anvil.simulate(profiled=True) as profiles:
        mx.eval(mlx_anvil.silu_gate(x, x))
    return profiles[0].metrics()["device_bytes_read"]


def composed(x: mx.array) -> mx.array:
    with mlx_anvil.composed():
        return mlx_anvil.silu_gate(x, x)


@mlx_anvil.strict()
def strictly(x: mx.array) -> mx.array:
    return mlx_anvil.silu_gate(x, x)


def facts() -> str:
    info = mlx_anvil.info()
    usable: bool = info["backends"]["cpu"]["usable"]
    return f"{mlx_anvil.__version__} {info['mlx']} {usable}"


def module(x: mx.array) -> mx.array:
    mlp = nn.SwiGLU(8, 16, bias=True)
    return mlp(x)


def quantized_head(x: mx.array, w: mx.array) -> mx.array:
    matrix = mx.quantize(w)
    index: mx.array = mlx_anvil.quantized_argmax(x, *matrix, group_size=64)
    indices, values = mlx_anvil.quantized_argmax(x, *matrix, return_values=True)
    pair: tuple[mx.array, mx.array] = mlx_anvil.quantized_topk(x, *matrix, k=5)
    return index + indices + values + pair[0][..., 0] + pair[1][..., 0]


def quantized_modules(x: mx.array) -> mx.array:
    linear = nn.QuantizedLinear.from_linear(mlx.nn.Linear(64, 64), group_size=32, bits=4)
    same = nn.QuantizedLinear.from_mlx(linear)
    mlp = nn.QuantizedSwiGLU.from_swiglu(nn.SwiGLU(64, 96), group_size=32)
    return mlp(same(x)) + nn.QuantizedSwiGLU.from_mlx(mlp)(x)


def patched(model: mlx.nn.Module) -> tuple[str, str]:
    report: patching.Report = mlx_anvil.patch(model, rope=False, repack=True)
    repacked: int = report.repacked
    mlx_anvil.unpatch(model)
    assert mlx_anvil.use_huge_pages(mx.zeros(3)) >= 0
    mlx_anvil.lm.unpatch_all()
    reports: tuple[patching.Report, ...] = mlx_anvil.lm.reports()
    return report.swapped[0].op, str([repacked, *(report.fallbacks for report in reports)])


def over_a_group(q: mx.array) -> mx.array:
    group = mx.distributed.init()
    out, lse = mlx_anvil.distributed.ring_attention(q, q, q, group=group, mask="causal", return_lse=True)
    alone: mx.array = mlx_anvil.distributed.ring_attention(q, q, q, group=group, layout="zigzag")
    merged: mx.array = mlx_anvil.distributed.merge_attention([out, alone], [lse, lse])
    mlx_anvil.distributed.check_ranks(group, arrays=mlx.nn.Linear(2, 2), batch_size=8)
    return merged


def verified(q: mx.array, k: mx.array) -> mx.array:
    tree: mlx_anvil.Tree = mlx_anvil.Tree([-1, 0, 0])
    return mlx_anvil.flash_attention(q, k, k, mask=tree) + tree.depths


def planned(q: mx.array, k: mx.array, lengths: mx.array) -> mx.array:
    plan: mlx_anvil.AttentionPlan = mlx_anvil.attention_plan(q_len=1, kv_len=9, lengths=lengths)
    return mlx_anvil.flash_attention(q, k, k, plan=plan) * plan.kv_len


def served(model: mlx.nn.Module) -> tuple[int, int]:
    cache = mlx_anvil.lm.PagedCache(model, pages=8, page_size=16, kv_bits=(8, 4))
    sequence: mlx_anvil.lm.Sequence = cache.new_sequence()
    layers: list[mlx_anvil.lm.LayerCache] = cache.step([sequence, sequence.fork()], [3, 1])
    return len(layers), cache.free_pages


def built(x: mx.array) -> tuple[int, str]:
    prebuilt: mlx_anvil.Prebuilt = mlx_anvil.prebuild(mlx.nn.RMSNorm(8), lambda: mlx_anvil.silu_gate(x, x))
    prebuilt.wait(timeout=600.0)
    return len(prebuilt.kernels), prebuilt.reason


def registry() -> list[str]:
    spec: reference.OpSpec = reference.OPS["silu_gate"]
    return [spec.name, *spec.arguments]


if __name__ == "__main__":
    ones = mx.ones((4, 8))
    heads = mx.ones((1, 2, 4, 8))
    mx.eval(attended(heads, heads, heads), over_a_group(heads))
    wide = mx.ones((4, 64))
    mx.eval(positions(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 4))))
    mx.eval(quantized(wide, mx.ones((64, 64))), quantized_head(wide, mx.ones((64, 64))), quantized_modules(wide))
    mx.eval(
        gated(ones, ones),
        module(ones),
        simulated(ones),
        profiled(ones),
        composed(ones),
        strictly(ones),
        normed(ones, ones[0]),
        routed(ones),
    )
    print(traced(ones)[0], facts(), registry(), built(ones), patched(mlx.nn.RMSNorm(8)))
