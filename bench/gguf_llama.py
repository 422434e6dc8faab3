"""llama.cpp as a contestant: the steps of a model in a GGUF file (gguf_files.py).

Needs the package llama-cpp-python (extra ``bench``). It runs in a separate process: if one process has more
OpenMP threads than cores, as with the thread teams of two libraries, libgomp puts waiting threads to sleep early, and
both libraries become slow.
"""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlx_anvil._extras import missing

try:
    import llama_cpp
    import numpy as np
except ModuleNotFoundError as error:
    if __name__ != "__main__":  # who imports this goes on without llama.cpp
        raise
    raise missing(error, "bench") from None


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
