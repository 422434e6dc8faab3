"""Rejects C++ that reaches the host or escapes the checks, before anything is compiled. Metal has none of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .lexer import SourceError, TokenStream

_WORDS = frozenset(("goto", "asm", "__asm", "__asm__", "__declspec", "_declspec", "thread_local"))
# Attributes that make a loader or linker run code, bind names or place symbols, or that replace the generated code.
_ATTRIBUTES = frozenset(
    (
        *("constructor", "destructor", "init_priority"),
        *("alias", "ifunc", "weak", "weak_import", "weakref", "dllexport", "dllimport", "section", "tls_model"),
        *("cpu_dispatch", "cpu_specific", "target", "target_clones", "target_version"),
        *("interrupt", "ms_abi", "naked", "no_caller_saved_registers", "sysv_abi"),
    )
)
_BUILTINS = re.compile(
    r"__builtin_(?:aarch64|alloca|apply|arm|coro|dwarf|eh|extract_return|frame_address|frob_return|ia32|init_dwarf|longjmp|"
    r"ms_va|operator|os_log|readcycle|readsteady|return_address|set_thread|setjmp|stack|sve|thread_pointer|unwind|va|x86)"
)
# The runtime's own functions: kernels reach them through metal::simd_sum and the like. The mslc_max_threads_ variables,
# which hold the limits of kernels, are not functions.
_RUNTIME = re.compile(r"mslc_(?!max_threads_)\w+|__(?:tsan|ubsan|asan|sanitizer)_\w+")


def reject_host_code(stream: TokenStream) -> None:
    """Raises SourceError at the first construct that would reach the host."""
    for i, text in enumerate(stream.text):
        if text == "extern" and stream.kind[i + 1 : i + 2] == ["string"]:
            message = f"'extern {stream.text[i + 1]}': kernels cannot call functions of the host or of another language"
            raise SourceError(message, stream.position(i))
        if stream.kind[i] != "name":
            continue
        if text in _WORDS:
            raise SourceError(f"'{text}': Metal does not have it", stream.position(i))
        if _BUILTINS.match(text):
            raise SourceError(f"'{text}' depends on the host's processor: Metal does not have it", stream.position(i))
        if _RUNTIME.fullmatch(text):
            raise SourceError(f"'{text}' is reserved for mslc", stream.position(i))
    for i in _attribute_words(stream):
        if stream.text[i].strip("_") in _ATTRIBUTES:
            message = f"attribute '{stream.text[i]}' is for the host's linker or processor: Metal does not have it"
            raise SourceError(message, stream.position(i))


def _attribute_words(stream: TokenStream) -> Iterator[int]:
    """Yields the attribute names in __attribute__((...)) and [[...]] without their arguments."""
    for i, text in enumerate(stream.text):
        if text in ("__attribute__", "__attribute") and stream.at(i + 1) == "(" and stream.at(i + 2) == "(":
            first = i + 3
        elif text == "[" and stream.at(i + 1) == "[" and stream.partner[i] == stream.partner[i + 1] + 1:
            first = i + 2
        else:
            continue
        j, end = first, stream.partner[first - 1]
        while j < end:
            if stream.kind[j] == "name":
                yield j
            j = stream.partner[j] + 1 if stream.text[j] in ("(", "[", "{") else j + 1
