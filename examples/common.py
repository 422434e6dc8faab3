"""Shared by the examples: an mlx-lm Llama with random weights, options, readable sizes, and the output of plots."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import mlx.core as mx

from mlx_anvil._extras import explain_missing_modules

if TYPE_CHECKING:  # generate.py runs without matplotlib
    from matplotlib.figure import Figure

explain_missing_modules(matplotlib="lm,plot", mlx_lm="lm,plot", numpy="lm,plot")

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
OURS, MLX = "mlx-anvil", "MLX"
COLORS = {OURS: "#0b6e4f", MLX: "#2f4b8f"}


def random_llama(
    *, dims: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, dtype: mx.Dtype
) -> Any:
    """Creates an mlx-lm Llama of this shape. The embedding and the output head share their weights."""
    from mlx_lm.models import llama  # the import takes seconds, and long_context.py does not need it

    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=dims,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=mlp,
            vocab_size=vocabulary,
            rms_norm_eps=1e-5,
        )
    )
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def check_heads(dims: int, heads: int, kv_heads: int) -> None:
    """Raises a usage error if the head counts do not fit a Llama."""
    if heads % kv_heads:
        raise click.UsageError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}.")
    if dims % (2 * heads):
        raise click.UsageError(f"--dims {dims} over --heads {heads} is not an even size of a head.")


def dtype_option(default: str) -> Any:
    return click.option("--dtype", type=click.Choice(list(DTYPES)), default=default, show_default=True)


def plot_option(default: str) -> Any:
    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option("--plot", type=kind, default=default, show_default=True, help="PNG to write.")


def size(count: float) -> str:
    """Formats a number of bytes for reading."""
    power = min(3, int(math.log2(max(count, 1)) / 10))
    value = count / 1024**power
    digits = 0 if value >= 100 or power == 0 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def save(figure: "Figure", path: Path) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise click.ClickException(f"cannot write the plot: {error}") from error
