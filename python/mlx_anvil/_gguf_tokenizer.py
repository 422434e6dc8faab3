"""Tokenizers of GGUF files, from their metadata alone. transformers reads them too, but only where PyTorch is."""

from collections.abc import Callable, Iterator
from typing import Any

# How text is split before its bytes are merged, by tokenizer.ggml.pre. Patterns are those of the models.
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS: dict[str, str | None] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "smaug-bpe": _LLAMA3,
    "gpt-2": None,
    "default": None,
}
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


def tokenizer_of(field: Callable[[str], Any]) -> Any:
    """mlx-lm's tokenizer. ``field`` returns what the file has under ``tokenizer.`` and a name, or None."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    kind = field("ggml.model")
    if kind not in _BUILDERS:
        allowed = ", ".join(map(repr, _BUILDERS))
        raise ValueError(f"[load_gguf] tokenizer.ggml.model is {kind!r}; allowed: {allowed}, or tokenizer=False.")
    tokens = field("ggml.tokens")
    tokenizer = _BUILDERS[kind](tokens, field)
    types = field("ggml.token_type") or []
    for token, of_token in zip(tokens, types, strict=False):
        if of_token in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=of_token == _CONTROL)
            (tokenizer.add_special_tokens if of_token == _CONTROL else tokenizer.add_tokens)([added])
    _add_ends(tokenizer, tokens, field, kind)
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {ours: _token(tokens, field(f"ggml.{name}_token_id")) for name, ours in named.items()}
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )
    fast.chat_template = field("chat_template")
    ends = {field("ggml.eos_token_id"), field("ggml.eot_token_id")} - {None}
    return TokenizerWrapper(fast, eos_token_ids=[int(end) for end in ends])


def _token(tokens: list[str], index: int | None) -> str | None:
    return None if index is None else tokens[int(index)]


def _add_ends(tokenizer: Any, tokens: list[str], field: Callable[[str], Any], kind: str) -> None:
    """Puts the first token in front of a text, and the last one behind it, if the file says so."""
    from tokenizers.processors import TemplateProcessing

    # Files of SentencePiece need not say that a text has a first token.
    wanted = {"bos": field("ggml.add_bos_token"), "eos": field("ggml.add_eos_token")}
    if wanted["bos"] is None:
        wanted["bos"] = kind == "llama"
    ends = {name: _token(tokens, field(f"ggml.{name}_token_id")) if wanted[name] else None for name in ("bos", "eos")}
    used = [token for token in ends.values() if token is not None]
    if used:
        one = [part for part in (ends["bos"], "$A", ends["eos"]) if part is not None]
        pair = [*one, *(part for part in (ends["bos"], "$B", ends["eos"]) if part is not None)]
        tokenizer.post_processor = TemplateProcessing(
            single=one, pair=pair, special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(used)]
        )


def _of_bytes(tokens: list[str], field: Callable[[str], Any]) -> Any:
    """Byte-level BPE, as Llama 3 and Qwen have it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = field("ggml.pre") or "default"
    if pre not in _PATTERNS:
        allowed = ", ".join(map(repr, _PATTERNS))
        raise ValueError(f"[load_gguf] tokenizer.ggml.pre is {pre!r}; allowed: {allowed}, or tokenizer=False.")
    pattern = _PATTERNS[pre]
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges") or []]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pattern is _LLAMA3))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is None:
        tokenizer.pre_tokenizer = as_bytes
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_sentencepiece(tokens: list[str], field: Callable[[str], Any]) -> Any:
    """BPE of SentencePiece, as Llama 2 and Gemma have it. Its merges are those of two tokens into a third, best score
    first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = field("ggml.scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = _token(tokens, field("ggml.unknown_token_id"))
    merges = list(_merges(tokens, scores, vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = field("ggml.add_space_prefix")
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix is None or prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(content=" ", left=1)] if steps else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return tokenizer


def _merges(tokens: list[str], scores: list[float], vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    for i in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
        token = tokens[i]
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [split for split in splits if split[0] in vocabulary and split[1] in vocabulary]
        yield from sorted(known, key=lambda split: (vocabulary[split[0]], vocabulary[split[1]]))


_BUILDERS: dict[str, Callable[[list[str], Callable[[str], Any]], Any]] = {
    "gpt2": _of_bytes,
    "llama": _of_sentencepiece,
}
