"""GGUF files of a Llama or a Qwen3-MoE of any shape with random weights. Needs the package gguf (extra ``bench``)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlx_anvil._extras import missing
from mlx_anvil.bench.model import LlamaShape

try:
    import gguf
    import numpy as np
except ModuleNotFoundError as error:
    raise missing(error, "bench") from None

# By type: where a block's float16 scales are, and the deviation of weights with a scale of 1 if all other bytes are
# random. Q4_0 has 4.5 bits a weight, as MLX's groups of 64 have with their scale and bias in 16 bits.
TYPES = {
    "Q4_0": ((0,), 4.6),
    "Q8_0": ((0,), 74.0),
    "Q4_K": ((0, 2), 340.0),
    "Q5_K": ((0, 2), 680.0),
    "Q6_K": ((208,), 1370.0),
    "IQ4_NL": ((0,), 65.0),
    "IQ4_XS": ((0,), 1200.0),
}
TypeOf = Callable[[str], str]


def always_q4_0(name: str) -> str:
    """The type of every matrix."""
    return "Q4_0"


@dataclass(frozen=True)
class MoeShape:
    """Sizes of a Qwen3-MoE whose attention is as small as it can be, so that its time is that of the experts."""

    hidden: int
    layers: int
    experts: int
    chosen: int
    expert_hidden: int
    heads: int = 1
    head_dim: int = 64
    vocabulary: int = 256


class _Writer:
    """A file of one architecture, without a vocabulary: tokens are numbers here."""

    def __init__(self, path: Path, architecture: str, type_of: TypeOf = always_q4_0) -> None:
        self._type_of = type_of
        self._rng = np.random.default_rng()
        self.file = gguf.GGUFWriter(path, architecture)
        self.file.add_context_length(4096)
        self.file.add_layer_norm_rms_eps(1e-5)
        self.file.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
        self.file.add_tokenizer_model("no_vocab")

    def matrix(self, name: str, *shape: int) -> None:
        """[outputs, inputs], or as many of them as there are experts in front."""
        kind = gguf.GGMLQuantizationType[self._type_of(name)]
        halves, deviation = TYPES[kind.name]
        columns, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = self._rng.integers(0, 256, (*shape[:-1], shape[-1] // columns, size), np.uint8)
        for at in halves:
            scales = self._rng.uniform(0.5, 1.5, blocks.shape[:-1]) * (shape[-1] ** -0.5 / deviation)
            blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
        self.file.add_tensor(f"{name}.weight", blocks.reshape(*shape[:-1], -1), raw_dtype=kind)

    def norm(self, name: str, size: int) -> None:
        self.file.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    def router(self, name: str, experts: int, inputs: int) -> None:
        values = self._rng.standard_normal((experts, inputs)) * inputs**-0.5
        self.file.add_tensor(f"{name}.weight", values.astype(np.float32))

    def ends(self, hidden: int, vocabulary: int) -> None:
        """The embedding, the last norm and the head."""
        self.file.add_vocab_size(vocabulary)
        self.matrix("token_embd", vocabulary, hidden)
        self.norm("output_norm", hidden)
        self.matrix("output", vocabulary, hidden)

    def attention(self, block: str, hidden: int, width: int, kv_width: int) -> None:
        self.norm(f"{block}.attn_norm", hidden)
        self.matrix(f"{block}.attn_q", width, hidden)
        self.matrix(f"{block}.attn_k", kv_width, hidden)
        self.matrix(f"{block}.attn_v", kv_width, hidden)
        self.matrix(f"{block}.attn_output", hidden, width)

    def close(self) -> None:
        """Writes what was added."""
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def write(path: Path, shape: LlamaShape, type_of: TypeOf = always_q4_0) -> None:
    """Writes a Llama. ``type_of`` says the type of a matrix by its name in the file."""
    writer = _Writer(path, "llama", type_of)
    file = writer.file
    file.add_block_count(shape.layers)
    file.add_embedding_length(shape.hidden)
    file.add_feed_forward_length(shape.intermediate)
    file.add_head_count(shape.heads)
    file.add_head_count_kv(shape.kv_heads)
    file.add_rope_dimension_count(shape.hidden // shape.heads)
    kv_width = shape.hidden // shape.heads * shape.kv_heads
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        writer.attention(block, shape.hidden, shape.hidden, kv_width)
        writer.norm(f"{block}.ffn_norm", shape.hidden)
        writer.matrix(f"{block}.ffn_gate", shape.intermediate, shape.hidden)
        writer.matrix(f"{block}.ffn_up", shape.intermediate, shape.hidden)
        writer.matrix(f"{block}.ffn_down", shape.hidden, shape.intermediate)
    writer.ends(shape.hidden, shape.vocabulary)
    writer.close()


def write_experts(path: Path, shape: MoeShape) -> None:
    """Writes a Qwen3-MoE."""
    writer = _Writer(path, "qwen3moe")
    file, hidden, width = writer.file, shape.hidden, shape.heads * shape.head_dim
    file.add_block_count(shape.layers)
    file.add_embedding_length(hidden)
    file.add_feed_forward_length(shape.expert_hidden)
    file.add_head_count(shape.heads)
    file.add_head_count_kv(shape.heads)
    file.add_key_length(shape.head_dim)
    file.add_value_length(shape.head_dim)
    file.add_rope_dimension_count(shape.head_dim)
    file.add_rope_freq_base(1e6)
    file.add_expert_count(shape.experts)
    file.add_expert_used_count(shape.chosen)
    file.add_expert_feed_forward_length(shape.expert_hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        writer.attention(block, hidden, width, width)
        writer.norm(f"{block}.attn_q_norm", shape.head_dim)
        writer.norm(f"{block}.attn_k_norm", shape.head_dim)
        writer.norm(f"{block}.ffn_norm", hidden)
        writer.router(f"{block}.ffn_gate_inp", shape.experts, hidden)
        writer.matrix(f"{block}.ffn_gate_exps", shape.experts, shape.expert_hidden, hidden)
        writer.matrix(f"{block}.ffn_up_exps", shape.experts, shape.expert_hidden, hidden)
        writer.matrix(f"{block}.ffn_down_exps", shape.experts, hidden, shape.expert_hidden)
    writer.ends(hidden, shape.vocabulary)
    writer.close()
