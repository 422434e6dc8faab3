"""Small models of mlx-lm's architectures with recurrences or short convolutions, as in ``lm_models``."""

from typing import Any

from expert_models import MODELS as WITH_EXPERTS
from expert_models import OPTIONS
from lm_models import COMMON, Architecture

ALTERNATING = ["linear_attention", "full_attention"]
DELTA: dict[str, Any] = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2},
}
MAMBA_1: dict[str, Any] = {
    **{"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
    "tie_word_embeddings": True,
}
MAMBA_2: dict[str, Any] = {
    **{"mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_heads": 4, "mamba_n_groups": 2},
    **{"mamba_d_ssm": 64, "mamba_conv_bias": True, "mamba_proj_bias": False},
}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", MAMBA_1),
    "falcon_mamba": ("mamba", {**MAMBA_1, "model_type": "falcon_mamba"}),
    "mamba2": (
        "mamba2",
        {
            **{"num_heads": 4, "head_dim": 16, "state_size": 16, "conv_kernel": 4, "n_groups": 2, "use_bias": False},
            **{"use_conv_bias": True, "time_step_limit": (0.01, 10.0), "time_step_rank": "auto"},
            **{"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        },
    ),
    "falcon_h1": ("falcon_h1", {**MAMBA_2, "head_dim": 16, "mamba_rms_norm": True}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**OPTIONS, **MAMBA_2, "layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    ),
    "jamba": (
        "jamba",
        {
            **{"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
            **{"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "mamba_dt_rank": 4, "num_experts": 4},
            **{"num_experts_per_tok": 4, "layers_block_type": ["mamba", "attention"]},
        },
    ),
    "plamo2": (
        "plamo2",
        {"hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_d_state": 16, "full_attention_idx": [1]},
    ),
    "lfm2": (
        "lfm2",
        {
            **{"norm_eps": 1e-5, "conv_bias": True, "conv_L_cache": 3, "full_attn_idxs": [1], "block_dim": 64},
            **{"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
            **{"block_ff_dim": 96},
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            **{**DELTA, "linear_allow_neg_eigval": True, "layer_types": ALTERNATING, "attention_bias": False},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5": (
        "qwen3_5",
        {"text_config": {**COMMON, **DELTA, "model_type": "qwen3_5", "head_dim": 16}},
    ),
    "bailing_moe_v3": ("bailing_moe_v3", {**OPTIONS, "layer_group_size": 2}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            **{"attention_bias": False, "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 8},
            "block_types": ["recurrent", "attention"],
        },
    ),
    "gear": ("gear", {"head_dim": 16, "layer_types": ["conv_mixer", "full_attention"]}),
    "kimi_k3": (
        "kimi_k3",
        {
            "text_config": {
                **{**COMMON, "head_dim": 16, "hidden_act": "situ", "moe_intermediate_size": 32, "num_experts": 4},
                **{"num_experts_per_token": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16},
                **{"v_head_dim": 16, "mla_use_output_gate": True, "attn_res_block_size": 2},
                "linear_attn_config": {
                    **{"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16},
                    **{"short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
                },
            }
        },
    ),
}
MODELS = {name: Architecture(module, {"intermediate_size": 96} | own) for name, (module, own) in OWN.items()}
for name in ("kimi_linear", "lfm2_moe", "nemotron_h", "qwen3_next"):
    MODELS[name] = WITH_EXPERTS[name]
# Its recurrence has no op.
RWKV7 = Architecture(
    "rwkv7",
    {
        **{"head_dim": 16, "norm_eps": 1e-5, "a_low_rank_dim": 8, "v_low_rank_dim": 8},
        **{"gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    },
)
