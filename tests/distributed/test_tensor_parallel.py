"""Models whose heads, columns and experts are split over processes: patched before or after, they say the same."""

import functools

import mlx.nn as nn
import numpy as np
import pytest
import tensor_parallel_programs as programs

import mlx_anvil
from lm_models import Architecture
from mlx_anvil.distributed import _local

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32 with attention


in_one_process = functools.cache(programs.alone)


@pytest.mark.parametrize(
    ("processes", "even", "steps"), [(2, True, programs.STEPS), (3, True, 6), (4, True, 6), (3, False, 6)]
)
def test_tokens_are_those_of_one_process(processes, even, steps):
    """mlx-lm shards what the processes divide, and ``distributed.shard`` the rest."""
    expected = in_one_process(even)
    found = _local.results(programs.together, processes, even, steps, environment=_local.ONE_THREAD)
    for of_rank in found:
        assert len(of_rank) == 16
        for (name, quantized, order), made in of_rank.items():
            tokens, logits = expected[name, quantized]
            count = 1 + (steps if order == "before" else 1)
            assert made["generated"][0] == tokens[:count], (name, quantized, order)
            for ours, theirs in zip(made["generated"][1], logits[:count], strict=True):
                assert np.abs(ours - theirs).max() <= LIMIT * np.abs(theirs).max(), (name, quantized, order)
            assert made["fallbacks"] == ()
            after = of_rank[name, quantized, "after"]["kernels"]
            assert after
            assert made["kernels"][: len(after)] == after
            assert_rows(made["rows"], "q_b_proj" if name == "deepseek_v3" else "q_proj", quantized)
            if quantized and name != "deepseek_v3":  # whose MLP stores its result before it returns it
                assert any(kernel.startswith("quantized_swiglu") for kernel in made["kernels"]), name


@pytest.fixture(scope="module")
def two():
    return _local.results(programs.in_two_processes, 2, environment=_local.ONE_THREAD)


def test_other_architectures(two):
    for errors in (of_rank["errors"] for of_rank in two):
        assert errors.keys() == programs.OTHERS.keys()
        assert max(errors.values()) <= LIMIT, errors


def test_generators_of_mlx_lm(two):
    for alone, together in (of_rank["generators"] for of_rank in two):
        assert len(alone) == programs.STEPS
        assert together == alone


def assert_rows(rows: set, query: str, quantized: bool) -> None:
    """Checks that the report names the sharded layers."""
    if quantized:
        assert (query, "quantized_matmul", "QuantizedAllToShardedLinear") in rows
    op, cls = (
        ("quantized_matmul", "QuantizedShardedToAllLinear") if quantized else ("matmul_all_sum", "ShardedToAllLinear")
    )
    assert {("o_proj", op, cls), ("down_proj", op, cls)} <= rows


@pytest.fixture(scope="module")
def three():
    return _local.results(programs.in_three_processes, 3, environment=_local.ONE_THREAD)


def test_gradients_are_those_of_one_process(three):
    for of_rank in three:
        for case, errors in of_rank["gradients"].items():
            assert errors
            worst = max(errors, key=errors.get)
            assert errors[worst] <= LIMIT, (case, worst, errors[worst])


def test_chunks_sum_to_the_whole_product(three):
    for of_rank in three:
        for name, error, limit in of_rank["chunks"]:
            assert error <= limit, (name, error, limit)


def test_sums_keep_their_order(three):
    for of_rank in three:
        assert len(of_rank["order"]) == 80
        assert all(of_rank["order"])


def test_errors(three):
    for said in (of_rank["refusals"] for of_rank in three):
        assert "3" in said["mlx_lm"]
        few = "[shard] layers.0.self_attn has 2 key and value heads; allowed: at least one for each of 3 processes."
        assert said["few"] == few
        assert said["unknown"].startswith("[shard] layers.1.self_attn has sinks; allowed: layers as in Llama")
        head = "[shard] the model has no lm_head that is a linear layer; allowed: head=False."
        assert said["head"] == head
        lora = "[shard] layers.0.mlp.up_proj is a LoRALinear; allowed: linear layers, quantized or not."
        assert said["lora"] == lora
        assert said["shapes"] == "[matmul_all_sum] x is (3, 4) and w (2, 5); allowed: [..., K] and [N, K]."
        assert said["chunks"] == "[matmul_all_sum] chunks is 0; allowed: at least 1, or None."


def test_layers_of_a_patched_model_make_patched_ones():
    """In a process of its own, in which no other model is patched."""
    (found,) = _local.results(programs.layers_of_a_patched_model, 1)
    assert found == {
        "patch changes MLX's classes": True,
        "a layer of no model": False,
        "a layer of the patched model": True,
        "that layer after unpatch": False,
        "a layer made after unpatch": False,
        "unpatch restores MLX's classes": True,
    }


def test_an_option_turns_the_sums_off():
    """In a group of one process."""
    model = Architecture("llama").build()
    nn.quantize(model, group_size=32, bits=4)
    model.shard()
    report = mlx_anvil.patch(model, sharded=False)
    path = "model.layers.0.mlp.down_proj"
    assert [row.what for row in report.swapped if row.path == path] == ["mx.quantized_matmul"]
    assert [(row.op, row.why) for row in report.left if row.path == path] == [("quantized_matmul", "sharded=False")]
    report = mlx_anvil.patch(model, quantized=False)
    assert [row.why for row in report.left if row.path == path] == ["quantized=False"]
    assert [row.path for row in report.swapped if row.path == path] == []
