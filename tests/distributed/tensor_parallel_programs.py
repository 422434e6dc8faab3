"""What the processes of ``test_tensor_parallel.py`` run."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import mlx_anvil
from expert_models import OPTIONS
from lm_models import Architecture, greedy, tokens

SIZES = {"hidden_size": 96, "intermediate_size": 384, "num_attention_heads": 12, "num_key_value_heads": 12}
MODELS = {
    "llama": Architecture("llama", {**SIZES, "head_dim": 32}),
    "qwen3": Architecture("qwen3", {**SIZES, "head_dim": 32, "tie_word_embeddings": False}),
    "qwen3_moe": Architecture("qwen3_moe", {**OPTIONS, **SIZES, "head_dim": 32, "moe_intermediate_size": 384}),
    "deepseek_v3": Architecture(
        "deepseek_v3", {**OPTIONS, **SIZES, "v_head_dim": 32, "qk_nope_head_dim": 32, "moe_intermediate_size": 384}
    ),
}


def built(name, quantized):
    mx.random.seed(7)
    model = MODELS[name].build()
    if quantized:
        nn.quantize(model, group_size=32, bits=4)
    return model


def look(names):
    group = mx.distributed.init()
    mx.random.seed(3)
    prompt = tokens(1, 9)
    out = {}
    for name in names:
        for quantized in (False, True):
            plain = greedy(built(name, quantized), prompt, 12)
            for order in ("plain", "before", "after"):
                try:
                    model = built(name, quantized)
                    if order == "before":
                        mlx_anvil.patch(model)
                    model.shard(group)
                    if order == "after":
                        report = mlx_anvil.patch(model)
                        if group.rank() == 0:
                            print(report)
                    found = greedy(model, prompt, 12)
                    out[name, quantized, order] = found == plain
                except Exception as e:
                    out[name, quantized, order] = repr(e)
    return out
