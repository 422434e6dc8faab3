"""llama.cpp as a contestant: a GGUF file of a Llama or a Qwen3-MoE of any shape with random Q4_0 weights, and its steps.

Needs the packages gguf and llama-cpp-python (extra ``bench``). It runs in a separate process: if one process has more
OpenMP threads than cores, as with the thread teams of two libraries, libgomp puts waiting threads to sleep early, and
both libraries become slow.
"""

import ctypes
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_anvil._extras import missing
from mlx_anvil.bench.model import LlamaShape

try:
    import gguf
    import llama_cpp
    import numpy as np
except ModuleNotFoundError as error:
    if __name__ != "__main__":  # who imports this goes on without llama.cpp
        raise
    raise missing(error, "bench") from None

# Q4_0: blocks of 32 weights, a float16 scale and 32 codes of 4 bits; 4.5 bits a weight, as MLX's groups of 64 have with
# their scale and bias in 16 bits.
BLOCK, BLOCK_BYTES = 32, 18
CODE_DEVIATION = 4.6


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

    def __init__(self, path: Path, architecture: str) -> None:
        self._rng = np.random.default_rng()
        self.file = gguf.GGUFWriter(path, architecture)
        self.file.add_context_length(4096)
        self.file.add_layer_norm_rms_eps(1e-5)
        self.file.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
        self.file.add_tokenizer_model("no_vocab")

    def matrix(self, name: str, *shape: int) -> None:
        """[outputs, inputs], or as many of them as there are experts in front."""
        inputs = shape[-1]
        blocks = self._rng.integers(0, 256, (*shape[:-1], inputs // BLOCK, BLOCK_BYTES), np.uint8)
        scales = self._rng.uniform(0.5, 1.5, blocks.shape[:-1]) * (inputs**-0.5 / CODE_DEVIATION)
        blocks[..., :2] = scales.astype(np.float16)[..., None].view(np.uint8)
        rows = blocks.reshape(*shape[:-1], -1)
        self.file.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

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


def write(path: Path, shape: LlamaShape) -> None:
    """Writes a Llama."""
    writer = _Writer(path, "llama")
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


@llama_cpp.llama_log_callback
def _say_nothing(level: int, text: bytes, user_data: Any) -> None:
    pass


class _Model:
    """A model in llama.cpp, through its C interface: what its own speed test times too."""

    def __init__(self, path: Path, threads: int) -> None:
        llama_cpp.llama_log_set(_say_nothing, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_options = llama_cpp.llama_model_default_params()
        model_options.use_mmap = False  # else weights are read where they lie, not laid out anew for this machine
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = 512
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._rng = np.random.default_rng()
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def prefill(self, count: int) -> None:
        """Runs ``count`` tokens in one batch from an empty cache, and computes the logits of the last."""
        llama_cpp.llama_memory_clear(self._memory, False)
        self._decode(count)

    def decode_step(self, context: int) -> None:
        """Runs one token behind the first ``context`` of the cache."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, context, -1)
        self._decode(1)

    def _decode(self, count: int) -> None:
        tokens = (llama_cpp.llama_token * count)(*self._rng.integers(self._vocabulary, size=count).tolist())
        failed = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, count))
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        llama_cpp.llama_synchronize(self._context)


def _system() -> str:
    """Version of the package and the instructions that this build of llama.cpp uses."""
    used = [part.strip() for part in llama_cpp.llama_print_system_info().decode().split("|")]
    names = [part.partition("=")[0].strip().removeprefix("CPU : ") for part in used if part.endswith("= 1")]
    return f"llama-cpp-python {llama_cpp.__version__}: {', '.join(names)}"


def _serve(path: str, threads: str) -> None:
    """Runs what stdin says, a line each: a method, its number, and how many times. Answers with a line each."""
    model = _Model(Path(path), int(threads))
    print(_system(), flush=True)
    for line in sys.stdin:
        method, number, times = line.split()
        for _ in range(int(times)):
            getattr(model, method)(int(number))
        print("done", flush=True)


class LlamaCpp:
    """A model in a process of llama.cpp's. ``system``: what it says of itself."""

    def __init__(self, path: Path, threads: int) -> None:
        command = [sys.executable, __file__, str(path), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.system = self._read()

    def prefill(self, count: int) -> None:
        """See ``_Model``."""
        self._run("prefill", count, 1)

    def decode(self, context: int, times: int) -> None:
        """Runs tokens one after another, each at the same position."""
        self._run("decode_step", context, times)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _run(self, *words: object) -> None:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with {self._process.wait()}")
        return line.strip()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
