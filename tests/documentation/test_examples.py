"""The examples, run through their command lines at small sizes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import common

import click
import mlx.core as mx
import mlx.nn as nn
import pytest
from click.testing import CliRunner, Result
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import delta_net
import generate
import long_context
import serve
import train

# What they print is checked, not numbers: the ops have tests of their own.
pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

EXAMPLES = Path(common.__file__).parent
PNG = b"\x89PNG\r\n\x1a\n"
TINY_LLAMA = ["--dims", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1]
TINY_TRAINING = [*TINY_LLAMA, "--steps", 3, "--batch", 2, "--length", 16]
TINY_DELTA_NET = ["--architecture", "gated-delta", *TINY_TRAINING, "--layers", 2]
TINY_GENERATION = [*TINY_LLAMA, "--mlp", 64, "--vocabulary", 50, "--prompt-tokens", 5, "--tokens", 3]
TINY_LENGTHS = ["--shortest", 16, "--longest", 64, "--heads", 2, "--kv-heads", 1, "--head-dim", 8]


def run(command: click.Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def succeed(command: click.Command, *arguments: object) -> str:
    result = run(command, *arguments)
    assert result.exit_code == 0, result.output
    return result.output


def fail(command: click.Command, *arguments: object) -> str:
    """The message, without the breaks that a narrow terminal makes."""
    result = run(command, *arguments)
    assert result.exit_code != 0, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.output.split())


@pytest.fixture
def plot(tmp_path: Path) -> Path:
    return tmp_path / "plot.png"


def rows_of(output: str) -> list[str]:
    """First cells of a table of runs."""
    return [label for label in re.findall(r"^│ *([\w-]+) ", output, re.M) if label in (common.OURS, common.MLX)]


@pytest.mark.parametrize(
    "options",
    [[], ["--dtype", "bfloat16"], ["--lora"], ["--lora", "--dtype", "float16"], ["--seed", 7, "--learning-rate", 0.01]],
    ids=str,
)
def test_train(plot, options):
    output = succeed(train.main, *TINY_TRAINING, *options, "--plot", plot)
    assert rows_of(output) == [common.OURS]
    assert "flash_attention" in output
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "options", [[], ["--dtype", "bfloat16"], ["--lora"], ["--attention-every", 0], ["--attention-every", 1]], ids=str
)
def test_train_a_gated_delta_net(plot, options):
    output = succeed(train.main, *TINY_DELTA_NET, *options, "--plot", plot)
    assert rows_of(output) == [common.OURS]
    assert ("flash_attention" in output) == (options != ["--attention-every", 0])
    assert "Left as it was" not in output
    assert plot.read_bytes().startswith(PNG)


def test_train_without(plot):
    output = succeed(train.main, *TINY_TRAINING, "--no-anvil", "--plot", plot)
    assert rows_of(output) == [common.MLX]
    assert "flash_attention" not in output


@pytest.mark.parametrize("options", [TINY_TRAINING, TINY_DELTA_NET], ids=("llama", "gated-delta"))
def test_train_compares(plot, tmp_path, options):
    text = tmp_path / "verse.txt"
    text.write_text("sein oder nicht sein, das ist hier die Frage: übel\n" * 5, encoding="utf-8")
    output = succeed(train.main, text, *options, "--compare", "--plot", plot)
    assert rows_of(output) == [common.OURS, common.MLX]
    first, last = zip(*re.findall(r"│ (?:mlx-anvil|MLX) +│ +([\d.]+) │ +([\d.]+) │", output), strict=True)
    assert len(set(first)) == 1
    assert float(last[0]) == pytest.approx(float(last[1]), abs=0.002)


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2)])
def test_linear_attention_is_the_same_function_twice(heads, key_heads):
    layers = [delta_net.GatedDelta(32, heads, key_heads, 16, attend) for attend in delta_net.LINEAR_ATTENTION.values()]
    layers[1].update(layers[0].parameters())
    x = mx.random.normal((2, 9, 32))

    def loss(layer: nn.Module) -> mx.array:
        return layer(x).square().sum()

    ours, theirs = (nn.value_and_grad(layer, loss)(layer) for layer in layers)
    assert mx.allclose(ours[0], theirs[0], rtol=1e-4)
    for (name, a), (_, b) in zip(tree_flatten(ours[1]), tree_flatten(theirs[1]), strict=True):
        assert mx.allclose(a, b, rtol=1e-3, atol=1e-5 * mx.abs(b).max()), name


def test_train_refuses(tmp_path, plot):
    assert "'missing.txt' does not exist" in fail(train.main, "missing.txt")
    short, binary = tmp_path / "short.txt", tmp_path / "binary"
    short.write_text("abc")
    binary.write_bytes(b"\xff\xfe\x00")
    assert "the text has 3 characters; sequences of --length 16 need at least 17" in fail(
        train.main, short, *TINY_TRAINING, "--plot", plot
    )
    assert "cannot read" in fail(train.main, binary)
    assert "--heads 3 is not a multiple of --kv-heads 2" in fail(train.main, "--heads", 3, "--kv-heads", 2)
    assert "not an even size of a head" in fail(train.main, "--dims", 30, "--heads", 4)
    assert "--lora needs a multiple of 32" in fail(train.main, "--lora", "--dims", 40, "--heads", 4)
    assert "every layer of a Llama is attention" in fail(train.main, "--attention-every", 2)
    assert "cannot write the plot" in fail(train.main, *TINY_TRAINING, "--plot", tmp_path / "no" / "plot.png")


@pytest.mark.parametrize(
    "options", [[], ["--bits", 8, "--dtype", "float16"], ["--bits", 16, "--dtype", "float32"]], ids=str
)
def test_generate(options):
    output = succeed(generate.main, *TINY_GENERATION, *options)
    assert rows_of(output) == [common.OURS, common.MLX]
    assert re.search(r"│ faster +│ +[\d.]+x │ +[\d.]+x │", output)


def test_generate_alone():
    assert rows_of(succeed(generate.main, *TINY_GENERATION, "--no-compare")) == [common.OURS]


@pytest.mark.parametrize("options", [[], ["--kv-bits", 4, "--pages", 30]], ids=str)
def test_serve(options):
    output = succeed(
        serve.main, *TINY_LLAMA, "--dims", 64, "--kv-heads", 1, "--heads", 1, "--dtype", "float32", *options
    )
    answers = [int(answer) for answer in re.findall(r"│ +\d+ │ +\d+ │ +(\d+) │", output)]
    assert answers == [answer for _, answer in serve.LENGTHS]
    same, count = map(int, re.findall(r"(\d+) of (\d+) tokens are the same", output)[0])
    assert count == sum(answers)
    assert options or same == count


def test_serve_refuses():
    assert "[PagedCache] 4 pages are needed and 2 of 2 are free" in fail(serve.main, *TINY_LLAMA, "--pages", 2)
    assert "--pages: too few for one request alone" in fail(serve.main, *TINY_LLAMA, "--pages", 4)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as mlx-lm stores it, whose tokenizer knows a few words."""
    folder = tmp_path_factory.mktemp("model")
    words = {word: index for index, word in enumerate(["<unk>", "once", "upon", "a", "time"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    shape = {"dims": 32, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 64}
    model = common.random_llama(**shape, vocabulary=len(words), dtype=mx.float32)
    nn.quantize(model, group_size=32, bits=4)
    model.save_weights(str(folder / "model.safetensors"))
    config = {key: value for key, value in vars(model.args).items() if value is not None}
    config |= {"quantization": {"group_size": 32, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_generate_from_a_model_directory(model_directory):
    output = succeed(generate.main, "--model", model_directory, "--prompt", "once upon a time", "--tokens", 3)
    assert output.count("once upon a time") >= 1
    assert rows_of(output) == [common.OURS, common.MLX]


def test_generate_from_a_model_directory_without_a_prompt(model_directory):
    output = succeed(generate.main, "--model", model_directory, "--prompt-tokens", 4, "--tokens", 2)
    assert rows_of(output) == [common.OURS, common.MLX]


def test_generate_refuses(tmp_path):
    assert "--prompt needs a tokenizer" in fail(generate.main, "--prompt", "once")
    assert "holds no model that mlx-lm loads" in fail(generate.main, "--model", tmp_path)
    assert "'missing' does not exist" in fail(generate.main, "--model", "missing")
    assert "--mlp 40: quantized weights need a multiple of 32" in fail(generate.main, *TINY_GENERATION, "--mlp", 40)


@pytest.mark.parametrize("options", [[], ["--window", 5], ["--dtype", "bfloat16"], ["--seed", 3]], ids=str)
def test_long_context(plot, options):
    output = succeed(long_context.main, *TINY_LENGTHS, *options, "--plot", plot)
    assert re.findall(r"^│ +(\d+) │", output, re.M) == ["16", "32", "64"]
    assert "stops" not in output
    assert plot.read_bytes().startswith(PNG)


def test_long_context_stops_before_memory_does(plot):
    output = succeed(
        long_context.main, "--shortest", 256, "--longest", 1024, "--heads", 2, "--kv-heads", 2, "--head-dim", 16,
        "--memory-limit", 0.01, "--plot", plot,
    )  # fmt: skip
    assert re.search(
        r"MLX stops: length 1024 would take [\d.]+ MiB, above the limit of 10.2 MiB", " ".join(output.split())
    )
    last = re.search(r"^│ +1024 │(.*)│$", output, re.M)
    assert [bool(cell.strip()) for cell in last[1].split("│")] == [True, True, False, False]


def test_long_context_refuses():
    assert "--longest 8 is below --shortest 16" in fail(long_context.main, "--shortest", 16, "--longest", 8)
    assert "not a multiple of --kv-heads" in fail(long_context.main, "--heads", 3, "--kv-heads", 2)


@pytest.mark.parametrize("window", [None, 5])
def test_long_context_measures_the_same_function_twice(window):
    q, k, v = (mx.random.normal((1, 2, 20, 8)) for _ in range(3))
    ours, theirs = (attend(q, k, v) for attend in long_context.attentions(window, 0.3).values())
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_runs_as_a_script_from_anywhere(tmp_path):
    options = [*TINY_LENGTHS, "--plot", "here.png"]
    command = [sys.executable, EXAMPLES / "long_context.py", *options]
    result = subprocess.run([str(part) for part in command], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "here.png").exists()


def test_sizes_for_people():
    assert [common.size(x) for x in (0, 1023, 2048, 10 * 2**20, 300 * 2**20, 5 * 2**40)] == [
        "0 B", "1023 B", "2.00 KiB", "10.0 MiB", "300 MiB", "5120 GiB",
    ]  # fmt: skip


def test_figures_of_the_page_are_those_measured():
    page = (EXAMPLES.parent / "docs" / "training.md").read_text()
    results = json.loads((EXAMPLES.parent / "bench" / "results" / "training_cpu.json").read_text())
    for row in results["rows"]:
        ours, theirs = (row["peak_bytes"].get(label) for label in (common.OURS, common.MLX))
        rest = f"{theirs / 2**20:.1f} MiB | {ours / theirs:.2f} |" if theirs else "| |"
        assert f"| {row['length']} | {ours / 2**20:.1f} MiB | {rest}" in page
        for label, share in row.get("attention_share", {}).items():
            step, attention = (row["seconds"][key]["median"] for key in (label, f"{label}: attention"))
            assert f"| {label} | {step:.2f} s | {attention:.2f} s | {share:.0%} |" in page
