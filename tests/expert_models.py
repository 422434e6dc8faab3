"""Small models of mlx-lm's architectures with experts, as in ``lm_models``."""

from typing import Any

from lm_models import EXPERTS, WINDOW, Architecture

CHOSEN = EXPERTS  # all: see lm_models
FULL = ["full_attention"] * 2

# Options that several architectures have, under their names for them.
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk", "moe_k"), CHOSEN),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "share_expert_dim"), 32),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "head_dim"), 16),
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    **{"rotary_dim": 8, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"first_k_dense_replace": 0, "rope_scaling": None, "attention_bias": False, "partial_rotary_factor": 0.5},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "layer_types": FULL, "use_bias": False},
    **{"sliding_window": WINDOW, "is_moe_layer": [True, True], "use_qk_norm": True, "use_cla": False},
    **{"logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 0.5},
    **{"use_mixed_mlp_moe": True, "cla_share_factor": 2, "use_expert_bias": True, "num_dense_layers": 0},
    **{"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "layer_norm_epsilon": 1e-5},
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
LLAMA4 = {
    **{"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 32, "intermediate_size_mlp": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "rms_norm_eps": 1e-5, "head_dim": 16},
    **{"rope_theta": 1e4, "num_local_experts": 1, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    **{"attention_chunk_size": 64, "max_position_embeddings": 512, "attention_bias": False, "use_qk_norm": True},
    **{"model_type": "llama4_text", "rope_scaling": None},
}
OWN: dict[str, dict[str, Any]] = {
    "Klear": {},
    "afmoe": {},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe": {},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_v3": {},
    "deepseek": {},
    "deepseek_v2": {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "topk_method": "greedy"},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v41": {},
    "dots1": {},
    "ernie4_5_moe": {"moe_num_shared_experts": 1},
    "exaone_moe": {},
    "gemma4_text": {
        **{"enable_moe_block": True, "layer_types": ["sliding_attention", "full_attention"]},
        **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 16},
    },
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["attention"] * 2},
    "hunyuan": {"rope_scaling": {"alpha": 1.0, "type": "dynamic", "factor": 1.0}},
    "kimi_linear": {
        **{"num_experts_per_token": CHOSEN, "model_max_length": 512, "mla_use_nope": True},
        "linear_attn_config": {
            **{"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16},
            "short_conv_kernel_size": 3,
        },
    },
    "laguna": {},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "llama4": {"text_config": LLAMA4},
    "mellum": {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}},
    "mimo_v2_flash": {
        **{"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [1, 1], "add_swa_attention_sink_bias": False},
        **{"add_full_attention_sink_bias": False, "sliding_window_size": 16, "layernorm_epsilon": 1e-5},
        **{"swa_rope_theta": 1e4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
        **{"swa_head_dim": 16, "swa_v_head_dim": 16},
    },
    "minimax": {},
    "mistral4": {
        "rope_parameters": {
            **{"rope_theta": 1e4, "rope_type": "default", "type": "default"},
            **{"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
        }
    },
    "mixtral": {},
    "nemotron_h": {
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 16},
        **{"conv_kernel": 4, "n_groups": 1, "mlp_bias": False, "use_conv_bias": True},
        "hybrid_override_pattern": ["M", "E", "*"],
    },
    "olmoe": {},
    "phimoe": {"num_experts_per_tok": 2, "num_local_experts": 2},
    "phixtral": {"num_vocab": 96, "model_dim": 64, "num_heads": 4, "num_layers": 2},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_next": {
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
        **{"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2},
    },
    "step3p5": {"num_attention_groups": 2, "moe_layers_enum": "0,1"},
}
MODELS = {name: Architecture(name, OPTIONS | own) for name, own in OWN.items()}
