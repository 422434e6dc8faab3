"""mlx-lm models whose weights are the tensors of a GGUF file."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_anvil._extras import is_installed, need
from mlx_anvil._gguf_layers import BLOCKS, GgufEmbedding, GgufLinear
from mlx_anvil._gguf_names import ROPE_FACTORS, config_of, heads_to_permute, name_of, stores_one_more
from mlx_anvil._gguf_tokenizer import tokenizer_of

_FLOATS = ("F32", "F16", "BF16")
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def load_gguf(
    path: str | Path,
    *,
    dtype: mx.Dtype | None = None,
    activation_bits: int | None = None,
    tokenizer: bool = True,
) -> tuple[nn.Module, Any]:
    """Loads a GGUF file as an mlx-lm model that multiplies with the file's own bytes.

    Matrices of the types Q4_0, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL and IQ4_XS are not converted: their layers are
    :class:`mlx_anvil.nn.GgufLinear` and :class:`mlx_anvil.nn.GgufEmbedding`. Tensors of floating point become
    ``dtype``. The model works in ``mlx_lm.generate`` and with :func:`mlx_anvil.patch`, as any other.

    Args:
        path: a file of the architecture llama (Mistral too), qwen2, qwen3, gemma, gemma2 or gemma3, in one part.
        dtype: dtype of activations: float32, float16 or bfloat16. Default: ``None``, bfloat16.
        activation_bits: that argument of :func:`mlx_anvil.quantized_matmul`, for all its layers; 8 is what llama.cpp
            computes with. Default: ``None``.
        tokenizer: whether to make a tokenizer, of the file's vocabulary: byte-level BPE of Llama 3 or Qwen, or
            SentencePiece's BPE. Default: ``True``.

    Returns:
        tuple: the model, and mlx-lm's tokenizer; None for it if the file has no vocabulary, or ``tokenizer`` is False.

    Raises:
        ImportError: gguf or mlx-lm is not installed.
        OSError: the file cannot be read.
        ValueError: not a GGUF file; another architecture, type of tensors or kind of vocabulary; missing or superfluous
            tensors.
    """
    for module in ("gguf", "mlx_lm"):
        if not is_installed(module):
            raise ImportError(need("[load_gguf]", module))
    import gguf

    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"[load_gguf] dtype is {dtype}; allowed: None, float32, float16, bfloat16.")
    if activation_bits not in (None, 8, 16):
        raise ValueError(f"[load_gguf] activation_bits is {activation_bits!r}; allowed: None, 8, 16.")
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items() if key.partition(".")[0] != "tokenizer"}
    model = _model_of(
        metadata, {tensor.name: tensor for tensor in reader.tensors}, dtype or mx.bfloat16, activation_bits
    )
    if not tokenizer or "tokenizer.ggml.tokens" not in reader.fields:
        return model, None

    def field(name: str) -> Any:
        found = reader.get_field(f"tokenizer.{name}")
        return None if found is None else found.contents()

    return model, tokenizer_of(field)


def _model_of(
    metadata: dict[str, Any], tensors: dict[str, Any], dtype: mx.Dtype, activation_bits: int | None
) -> nn.Module:
    if "token_embd.weight" not in tensors:
        raise ValueError("[load_gguf] the file has no token_embd.weight.")
    _require_types(tensors)
    rows = int(tensors["token_embd.weight"].data.shape[0])
    config = config_of(metadata, rows, "output.weight" in tensors)
    if config["model_type"] == "llama":
        config["attention_bias"] = "blk.0.attn_output.bias" in tensors
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))

    factors = tensors.pop(ROPE_FACTORS, None)
    names = {tensor: name_of(tensor, metadata["general.architecture"]) for tensor in tensors}
    if unknown := [tensor for tensor, name in names.items() if name is None]:
        raise ValueError(f"[load_gguf] {config['model_type']} has no place for {', '.join(unknown[:5])}.")
    weights = {str(names[key]): _array_of(tensor, str(names[key]), config, dtype) for key, tensor in tensors.items()}
    if config["model_type"] == "gemma3_text":
        weights = model.sanitize(weights)
    layers = list(_layers(model, {names[key]: tensor for key, tensor in tensors.items()}, dtype))
    for _, layer in layers:
        layer.activation_bits = activation_bits
    model.update_modules(tree_unflatten(layers))
    try:
        model.load_weights(list(weights.items()))
    except ValueError as error:
        raise ValueError(f"[load_gguf] {error}") from None
    if factors is not None:
        _set_rope_factors(model, config, mx.array(factors.data))
    mx.eval(model.parameters())  # type: ignore[no-untyped-call]
    model.eval()
    return model


def _require_types(tensors: dict[str, Any]) -> None:
    allowed = {*_FLOATS, *(mode.upper() for mode in BLOCKS)}
    others: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.tensor_type.name not in allowed:
            others.setdefault(tensor.tensor_type.name, []).append(name)
    if others:
        found = "; ".join(f"{kind} ({len(names)} tensors, such as {names[0]})" for kind, names in others.items())
        raise ValueError(f"[load_gguf] the file has tensors of type {found}; allowed: {', '.join(sorted(allowed))}.")


def _array_of(tensor: Any, name: str, config: dict[str, Any], dtype: mx.Dtype) -> mx.array:
    kind = tensor.tensor_type.name
    array = mx.array(tensor.data)
    if kind in _FLOATS:
        array = array.view(mx.bfloat16) if kind == "BF16" else array
        array = (array.astype(mx.float32) - 1 if stores_one_more(name, config) else array).astype(dtype)
    if heads := heads_to_permute(name, config):
        rows = mx.arange(array.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).flatten()
        array = array[rows]
    return array


def _layers(model: nn.Module, tensors: dict[str | None, Any], dtype: mx.Dtype) -> Iterator[tuple[str, nn.Module]]:
    """Our layers, by the path of those of the model that they replace."""
    for path, layer in model.named_modules():  # type: ignore[no-untyped-call]
        tensor = tensors.get(f"{path}.weight")
        if tensor is None or tensor.tensor_type.name in _FLOATS:
            continue
        mode = tensor.tensor_type.name.lower()
        columns, rows = (int(extent) for extent in tensor.shape)
        if isinstance(layer, nn.Embedding):
            yield path, GgufEmbedding(rows, columns, mode, dtype)
        elif isinstance(layer, nn.Linear):
            yield path, GgufLinear(columns, rows, "bias" in layer, mode)
        else:
            raise ValueError(f"[load_gguf] {path} is of type {tensor.tensor_type.name}; allowed: {', '.join(_FLOATS)}.")


def _set_rope_factors(model: nn.Module, config: dict[str, Any], factors: mx.array) -> None:
    """Divides the frequencies of RoPE by the file's factors, as Llama 3.1 has them."""
    from mlx_lm.models.rope_utils import Llama3RoPE

    dims, base = config["head_dim"], config["rope_theta"]
    periods = base ** (mx.arange(0, dims, 2) / dims) * factors
    for layer in model.layers:
        rope = Llama3RoPE(dims, config["max_position_embeddings"], False, base, {"factor": 1.0})
        rope._freqs = periods
        layer.self_attn.rope = rope
    mx.eval(periods)
