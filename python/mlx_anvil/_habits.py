"""What arguments of other libraries are called here: the only place that names them.

``NAMES`` maps a function, a class or a method to its table. An entry maps another library's keyword to ours, with a
value where that is fixed ("mask='causal'"). An entry that ends in a full stop is a sentence for a keyword without a
counterpart. Functions share tables: an entry does not apply to a function that lacks the argument it names.
"""

from collections.abc import Mapping

_NO_DROPOUT = "there is no dropout, so leave it out."
_NO_NEED = "leave it out."
_POSITION = "give the first position as offset."
_ANGLES = "angles are computed; give dims with base or freqs."
_LAST_AXIS = "the last axis is normalised, so leave it out."
_TOP_K = {"top_k": "k", "topk": "k", "num_experts_per_tok": "k", "largest": "the largest are chosen.", "dim": _NO_NEED}
_TOP_K |= {"axis": _NO_NEED}
_STREAM = {"device": "stream", "s": "stream"}

_ATTENTION = {
    # PyTorch: scaled_dot_product_attention, flex_attention
    "query": "q",
    "key": "k",
    "value": "v",
    "queries": "q",
    "keys": "k",
    "values": "v",
    "attn_mask": "mask",
    "is_causal": "mask='causal'",
    "dropout_p": _NO_DROPOUT,
    "enable_gqa": "grouped queries need no switch, so leave it out.",
    "score_mod": "scores are changed by mask and softcap only.",
    "block_mask": "mask",
    # flash-attn
    "causal": "mask='causal'",
    "softmax_scale": "scale",
    "sliding_window": "window_size",
    "local_window_size": "window_size",
    "alibi_slopes": "add the biases to the scores with mask, an array that broadcasts with [B, Hq, Lq, Lk].",
    "deterministic": "gradients are always deterministic, so leave it out.",
    "return_attn_probs": "the probabilities are never stored; return_lse=True returns their log-sum-exp.",
    "return_softmax_lse": "return_lse=True",
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "qkv": "give q, k and v as three arrays.",
    "kv": "give k and v as two arrays.",
    "cu_seqlens": "cu_seqlens_q",
    "cu_seq_lens_q": "cu_seqlens_q",
    "cu_seq_lens_k": "cu_seqlens_k",
    "seqlens_k": "lengths",
    "seqused_k": "lengths",
    "max_seqlen_q": _NO_NEED,
    "max_seqlen_k": _NO_NEED,
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "lengths",
    "block_tables": "block_table",
    "page_table": "block_table",
    # Triton, xformers, Transformers, JAX
    "sm_scale": "scale",
    "scaling": "scale",
    "attn_bias": "mask",
    "bias": "mask",
    "attention_mask": "mask",
    "attention_bias": "mask",
    "p": _NO_DROPOUT,
    "dropout": _NO_DROPOUT,
    "logits_soft_cap": "softcap",
    "attn_logits_soft_cap": "softcap",
    "attn_logit_softcapping": "softcap",
    "logit_cap": "softcap",
    "sink": "sinks",
    "return_residual": "return_lse=True",
    # MLX
    "force_fused": "mlx_anvil.strict() raises where a call would not be fused.",
    "memory_efficient_threshold": _NO_NEED,
}

_GATE = {
    "a": "gate",  # Liger
    "b": "up",
    "x": "gate and up, two arrays; mx.split(x, 2, axis=-1) makes them.",
    "input": "gate and up, two arrays; mx.split(input, 2, axis=-1) makes them.",
    "x1": "gate",
    "x2": "up",
    "y": "up",
}

_OUTPUT_GATE = {"a": "x", "input": "x", "hidden_states": "x", "attn_output": "x", "g": "gate", "z": "gate"}

_NORM = {
    "input": "x",
    "hidden_states": "x",
    "X": "x",
    "a": "x",
    "W": "weight",
    "w": "weight",
    "gamma": "weight",
    "scale": "weight",
    "epsilon": "eps",
    "variance_epsilon": "eps",
    "R": "residual",
    "x1": "residual",
    "z": "gate",  # the gated norms of Mamba
    "activation": "gate_activation",  # flash-linear-attention
    "offset": "weight_offset",
    "normalized_shape": _LAST_AXIS,
    "axis": _LAST_AXIS,
    "dim": _LAST_AXIS,
    "prenorm": "with residual, the sum is always returned; leave it out.",
    "casting_mode": "the arithmetic is always float32, so leave it out.",
    "in_place": "arrays do not change in place, so leave it out.",
    "dropout_p": _NO_DROPOUT,
}

_ROPE = {
    "a": "x",  # MLX
    "input": "x",
    "dim": "dims",
    "rotary_dim": "dims",
    "rotary_dims": "dims",
    "head_dim": "dims",
    "interleaved": "traditional",
    "is_neox_style": "traditional, its opposite.",
    "theta": "base",
    "rope_theta": "base",
    "rotary_base": "base",
    "max_wavelength": "base",
    "inv_freq": "freqs=1 / inv_freq",
    "scaling_factor": "scale=1 / scaling_factor",
    "scale_factor": "scale=1 / scale_factor",
    "cos": _ANGLES,
    "sin": _ANGLES,
    "cos_sin_cache": _ANGLES,
    "positions": _POSITION,
    "position_ids": _POSITION,
    "input_pos": _POSITION,
    "seqlen_offsets": "offset",
    "position": "offset",
    "start_pos": "offset",
    "unsqueeze_dim": "the layout is [batch, ..., length, head_dim], so leave it out.",
    "inplace": "arrays do not change in place, so leave it out.",
}

_QUANTIZED = {
    "input": "x",
    "lhs": "x",
    "a": "x",
    "weight": "w",
    "wq": "w",
    "w_q": "w",
    "qweight": "w",
    "scale": "scales",
    "zeros": "biases",
    "qzeros": "biases",
    "zero_points": "biases, added after the scaling: -scale * zero_point.",
    "bias": "biases, those of the quantized groups; add a layer's bias to the result.",
    "groupsize": "group_size",
    "block_size": "group_size",
    "nbits": "bits",
    "num_bits": "bits",
    "dtype": "the result has the promoted dtype of x, scales and biases.",
}

_GATHER = {
    "indices": "rhs_indices",
    "expert_ids": "rhs_indices",
    "topk_ids": "rhs_indices",
    "expert_indices": "rhs_indices",
    "group_sizes": "rhs_indices, an id per row; mx.repeat(mx.arange(E), group_sizes) makes them.",
    "global_scale": "nvfp4 has no global scale here; multiply the result by it.",
}

_ACTIVATION = {"approximate": "activation='gelu_tanh'", "act": "activation", "hidden_act": "activation"}
_SWIGLU = {
    "w_gate": "gate",
    "w_up": "up",
    "gate_proj": "gate",
    "up_proj": "up",
    "w1": "gate",
    "w3": "up",
    "w": "gate and up: each a tuple (w, scales, biases).",
    "scales": "gate and up: each a tuple (w, scales, biases).",
    "biases": "gate and up: each a tuple (w, scales, biases).",
}

_EXPERTS = {
    "indices": "ids",
    "topk_ids": "ids",
    "topk_idx": "ids",
    "topk_weights": "weights",
    "scores": "weights",
    "w2": "down",
    "down_proj": "down",
    "w13": "gate and up: two tuples.",
    "gate_up_proj": "gate and up: two tuples.",
    "swiglu_limit": "limit",
    "b1": "gate_bias",
    "b2": "down_bias",
    "num_experts": "the matrices have it; leave it out.",
}

_ROUTER = {
    "input": "logits",
    "x": "logits",
    "scores": "logits",
    "router_logits": "logits",
    "gating_output": "logits",
    "renormalize": "norm",
    "norm_topk_prob": "norm",
    "normalize": "norm",
    "score_function": "scoring",
    "scoring_func": "scoring",
    "correction_bias": "e_score_correction_bias",
    "expert_bias": "e_score_correction_bias",
    "bias": "e_score_correction_bias",
    "num_expert_group": "n_group",
    "n_groups": "n_group",
    "route_scale": "routed_scaling_factor",
    "topk_method": "group_scoring='max' is DeepSeek-V2's group_limited_greedy, 'top2' is DeepSeek-V3's noaux_tc.",
    "largest": "the largest are chosen.",
}

_PERMUTED = {
    "hidden_states": "x",
    "input": "x",
    "inp": "x",
    "tokens": "x",
    "indices": "ids",
    "inds": "ids",
    "topk_ids": "ids",
    "topk_idx": "ids",
    "routing_map": "ids, the k experts of each token.",
    "E": "num_experts",
    "n_experts": "num_experts",
    "num_local_experts": "num_experts",
    "scores": "weights",
    "probs": "weights",
    "topk_weights": "weights",
    "merging_probs": "weights",
    "inv_order": "inverse",
    "inverse_order": "inverse",
    "row_id_map": "inverse",
    "shared_output": "shared",
    "gate": "shared_gate",
}

_LAYER = {
    "hidden_size": "dims",
    "dim": "dims",
    "d_model": "dims",
    "normalized_shape": "dims",
    "in_features": "dims",
    "elementwise_affine": "affine",
    "epsilon": "eps",
    "variance_epsilon": "eps",
    "offset": "weight_offset",
    "device": "arrays have no device, so leave it out.",
    "dtype": "the parameters are float32; module.set_dtype() converts them.",
}

_MLP = {
    "intermediate_size": "hidden_dims",
    "hidden_features": "hidden_dims",
    "hidden_dim": "hidden_dims",
    "hidden_act": "the activation is SiLU, so leave it out.",
    "mlp_bias": "bias",
    "use_bias": "bias",
}

_SWITCH = {"in_features": "input_dims", "out_features": "output_dims", "use_bias": "bias"}
_SWITCH |= {"n_experts": "num_experts", "num_local_experts": "num_experts"}

_X = {"input": "x", "hidden_states": "x", "inputs": "x"}
_IDS = {"input": "x", "input_ids": "x", "ids": "x", "indices": "x"}
_IDS_OF_EXPERTS = {"indices": "ids", "topk_ids": "ids", "sorted_indices": "ids in any order are sorted if it pays."}
_OF_CONSTRUCTOR = "an argument of the constructor."
_NORM_CALL = _X | {"R": "residual", "x1": "residual", "z": "gate", "prenorm": _NORM["prenorm"]}
_NORM_CALL |= dict.fromkeys(("eps", "weight", "bias", "weight_offset"), _OF_CONSTRUCTOR)
_ROPE_CALL = {name: ours for name, ours in _ROPE.items() if ours in ("x", "offset", _POSITION, _ANGLES)}
_ROPE_CALL |= dict.fromkeys(("dims", "traditional", "base", "scale"), _OF_CONSTRUCTOR)

_FORMAT = {"groupsize": "group_size", "nbits": "bits", "num_bits": "bits"}

_MLA = {
    name: ours
    for name, ours in _ATTENTION.items()
    if ours in ("mask", "mask='causal'", "scale", "lengths", "softcap", "sinks", "return_lse=True")
}
_MLA |= {
    # FlashMLA, FlashInfer, vLLM
    "q_pe": "q_rope",
    "q": "give the two parts of q as q_nope and q_rope.",
    "ckv_cache": "latent",
    "kpe_cache": "k_rope",
    "kv_latent": "latent",
    "kv_c": "latent",
    "k_pe": "k_rope",
    "k_cache": "give the two parts of the cache as latent and k_rope.",
    "kv_cache": "give the two parts of the cache as latent and k_rope.",
    "kv_len_arr": "lengths",
    "head_dim_v": _NO_NEED,
    "return_softmax_lse": "return_lse=True",
}

_SCAN = {
    # mamba.py, Transformers, mlx-lm
    "initial_state": "state",
    "ssm_state": "state",
    "hidden_states": "x",
    "A_log": "A=-mx.exp(A_log)",
    "gate": "z",
    "mask": "give the valid steps of each batch as lengths.",
}

_SELECTIVE_SCAN = {
    # mamba-ssm
    **_SCAN,
    "u": "x",
    "delta": "dt",
    "delta_bias": "add it to dt.",
    "dt_bias": "add it to dt.",
    "delta_softplus": "dt_softplus",
    "return_last_state": "the last state is always returned, so leave it out.",
}

_SSD_SCAN = {
    # mamba-ssm, Transformers, mlx-lm
    **_SCAN,
    "initial_states": "state",
    "time_step_limit": "dt_limit",
    "time_step_bias": "dt_bias",
    "seq_lens": "lengths",
    "chunk_size": _NO_NEED,
    "return_final_states": "the last state is always returned, so leave it out.",
}

_CONV = {
    # causal-conv1d, flash-linear-attention, PyTorch
    "input": "x",
    "hidden_states": "x",
    "w": "weight",
    "conv_state": "state",
    "cache": "state",
    "initial_states": "state",
    "initial_state": "state",
    "return_final_states": "the new state is always returned, so leave it out.",
    "output_final_state": "the new state is always returned, so leave it out.",
    "act": "activation",
    "seq_lens": "lengths",
    "cache_seqlens": "lengths",
    "groups": "every channel is convolved by itself, so leave it out.",
    "padding": "the state comes before x, and zeros without one, so leave it out.",
    "stride": "every row has an output, so leave it out.",
    "dilation": "there is no dilation, so leave it out.",
}

_DELTA = {
    # flash-linear-attention, mlx-lm
    "query": "q",
    "key": "k",
    "value": "v",
    "queries": "q",
    "keys": "k",
    "values": "v",
    "initial_state": "state",
    "recurrent_state": "state",
    "scale": "multiply q by it; normalize_eps folds Dk**-0.5 in.",
    "use_qk_l2norm_in_kernel": "normalize_eps=1e-6",
    "output_final_state": "the last state is always returned, so leave it out.",
    "mask": "padding is given by lengths.",
    "b": "beta",
    "decay": "g",
    "gk": "g",
    "seq_lens": "lengths",
}

NAMES: Mapping[str, Mapping[str, str]] = {
    "flash_attention": _ATTENTION | _STREAM,
    "mla_decode": _MLA | _STREAM,
    "gated_delta": _DELTA | _STREAM,
    "gated_delta_gates": {**_STREAM, "g": "a", "beta": "b", "alpha": "a", "a_log": "A_log", "bias": "dt_bias"},
    "silu_gate": _GATE | _STREAM,
    "gated": _GATE | _ACTIVATION | _STREAM,
    "sigmoid_gate": _OUTPUT_GATE | _STREAM,
    "causal_conv1d": _CONV | _STREAM,
    "rms_norm": {**_NORM, **_STREAM, "bias": "an RMS norm has no bias; add it to the result."},
    "layer_norm": {**_NORM, **_STREAM, "B": "bias", "beta": "bias"},
    "rope": _ROPE | _STREAM,
    "rope_qk": {**_ROPE, **_STREAM, "query": "q", "key": "k", "queries": "q", "keys": "k"},
    "rope_and_cache": {
        **_ROPE,
        **_STREAM,
        **{"query": "q", "key": "k", "value": "v", "queries": "q", "keys": "k", "values": "v", "qkv": "q"},
        **{"key_cache": "k_cache", "value_cache": "v_cache", "cache_seqlens": "offset"},
    },
    "kv_append": {
        **_STREAM,
        **{"key": "k", "value": "v", "keys": "k", "values": "v"},
        **{"key_cache": "cache_k", "value_cache": "cache_v", "k_cache": "cache_k", "v_cache": "cache_v"},
        **{"slot_mapping": "slots", "cache_seqlens": "offset"},
        **{"group_size": "kv_group_size", "bits": "kv_bits", "mode": "kv_mode"},
    },
    "quantized_matmul": _QUANTIZED | _STREAM,
    "quantized_gemv": _QUANTIZED | _STREAM,
    "gather_quantized_matmul": _QUANTIZED | _GATHER | _STREAM,
    "gather_matmul": {**_GATHER, **_STREAM, "x": "a", "lhs": "a", "input": "a", "w": "b", "rhs": "b", "weight": "b"},
    "quantized_swiglu": _QUANTIZED | _SWIGLU | _ACTIVATION | _STREAM,
    "quantized_embedding": {**_QUANTIZED, **_STREAM, "indices": "ids", "input": "ids", "input_ids": "ids", "x": "ids"},
    "quantized_argmax": _QUANTIZED | _STREAM | {"keepdims": _NO_NEED, "axis": _NO_NEED},
    "quantized_topk": _QUANTIZED | _TOP_K | _STREAM,
    "quantized_experts": _QUANTIZED | _SWIGLU | _EXPERTS | _ACTIVATION | _STREAM,
    "selective_scan": _SELECTIVE_SCAN | _STREAM,
    "ssd_scan": _SSD_SCAN | _STREAM,
    "softmax_topk": _ROUTER | _TOP_K | _STREAM,
    "moe_permute": _PERMUTED | _STREAM,
    "moe_combine": {**_PERMUTED, **_STREAM, "x": "y", "input": "y", "hidden_states": "y", "permuted_tokens": "y"},
    "SwiGLU": _LAYER | _MLP,
    "QuantizedSwiGLU": _LAYER | _MLP | _FORMAT | {"bias": "the projections have no bias, so leave it out."},
    "SwitchLinear": _SWITCH,
    "QuantizedSwitchLinear": _FORMAT | _SWITCH,
    "SwitchGLU": {**_LAYER, **_MLP, **_SWITCH, "hidden_act": "activation", "swiglu_limit": "limit"},
    "RMSNorm": _LAYER,
    "LayerNorm": _LAYER,
    "RoPE": {**_ROPE, "dim": "dims", "freqs": "this layer has a base only; mlx_anvil.rope() takes freqs."},
    "QuantizedLinear": _FORMAT | {"in_features": "input_dims", "out_features": "output_dims", "use_bias": "bias"},
    "QuantizedEmbedding": _FORMAT | {"vocab_size": "num_embeddings", "embedding_dim": "dims", "hidden_size": "dims"},
    # Calls of modules.
    "SwiGLU.__call__": _X,
    "QuantizedSwiGLU.__call__": _X,
    "SwitchLinear.__call__": _X | _IDS_OF_EXPERTS,
    "QuantizedSwitchLinear.__call__": _X | _IDS_OF_EXPERTS,
    "SwitchGLU.__call__": {**_X, **_IDS_OF_EXPERTS, "scores": "weights", "topk_weights": "weights"},
    "RMSNorm.__call__": _NORM_CALL,
    "LayerNorm.__call__": _NORM_CALL,
    "RoPE.__call__": _ROPE_CALL,
    "QuantizedLinear.__call__": _X,
    "QuantizedEmbedding.__call__": _IDS,
    "QuantizedEmbedding.as_linear": _X,
}


def converted(kind: str, name: str) -> str:
    """How an array of another library, of type ``kind``, becomes one of MLX's; empty if it is none."""
    library = kind.partition(".")[0]
    if library == "torch":
        return f"mlx.core.array({name}.detach().cpu().numpy())"
    if library == "jax" or library == "jaxlib":
        return f"mlx.core.array(numpy.asarray({name}))"
    return f"mlx.core.array({name})" if library == "numpy" or kind in ("list", "tuple") else ""
