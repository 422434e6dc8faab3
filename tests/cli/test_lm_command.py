"""``python -m mlx_anvil lm``: commands of mlx-lm on a small local model, patched, with their own options and status."""

import importlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mlx_anvil
from lm_models import COMMON, VOCABULARY, Architecture
from mlx_anvil import _lm_command, _lm_progress
from mlx_anvil.__main__ import main

pytestmark = pytest.mark.cpu_only

GENERATE = importlib.import_module("mlx_lm.generate")  # the package has a function of that name
SWAPPED = "mlx-anvil: llama.Model: 31 of 31 calls swapped."
NO_FALLBACK = "mlx-anvil: llama.Model: no call fell back to MLX's ops."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a 4-bit Llama with random weights and a tokenizer of 96 words.

    The end of a text is a word that the model does not have: random weights never choose it.
    """
    folder = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)} | {"end": VOCABULARY}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", chat_template=template)
    tokenizer.save_pretrained(folder)
    llama = Architecture("llama").build()
    nn.quantize(llama, group_size=32, bits=4)
    llama.save_weights(str(folder / "model.safetensors"))
    config = {"model_type": "llama", **COMMON, "quantization": {"group_size": 32, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(autouse=True)
def _stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in the process of the tests, so they must not change how it ends."""
    monkeypatch.setattr(_lm_command, "_skip_finalization", lambda code: None)


def lm(*arguments: str) -> Result:
    before = sys.argv
    result = CliRunner().invoke(main, ["lm", *arguments])
    assert sys.argv is before
    return result


def generate(model: str, *options: str) -> Result:
    return lm("generate", "--model", model, "--prompt", "w1 w2 w3", "--max-tokens", "4", "--temp", "0", *options)


def test_runs_patched_and_prints_what_the_command_prints(model, monkeypatch):
    arguments = ["--model", model, "--prompt", "w1 w2 w3", "--max-tokens", "4", "--temp", "0"]
    plain = subprocess.run([sys.executable, "-m", "mlx_lm.generate", *arguments], capture_output=True, text=True)
    load, kernels = mlx_lm.utils.load_model, []
    stream = GENERATE.stream_generate

    def traced(*args, **kwargs):
        with mlx_anvil.trace() as trace:
            yield from stream(*args, **kwargs)
        kernels.extend(trace.kernels)

    monkeypatch.setattr(GENERATE, "stream_generate", traced)
    result = generate(model)
    assert result.exit_code == 0, result.output
    text = result.stdout.split("=" * 10)[1]
    assert len(text.split()) == 4
    assert text == plain.stdout.split("=" * 10)[1]
    assert any(name.startswith("quantized_swiglu") for name in kernels)
    assert result.stderr.splitlines() == [SWAPPED, NO_FALLBACK]
    assert mlx_lm.utils.load_model is load


@pytest.mark.parametrize("place", ["before", "first", "last"])
def test_the_full_report(model, place):
    options = ["--model", model, "--prompt", "w1", "--max-tokens", "1"]
    arguments = {
        "before": ["--report", "generate", *options],
        "first": ["generate", "--report", *options],
        "last": ["generate", *options, "--report"],
    }
    result = lm(*arguments[place])
    assert result.exit_code == 0, result.output
    assert "llama.Model: 31 of 31 calls swapped." in result.stderr
    assert re.search(r"self_attn +x 2 .*attention +flash_attention$", result.stderr, re.M)
    assert all(len(line) <= 80 for line in result.stderr.splitlines())


@pytest.mark.parametrize(
    ("arguments", "kept", "asked"),
    [
        (["--report", "--model", "m"], ["--model", "m"], True),
        (["--report", "m"], ["m"], True),
        (["--model", "m", "--report"], ["--model", "m"], True),
        (["--train", "--report", "wandb"], ["--train", "--report", "wandb"], False),
        (["--report-to", "wandb"], ["--report-to", "wandb"], False),
        (["--", "--report"], ["--", "--report"], False),
        ([], [], False),
    ],
)
def test_only_our_option_is_taken_out(arguments, kept, asked):
    assert _lm_command.without_report(arguments) == (kept, asked)


def test_the_help_of_a_command_is_its_own():
    result = lm("generate", "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("usage: python -m mlx_anvil lm generate [-h] [--model MODEL]")
    assert result.stderr == ""


def test_the_help_lists_the_commands():
    text = " ".join(lm("--help").stdout.split())
    for name in ("benchmark", "cache_prompt", "chat", "evaluate", "generate", "lora", "perplexity", "server"):
        assert name in _lm_command.commands()
        assert name in text


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nonsense"], 2, "Error: mlx-lm has no command 'nonsense'; it has awq, benchmark, "),
        (["generate", "--nonsense"], 2, "unrecognized arguments: --nonsense"),
        (["generate", "--max-tokens", "x"], 2, "invalid int value: 'x'"),
    ],
)
def test_wrong_arguments(arguments, status, message):
    result = lm(*arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_other_commands(model, tmp_path):
    cache = tmp_path / "cache.safetensors"
    for arguments in (
        ["benchmark", "--model", model, "-p", "8", "-g", "2", "-n", "1"],
        ["cache_prompt", "--model", model, "--prompt", "w1 w2", "--prompt-cache-file", str(cache)],
    ):
        result = lm(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stderr.splitlines()[-2:] == [SWAPPED, NO_FALLBACK]
    assert cache.exists()


def test_fallbacks_are_counted_at_the_end_of_a_failing_command(model, monkeypatch):
    def fails(*args, **kwargs):
        (loaded, *_) = args
        loaded.set_dtype(mx.float64)
        with mx.stream(mx.cpu):
            mx.eval(loaded.model.norm(mx.zeros((1, 64), mx.float64)))
        raise KeyError("no such thing")

    monkeypatch.setattr(GENERATE, "generate", fails)
    result = generate(model)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[0] == SWAPPED
    assert "KeyError: 'no such thing'" in lines
    assert f'File "{_lm_command.__file__}"' not in result.stderr
    text = " ".join(lines)
    assert re.search(r"mlx-anvil: llama\.Model: 1 call fell back to MLX's ops: +1 of rms_norm: .*float64", text)


@pytest.mark.parametrize(("end", "status"), [(SystemExit(3), 3), (SystemExit(None), 0), (KeyboardInterrupt(), 130)])
def test_the_status_is_the_command_s(model, monkeypatch, end, status):
    def leaves(*args, **kwargs):
        raise end

    monkeypatch.setattr(GENERATE, "generate", leaves)
    result = generate(model)
    assert result.exit_code == status
    assert result.stderr.splitlines() == [SWAPPED, NO_FALLBACK]


def test_a_command_without_a_model(monkeypatch):
    monkeypatch.setattr(GENERATE, "main", lambda: None)
    result = lm("generate")
    assert result.exit_code == 0
    assert result.stderr == "mlx-anvil: the command loaded no model, so nothing was patched.\n"


def test_a_missing_extra_of_mlx_lm(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    result = lm("evaluate", "--help")
    assert result.exit_code == 1
    assert (
        result.stderr
        == 'Error: mlx_lm.evaluate needs lm_eval, which is not installed: pip install "mlx-lm[evaluate]"\n'
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = lm("lora", "--model", model, "--train", "--data", str(tmp_path / "missing"))
    assert result.exit_code == 1
    assert 'Error: mlx_lm.lora needs datasets, which is not installed: pip install "mlx-lm[train]"' in result.stderr
    assert "Traceback" not in result.stderr


def test_without_mlx_lm(monkeypatch):
    monkeypatch.setattr(_lm_command, "is_installed", lambda name: False)
    result = lm("generate")
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: lm needs mlx-lm: pip install .*\[lm\]\"\n", result.stderr)
    assert lm("--help").exit_code == 0


def test_a_server_that_is_interrupted(model):
    """A shell without job control makes background processes ignore SIGINT. The server must not inherit that."""
    code = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("mlx_anvil", run_name="__main__", alter_sys=True)
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-u", "-c", code, "lm", "server", "--model", model, "--port", str(port)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=Path(model)) as server:
        assert server.stderr is not None
        seen = []
        end = threading.Timer(120, server.kill)  # an interrupt at a wrong time leaves mlx-lm's server waiting
        end.start()
        for line in server.stderr:
            seen.append(line.strip())
            if "Starting httpd" in line:  # printed before it can be interrupted; an answer comes after that
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
                    assert answer.status == 200
                server.send_signal(signal.SIGINT)
        status = server.wait(timeout=60)
        end.cancel()
    assert status == 0, seen  # as mlx-lm's server ends
    assert SWAPPED in seen, seen
    assert seen[-1] == NO_FALLBACK
    assert not any("Traceback" in line for line in seen), seen


# ---- progress of benchmark -------------------------------------------------------------------------------------------

BENCHMARK = importlib.import_module("mlx_lm.benchmark")
TRIALS = ("--prompt-tokens", "8", "--generation-tokens", "6", "--num-trials", "2")


@pytest.mark.parametrize("batch", ["1", "2"])
def test_benchmark_shows_its_progress_on_a_terminal(model, batch, monkeypatch):
    """The progress goes to stderr, because stdout belongs to the command. Its functions are restored afterwards."""
    drawn = io.StringIO()
    monkeypatch.setattr(
        _lm_command,
        "Console",
        lambda **options: Console(**options | {"stderr": False, "file": drawn}, force_terminal=True),
    )
    monkeypatch.setattr(_lm_progress, "_EVERY", 0.0)
    functions = BENCHMARK.stream_generate, BENCHMARK.batch_generate
    result = lm("benchmark", "--model", model, "--batch-size", batch, *TRIALS)
    assert result.exit_code == 0, result.output
    assert (BENCHMARK.stream_generate, BENCHMARK.batch_generate) == functions
    assert [
        line.partition(":")[0] for line in result.stdout.splitlines() if line.startswith(("Trial", "Averages"))
    ] == [
        "Trial 1",
        "Trial 2",
        "Averages",
    ]
    text = drawn.getvalue()
    titles = re.findall(r"Warm-up|Trial \d of \d", text)
    assert list(dict.fromkeys(titles)) == ["Warm-up", "Trial 1 of 2", "Trial 2 of 2"]
    assert re.search(r"Trial 2 of 2.* \d+:\d\d left", text)
    assert "left" not in result.stdout


def test_benchmark_in_a_pipe_is_as_it_was(model):
    result = lm("benchmark", "--model", model, *TRIALS)
    assert result.exit_code == 0, result.output
    assert "left" not in result.output
    assert "Warm-up" not in result.output


def test_time_left(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(_lm_progress.time, "perf_counter", lambda: clock[0])
    runs = _lm_progress._Runs(Console(file=io.StringIO()), trials=4, tokens=100)
    assert runs._left(0) == ""
    clock[0] = 10.0
    assert runs._left(50) == "1:30 left"  # 20 s a run, and 4.5 runs
    with runs._run():
        clock[0] = 20.0
    assert runs._left(0) == "1:20 left"
