"""What a GGUF file of a model says, in the terms of mlx-lm: its configuration and the names of its tensors."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Metadata = Mapping[str, Any]

# By GGUF's architecture, mlx-lm's module and model_type.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
# Gemma 2 and 3 have a norm before and after the MLP.
_OF_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"


def name_of(tensor: str, architecture: str) -> str | None:
    """mlx-lm's name of a tensor; None if its models have no such parameter."""
    stem, _, end = tensor.rpartition(".")
    if found := _LAYER.fullmatch(stem):
        names = _OF_LAYER | (_OF_SANDWICH if architecture in ("gemma2", "gemma3") else {})
        name = names.get(found[2])
        return name and f"model.layers.{found[1]}.{name}.{end}"
    name = _WHOLE.get(stem)
    return name and f"{name}.{end}"


def heads_to_permute(name: str, config: Mapping[str, Any]) -> int:
    """The number of heads in whose rows the file pairs neighbours for RoPE, where mlx-lm pairs halves; 0 if none.

    Files of Llama have queries and keys in that order.
    """
    if config["model_type"] != "llama":
        return 0
    layer = name.rpartition(".")[0]
    if layer.endswith(".q_proj"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if layer.endswith(".k_proj") else 0


def stores_one_more(name: str, config: Mapping[str, Any]) -> bool:
    """Whether the file has 1 + the weight of this norm: Gemma's norms multiply by that."""
    return str(config["model_type"]).startswith("gemma") and name.endswith("norm.weight")


@dataclass(frozen=True)
class _Fields:
    """The metadata of one architecture."""

    metadata: Metadata
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"[load_gguf] the file has no {self.architecture}.{key}.")
        return value

    def head_dim(self) -> int:
        dim = self.get("attention.key_length") or self.get("rope.dimension_count")
        return int(dim or self.need("embedding_length") // self.need("attention.head_count"))

    def linear_scaling(self) -> dict[str, Any] | None:
        kind = self.get("rope.scaling.type", "none")
        factor = self.get("rope.scaling.factor")
        if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
            return None
        if kind == "linear":
            return {"type": "linear", "rope_type": "linear", "factor": float(factor)}
        raise ValueError(f"[load_gguf] rope.scaling.type is {kind!r}; allowed: 'none', 'linear'.")

    def attention_scalar(self, layers_of_27b: int) -> float:
        """The number whose inverse square root scales the scores. Files do not have it; it is that of the heads, but
        for the models of 27 billion parameters."""
        if self.need("block_count") == layers_of_27b:
            return float(self.need("embedding_length") / self.need("attention.head_count"))
        return float(self.head_dim())


def _llama(fields: _Fields) -> dict[str, Any]:
    return {"head_dim": fields.head_dim(), "rope_scaling": fields.linear_scaling()}


def _qwen2(fields: _Fields) -> dict[str, Any]:
    return {"rope_scaling": fields.linear_scaling()}


def _gemma(fields: _Fields) -> dict[str, Any]:
    return {"head_dim": fields.head_dim()}


def _gemma2(fields: _Fields) -> dict[str, Any]:
    return {
        "head_dim": fields.head_dim(),
        "attn_logit_softcapping": float(fields.get("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(fields.get("final_logit_softcapping", 30.0)),
        "query_pre_attn_scalar": fields.attention_scalar(layers_of_27b=46),
    }


def _gemma3(fields: _Fields) -> dict[str, Any]:
    return {
        "head_dim": fields.head_dim(),
        "query_pre_attn_scalar": fields.attention_scalar(layers_of_27b=62),
        "sliding_window": int(fields.get("attention.sliding_window", 1024)),
        "rope_scaling": fields.linear_scaling(),
        "rope_theta": float(fields.get("rope.freq_base", 1e6)),
    }


_OWN: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _llama,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}


def config_of(metadata: Metadata, vocabulary: int, has_head: bool) -> dict[str, Any]:
    """The configuration of mlx-lm's model, as ``config.json`` would have it."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        allowed = ", ".join(map(repr, ARCHITECTURES))
        raise ValueError(f"[load_gguf] general.architecture is {architecture!r}; allowed: {allowed}.")
    fields = _Fields(metadata, architecture)
    if fields.get("expert_count"):
        raise ValueError("[load_gguf] the model has experts; allowed: models without.")
    heads = int(fields.need("attention.head_count"))
    return {
        "model_type": ARCHITECTURES[architecture],
        "hidden_size": int(fields.need("embedding_length")),
        "num_hidden_layers": int(fields.need("block_count")),
        "intermediate_size": int(fields.need("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("attention.head_count_kv") or heads),
        "rms_norm_eps": float(fields.need("attention.layer_norm_rms_epsilon")),
        "vocab_size": vocabulary,
        "max_position_embeddings": int(fields.get("context_length", 32768)),
        "rope_theta": float(fields.get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": not has_head,
    } | _OWN[architecture](fields)
