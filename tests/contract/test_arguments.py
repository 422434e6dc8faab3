"""Numbers and switches of every op: a value of the wrong type or range raises an error that names the op."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import _compat
from mlx_anvil.reference import OPS

pytestmark = pytest.mark.cpu_only  # of the call alone; nothing is evaluated


def rows(*shape: int) -> mx.array:
    return mx.ones(shape)


W = mx.quantize(rows(8, 64))
EXPERT = mx.quantize(rows(1, 64, 64))
KV = mx.quantize(rows(1, 2, 3, 64))
KV_CACHE = mx.quantize(rows(1, 2, 9, 64))
# Each op with arguments that it takes: by default those of its entry in the registry.
CALLS: dict[str, Callable[..., Any]] = {
    spec.name: partial(getattr(mlx_anvil, spec.name), *spec.make_inputs(spec.contract_shapes[-1], mx.float32))
    for spec in OPS.values()
}
CALLS |= {
    "flash_attention": partial(mlx_anvil.flash_attention, rows(1, 2, 3, 64), KV, KV),
    "quantized_matmul": partial(mlx_anvil.quantized_matmul, rows(2, 64), *W),
    "quantized_gemv": partial(mlx_anvil.quantized_gemv, rows(2, 64), *W),
    "quantized_swiglu": partial(mlx_anvil.quantized_swiglu, rows(2, 64), W, W),
    "gather_matmul": partial(mlx_anvil.gather_matmul, rows(2, 1, 8), rows(3, 8, 4), rhs_indices=mx.array([0, 2])),
    "gather_quantized_matmul": partial(
        mlx_anvil.gather_quantized_matmul, rows(1, 1, 64), *EXPERT, rhs_indices=mx.array([0])
    ),
    "quantized_experts": partial(
        mlx_anvil.quantized_experts, rows(2, 64), mx.zeros((2, 1), mx.int32), rows(2, 1), *(EXPERT,) * 3
    ),
    "quantized_embedding": partial(mlx_anvil.quantized_embedding, mx.array([1]), *W),
    "quantized_argmax": partial(mlx_anvil.quantized_argmax, rows(2, 64), *W),
    "quantized_topk": partial(mlx_anvil.quantized_topk, rows(2, 64), *W, k=2),
    "rms_norm": partial(mlx_anvil.rms_norm, rows(2, 8), rows(8)),
    "layer_norm": partial(mlx_anvil.layer_norm, rows(2, 8), rows(8)),
    "rope": partial(mlx_anvil.rope, rows(1, 2, 8), dims=4),
    "rope_qk": partial(mlx_anvil.rope_qk, rows(1, 2, 8), rows(1, 2, 8), dims=4),
    "rope_and_cache": partial(mlx_anvil.rope_and_cache, *(rows(1, 2, length, 8) for length in (3, 3, 3, 9, 9)), dims=4),
    "causal_conv1d": partial(mlx_anvil.causal_conv1d, rows(2, 3, 4), rows(4, 3)),
    "kv_append": partial(
        mlx_anvil.kv_append, KV_CACHE, KV_CACHE, rows(1, 2, 3, 64), rows(1, 2, 3, 64), offset=1, kv_bits=4
    ),
    "selective_scan": partial(
        mlx_anvil.selective_scan, rows(1, 3, 4), rows(1, 3, 4), rows(4, 2), rows(1, 3, 2), rows(1, 3, 2)
    ),
    "ssd_scan": partial(
        mlx_anvil.ssd_scan, rows(1, 3, 4, 2), rows(1, 3, 4), rows(4), rows(1, 3, 2, 5), rows(1, 3, 2, 5)
    ),
    "softmax_topk": partial(mlx_anvil.softmax_topk, rows(2, 8), k=2),
    "moe_permute": partial(mlx_anvil.moe_permute, rows(2, 8), mx.array([[1], [0]]), num_experts=4),
    "moe_combine": partial(mlx_anvil.moe_combine, rows(2, 8), rows(2, 1), mx.array([1, 0])),
    "mla_decode": partial(
        mlx_anvil.mla_decode, rows(1, 2, 3, 8), rows(1, 2, 3, 4), rows(1, 1, 5, 8), rows(1, 1, 5, 4), scale=0.3
    ),
}
# Their parameters that are no arrays, with a value of each that is taken.
INTS = {"group_size": 64, "bits": 4, "dims": 4, "k": 2, "window_size": 3, "offset": 5}
INTS |= {"down_group_size": 64, "down_bits": 4, "n_group": 2, "topk_group": 1, "num_experts": 2}
INTS |= {"kv_group_size": 64, "kv_bits": 4, "activation_bits": 8}
FLOATS = {"scale": 0.5, "softcap": 3.0, "eps": 1e-6, "weight_offset": 1.0, "base": 100.0, "limit": 7.0}
FLOATS |= {"routed_scaling_factor": 2.5, "normalize_eps": 1e-6, "lower_bound": -5.0}
BOOLS = {
    "transpose": True,
    "return_values": True,
    "return_lse": True,
    "row_invariant": True,
    "traditional": True,
    "norm": False,
    "sorted": False,
    "sorted_indices": True,
    "dt_softplus": True,
    "allow_neg_eigval": True,
}
OTHERS = {"mode": "affine", "scoring": "sigmoid", "activation": "silu", "dtype": mx.float32, "stream": mx.cpu}
OTHERS |= {"group_scoring": "max", "masked_score": 0.0, "down_mode": "affine", "kv_mode": "affine", "rope": {"dims": 4}}
OTHERS |= {"plan": None, "gate_activation": "sigmoid", "dt_limit": (0.0, 1.0)}
ARRAYS = {"x", "q", "k", "v", "mask", "sinks", "freqs", "w", "scales", "biases", "gate", "up", "ids", "logits"}
ARRAYS |= {"weight", "bias", "residual", "k_cache", "v_cache", "e_score_correction_bias"}
ARRAYS |= {"weights", "down", "gate_bias", "up_bias", "down_bias", "y", "inverse", "shared", "shared_gate"}
ARRAYS |= {"a", "b", "lhs_indices", "rhs_indices", "lengths", "q_lengths", "cu_seqlens_q", "cu_seqlens_k"}
ARRAYS |= {"starts", "block_table", "cache_k", "cache_v", "slots", "q_nope", "q_rope", "latent", "k_rope", "dt"}
ARRAYS |= {"A", "B", "C", "D", "z", "state", "g", "beta", "return_states", "A_log", "dt_bias"}
# An int elsewhere.
ARRAYS_K = {(op, "k") for op in ("flash_attention", "gated_delta", "kv_append", "rope_qk", "rope_and_cache")}


def parameters(op: str) -> list[str]:
    signature = getattr(mlx_anvil, op).__nb_signature__[0][0]
    return re.findall(r"(\w+): ", signature.split(" -> ")[0])


def pairs(kind: dict[str, Any]) -> list[tuple[str, str]]:
    return [(op, name) for op in CALLS for name in parameters(op) if name in kind and (op, name) not in ARRAYS_K]


def refused(op: str, name: str, value: object, error: type[Exception] | tuple[type[Exception], ...], text: str) -> None:
    with pytest.raises(error, match=rf"^\[{op}\] .*{text}"):
        CALLS[op](**{name: value})


def test_every_parameter_is_known():
    known = {*INTS, *FLOATS, *BOOLS, *OTHERS, *ARRAYS}
    assert {name for op in CALLS for name in parameters(op)} <= known
    assert {name for name in mlx_anvil.__all__ if hasattr(getattr(mlx_anvil, name), "__nb_signature__")} == set(CALLS)


@pytest.mark.parametrize(("op", "name"), pairs(INTS | FLOATS | BOOLS | OTHERS))
def test_values_that_are_taken(op: str, name: str):
    CALLS[op](**{name: (INTS | FLOATS | BOOLS | OTHERS)[name]})


@pytest.mark.parametrize(("op", "name"), pairs(INTS))
def test_ints(op: str, name: str):
    for bad in ("a", 1.5, True, {}, math.nan, b"1", np.float32(2)):
        refused(op, name, bad, TypeError, rf"{name} is .*; allowed: ")
    # A window of 2^31 is as good as all; an offset may have 64 bits.
    large = {"window_size": (2**63,), "offset": ()}.get(name, (2**31, 2**63))
    for bad in (*large, -(2**63) - 1, 2**64, 10**5000):
        refused(op, name, bad, ValueError, name)
    CALLS[op](**{name: np.int64(INTS[name])})
    if name != "offset":
        refused(op, name, mx.array(INTS[name]), TypeError, rf"{name} is .*array; allowed: .*{name}\.item\(\)")


@pytest.mark.parametrize(("op", "name"), pairs(FLOATS))
def test_floats(op: str, name: str):
    for bad in ("a", True, [1.0], {}, 1j, b"1", np.ones(3)):
        refused(op, name, bad, TypeError, rf"{name} is .*; allowed: ")
    for bad in (math.nan, math.inf, -math.inf, 10**5000, *(() if op.startswith("rope") else (1e39, -1e39))):
        refused(op, name, bad, ValueError, rf"{name} is .*; allowed: ")
    for good in (int(FLOATS[name]) or 1, np.float32(FLOATS[name]), np.float64(FLOATS[name])):
        CALLS[op](**{name: good})


@pytest.mark.parametrize(("op", "name"), pairs(FLOATS))
def test_an_array_that_would_have_no_gradient(op: str, name: str):
    text = rf"{name} is .*array; allowed: .*{name}\.item\(\): an array would have no gradient"
    refused(op, name, mx.array(FLOATS[name]), TypeError, text)
    with pytest.raises(TypeError, match=text):
        mx.grad(lambda value: mx.stack(CALLS[op](**{name: value})).sum())(mx.array(FLOATS[name]))


@pytest.mark.parametrize(("op", "name"), pairs(BOOLS))
def test_bools(op: str, name: str):
    for bad in (1, 0, None, "true", 1.0, mx.array(True), math.nan):
        refused(op, name, bad, TypeError, rf"{name} is .*; allowed: a bool")


@pytest.mark.parametrize(("op", "name"), pairs(OTHERS))
def test_others(op: str, name: str):
    for bad in (1, 2**70, math.nan, "nonsense", [1], mx.array(1)):
        refused(op, name, bad, (TypeError, ValueError), rf"{name} is .*; allowed")


def test_pair_of_window_sizes():
    for bad in ((1, 2**63), (2**64, 0), [0, -(2**70)]):
        refused("flash_attention", "window_size", bad, ValueError, "window_size is .*; allowed: 64-bit ints")
    for bad in ((1, 1.5), ("a", 0), (True, 1), (1, mx.array(1))):
        refused("flash_attention", "window_size", bad, TypeError, "window_size is .*; allowed: None, an int, or a pair")


@pytest.mark.parametrize("option", ["checked", "matrix_units", "group_products"])
def test_switches_of_simulate(option: str):
    with pytest.raises(TypeError, match=rf"^\[simulate\] {option} is a int; allowed: a bool"):
        mlx_anvil.simulate(**{option: 1})


@pytest.mark.parametrize("seed", ["a", 1.5, True, None])
def test_seed_of_simulate(seed: object):
    with pytest.raises(TypeError, match=r"^\[simulate\] seed is a .*; allowed: an int"):
        mlx_anvil.simulate(seed=seed)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_of_simulate_out_of_range(seed: int):
    with pytest.raises(ValueError, match=rf"^\[simulate\] seed is {seed}; allowed: 0 to 2"):
        mlx_anvil.simulate(seed=seed)


def test_prompt_lengths_of_prebuild():
    with pytest.raises(
        TypeError, match=r"^\[prebuild\] prompt_lengths is a int; allowed: a sequence of positive integers"
    ):
        mlx_anvil.prebuild(mlx.nn.RMSNorm(8), prompt_lengths=5)
    with pytest.raises(ValueError, match=r"^\[prebuild\] prompt_lengths is .*; allowed: positive integers"):
        mlx_anvil.prebuild(mlx.nn.RMSNorm(8), prompt_lengths=(1.5,))


def test_instruction_set_that_the_build_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLX_ANVIL_ISA", "avx2")
    with pytest.raises(
        ImportError, match=r"^\[MLX_ANVIL_ISA\] is 'avx2', for which this build has no kernels; it has ba"
    ):
        _compat.check_isa(["baseline"], ["avx2"])
    _compat.check_isa(["baseline", "avx2"], [])


def test_build_of_a_machine_with_more_instructions():
    with pytest.raises(ImportError, match=r"^mlx_anvil was built on another machine, .*\nFrom the source folder"):
        _compat.check_isa([], ["baseline", "avx2"])


@pytest.mark.parametrize("name", ["bogus", "AVX2", " avx2", "avx512,avx2"])
def test_unknown_instruction_set_in_the_environment(name: str):
    run = subprocess.run(
        [sys.executable, "-c", "import mlx_anvil"],
        env={**os.environ, "MLX_ANVIL_ISA": name},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    allowed = ", ".join(mlx_anvil.info()["supported_isas"])
    assert (
        run.stderr.splitlines()[-1] == f"ImportError: [MLX_ANVIL_ISA] is {name!r}; allowed on this machine: {allowed}."
    )
