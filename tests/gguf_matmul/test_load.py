"""`mlx_anvil.lm.load_gguf`: models of every architecture, against mlx-lm's models with the dequantised weights."""

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from gguf_blocks import BLOCKS, MODES, GgufMatrix, gguf, type_of
from mlx_anvil import lm
from mlx_anvil._gguf_layers import BLOCKS as LAYER_BLOCKS
from support import max_error

pytest.importorskip("mlx_lm")

pytestmark = pytest.mark.cpu_only

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 256, 4, 2, 128, 512, 96
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
TOKENS = mx.array([[3, 14, 15, 92, 65, 35, 89, 79]])


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which converters write the queries and keys of Llama."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class File:
    """A GGUF file of random weights, and the weights that mlx-lm's model would have."""

    def __init__(
        self,
        path: Path,
        architecture: str,
        rng: np.random.Generator,
        *,
        head: bool,
        modes: tuple[str, ...],
        rows: int = VOCABULARY,
    ) -> None:
        self.path, self.architecture, self.rng = path, architecture, rng
        self.modes = modes
        self.weights: dict[str, mx.array] = {}
        self.writer = writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(2048)
        writer.add_embedding_length(HIDDEN)
        self.layers = 7 if architecture == "gemma3" else 2  # the sixth sees everything
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(MLP)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(50000.0)
        self.head_dim = HIDDEN // HEADS if architecture == "qwen2" else HEAD_DIM
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        if architecture == "gemma2":
            writer.add_attn_logit_softcapping(40.0)
            writer.add_final_logit_softcapping(20.0)
        if architecture == "gemma3":
            writer.add_sliding_window(4)
        self._add_tensors(head, rows)

    def _add_tensors(self, head: bool, vocabulary: int) -> None:
        self.matrix("token_embd", "model.embed_tokens", vocabulary, HIDDEN, scale=2e-3)
        width, kv_width = HEADS * self.head_dim, KV_HEADS * self.head_dim
        sandwich = self.architecture in ("gemma2", "gemma3")
        for i in range(self.layers):
            file, model = f"blk.{i}.", f"model.layers.{i}."
            self.norm(file + "attn_norm", model + "input_layernorm", HIDDEN)
            self.matrix(file + "attn_q", model + "self_attn.q_proj", width, HIDDEN, heads=HEADS)
            self.matrix(file + "attn_k", model + "self_attn.k_proj", kv_width, HIDDEN, heads=KV_HEADS)
            self.matrix(file + "attn_v", model + "self_attn.v_proj", kv_width, HIDDEN)
            self.matrix(file + "attn_output", model + "self_attn.o_proj", HIDDEN, width)
            if self.architecture == "qwen2":
                for side, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
                    self.floats(f"{file}attn_{side}.bias", f"{model}self_attn.{side}_proj.bias", rows)
            if self.architecture in ("qwen3", "gemma3"):
                self.norm(file + "attn_q_norm", model + "self_attn.q_norm", self.head_dim)
                self.norm(file + "attn_k_norm", model + "self_attn.k_norm", self.head_dim)
            if sandwich:
                self.norm(file + "post_attention_norm", model + "post_attention_layernorm", HIDDEN)
                self.norm(file + "post_ffw_norm", model + "post_feedforward_layernorm", HIDDEN)
            before = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
            self.norm(file + "ffn_norm", model + before, HIDDEN)
            self.matrix(file + "ffn_gate", model + "mlp.gate_proj", MLP, HIDDEN)
            self.matrix(file + "ffn_up", model + "mlp.up_proj", MLP, HIDDEN)
            self.matrix(file + "ffn_down", model + "mlp.down_proj", HIDDEN, MLP)
        self.norm("output_norm", "model.norm", HIDDEN)
        if head:
            self.matrix("output", "lm_head", vocabulary, HIDDEN)

    def matrix(self, tensor: str, name: str, rows: int, columns: int, heads: int = 0, scale: float = 1.0) -> None:
        mode = self.modes[len(self.weights) % len(self.modes)]
        if mode in BLOCKS:
            spread = {"q4_0": 5, "q8_0": 74, "q4_k": 700, "q5_k": 1400, "q6_k": 1400, "iq4_nl": 70, "iq4_xs": 1400}
            of_block = scale * columns**-0.5 / spread[mode] * (50 if tensor == "token_embd" else 1)
            matrix = GgufMatrix.random(self.rng, mode, rows, columns, scale=of_block)
            self.writer.add_tensor(f"{tensor}.weight", np.array(matrix.w), raw_dtype=type_of(mode))
            weights = matrix.weights
        else:
            weights = self.rng.standard_normal((rows, columns)).astype(np.float32) * columns**-0.5
            kind = gguf.GGMLQuantizationType[mode]
            data = gguf.quants.quantize(weights, kind)
            self.writer.add_tensor(f"{tensor}.weight", data, raw_dtype=kind)
            weights = gguf.quants.dequantize(data, kind)
        if self.architecture == "llama" and heads:
            order = interleaved(np.arange(rows), heads)
            plain = np.empty_like(weights)
            plain[order] = weights
            weights = plain
        self.weights[f"{name}.weight"] = mx.array(weights)

    def norm(self, tensor: str, name: str, size: int) -> None:
        weights = 1 + 0.1 * self.rng.standard_normal(size).astype(np.float32)
        self.writer.add_tensor(f"{tensor}.weight", weights)
        self.weights[f"{name}.weight"] = mx.array(weights - self.architecture.startswith("gemma"))

    def floats(self, tensor: str, name: str, size: int) -> None:
        values = self.rng.standard_normal(size).astype(np.float32)
        self.writer.add_tensor(tensor, values)
        self.weights[name] = mx.array(values)

    def close(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path

    def reference(self, **changes: Any) -> Any:
        """mlx-lm's model with the same weights, in float32."""
        kind = "gemma3_text" if self.architecture == "gemma3" else self.architecture
        module = importlib.import_module(f"mlx_lm.models.{kind}")
        config = {
            "model_type": kind,
            "hidden_size": HIDDEN,
            "num_hidden_layers": self.layers,
            "intermediate_size": MLP,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCABULARY,
            "rope_theta": 50000.0,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": "lm_head.weight" not in self.weights,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": 4,
        }
        model = module.Model(module.ModelArgs.from_dict(config | changes))
        weights = model.sanitize(dict(self.weights)) if kind == "gemma3_text" else self.weights
        model.load_weights(list(weights.items()))
        return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits(architecture, tmp_path, rng):
    file = File(tmp_path / "model.gguf", architecture, rng, head=architecture[:5] == "llama", modes=MODES)
    model, tokenizer = lm.load_gguf(file.close(), dtype=mx.float32)
    assert tokenizer is None
    exact = file.reference()(TOKENS)
    assert max_error(model(TOKENS), exact) < 1e-4
    layer = model.model.layers[0].mlp.gate_proj
    assert type(layer) is mlx_anvil.nn.GgufLinear
    assert layer.weight.dtype == mx.uint8
    assert type(model.model.embed_tokens) is mlx_anvil.nn.GgufEmbedding
    mlx_anvil.patch(model)
    assert max_error(model(TOKENS), exact) < 1e-4


def test_floats(tmp_path, rng):
    file = File(tmp_path / "model.gguf", "qwen3", rng, head=True, modes=("F32", "BF16", "q6_k", "F16"))
    model, _ = lm.load_gguf(str(file.close()), dtype=mx.float32)
    assert max_error(model(TOKENS), file.reference()(TOKENS)) < 1e-4


def test_dtype_and_activation_bits(tmp_path, rng):
    file = File(tmp_path / "model.gguf", "llama", rng, head=False, modes=("q4_k", "q6_k"))
    model, _ = lm.load_gguf(file.close(), activation_bits=8)
    logits = model(TOKENS)
    assert logits.dtype == mx.bfloat16
    assert model.model.layers[0].self_attn.q_proj.activation_bits == 8
    assert max_error(logits.astype(mx.float32), file.reference()(TOKENS)) < 0.1


def test_factors_of_rope(tmp_path, rng):
    """Llama 3.1's scaling is a tensor of the file."""
    file = File(tmp_path / "model.gguf", "llama", rng, head=True, modes=("q8_0",))
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}
    reference = file.reference(rope_scaling=scaling)
    plain = 50000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = np.array(reference.model.layers[0].self_attn.rope._freqs) / plain
    assert factors.max() > 7
    file.writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    model, _ = lm.load_gguf(file.close(), dtype=mx.float32)
    assert max_error(model(TOKENS), reference(TOKENS)) < 1e-4


def test_linear_scaling(tmp_path, rng):
    file = File(tmp_path / "model.gguf", "gemma3", rng, head=False, modes=("q4_0",))
    file.writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    file.writer.add_rope_scaling_factor(8.0)
    model, _ = lm.load_gguf(file.close(), dtype=mx.float32)
    reference = file.reference(rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert max_error(model(TOKENS), reference(TOKENS)) < 1e-4


def test_generation(tmp_path, rng):
    from mlx_lm.generate import generate_step

    file = File(tmp_path / "model.gguf", "qwen2", rng, head=False, modes=("q5_k", "q8_0"))
    model, _ = lm.load_gguf(file.close(), dtype=mx.float32)
    tokens = [[int(t) for t, _ in generate_step(TOKENS[0], m, max_tokens=6)] for m in (model, file.reference())]
    assert len(tokens[0]) == 6
    assert tokens[0] == tokens[1]


def test_other_types(tmp_path, rng):
    file = File(tmp_path / "model.gguf", "llama", rng, head=False, modes=("Q4_1",))
    with pytest.raises(ValueError, match=r"^\[load_gguf\] the file has tensors of type Q4_1 \(.*, such as .*allowed: "):
        lm.load_gguf(file.close())


def test_other_architectures(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"general.architecture is 'mamba'; allowed: 'llama', "):
        lm.load_gguf(tmp_path / "model.gguf")


def test_superfluous_tensors(tmp_path, rng):
    file = File(tmp_path / "model.gguf", "llama", rng, head=False, modes=("q8_0",))
    file.writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"llama has no place for blk\.0\.attn_sinks\.weight"):
        lm.load_gguf(file.close())


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="dtype is"):
        lm.load_gguf(tmp_path / "model.gguf", dtype=mx.int32)
    with pytest.raises(ValueError, match="activation_bits is 4"):
        lm.load_gguf(tmp_path / "model.gguf", activation_bits=4)
    with pytest.raises(FileNotFoundError):
        lm.load_gguf(tmp_path / "model.gguf")


def test_layers_know_the_blocks():
    assert {mode: (columns, size) for mode, (size, columns, _) in BLOCKS.items()} == LAYER_BLOCKS
    with pytest.raises(ValueError, match=r"^\[GgufLinear\] 100 columns; allowed in mode 'q4_k': a multiple of 256"):
        mlx_anvil.nn.GgufLinear(100, 8)
    with pytest.raises(ValueError, match=r"^\[GgufEmbedding\] mode is 'q2_k'; allowed: 'q4_0', "):
        mlx_anvil.nn.GgufEmbedding(8, 256, mode="q2_k")


# ---- tokenizers ---------------------------------------------------------------------------------

TEXTS = ("Hello, world!", "It's 12345 o'clock\n\n  in  Zürich — 你好", "", "  two  spaces ", "a<|end|>b")
CORPUS = ("the quick brown fox jumps over the lazy dog. it's 2024, isn't it? " * 3, "Hello hello world 你好 Zürich")


def load_with_vocabulary(path: Path, rng: np.random.Generator, vocabulary: dict[str, int], **fields: Any) -> Any:
    """The tokenizer of a model whose file has these tokens."""
    file = File(path / "model.gguf", "llama", rng, head=False, modes=("q8_0",), rows=len(vocabulary))
    for name, value in fields.items():
        getattr(file.writer, f"add_{name}")(value)
    file.writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    return lm.load_gguf(file.close())[1]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_vocabulary_of_bytes(pre, tmp_path, rng):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    pattern = {
        "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    }[pre]
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    plain.train_from_iterator(CORPUS, trainer)
    vocabulary = plain.get_vocab()
    end = vocabulary["<|end|>"]
    merges = json.loads(plain.to_str())["model"]["merges"]
    ours = load_with_vocabulary(
        tmp_path,
        rng,
        vocabulary,
        tokenizer_model="gpt2",
        tokenizer_pre=pre,
        token_merges=[" ".join(merge) for merge in merges],
        token_types=[3 if i == end else 1 for i in range(len(vocabulary))],
        eos_token_id=end,
        chat_template="{{ messages[0]['content'] }}!",
    )
    for text in TEXTS:
        assert ours.encode(text) == plain.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_token_ids == {end}
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_vocabulary_of_sentencepiece(tmp_path, rng):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merged = ["▁t", "he", "▁the", "ll", "▁he", "llo", "▁hello"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    scores = [0.0] * len(pieces) + [-float(i) for i in range(len(merged))] + [-1e6 - i for i in range(len(letters))]
    vocabulary = {token: i for i, token in enumerate([*pieces, *merged, *letters])}
    ours = load_with_vocabulary(
        tmp_path,
        rng,
        vocabulary,
        tokenizer_model="llama",
        token_scores=scores,
        token_types=[2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(letters))],
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
    )
    assert ours.convert_ids_to_tokens(ours.encode("hello the otter")) == [
        *("<s>", "▁hello", "▁the", "▁", "o", "t", "t", "e", "r")
    ]
    ids = ours.encode("hello Zü")
    assert ours.convert_ids_to_tokens(ids)[-3:] == ["<0x5A>", "<0xC3>", "<0xBC>"]
    assert ours.decode(ids, skip_special_tokens=True) == "hello Zü"


def test_other_vocabularies(tmp_path, rng):
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model is 'bert'; allowed: 'gpt2', 'llama', or tokenizer=F"):
        load_with_vocabulary(tmp_path, rng, {"a": 0, "b": 1}, tokenizer_model="bert")
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre is 'viking'; allowed: 'llama-bpe', "):
        load_with_vocabulary(tmp_path, rng, {"a": 0, "b": 1}, tokenizer_model="gpt2", tokenizer_pre="viking")
