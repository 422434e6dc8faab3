"""Function constants: declarations with [[function_constant(n)]] become constexpr with the given value.

A value may be DEFERRED until the compiled kernel is loaded. Only the PTX target supports that
(shim/ptx/deferred_ptx.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..entry import FunctionConstant
from ..lexer import SourceError, TokenStream, integer

_QUALIFIERS = frozenset(("static", "constant", "constexpr", "const", "inline", "extern"))
_SCALARS = frozenset(
    ["bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float", "bfloat"]
)

DEFERRED = object()
OPAQUE = object()  # has a value that no constant expression can use, like Metal's constants before a pipeline is built


def rewrite_function_constants(stream: TokenStream, values: Mapping[int | str, object]) -> list[FunctionConstant]:
    found: list[FunctionConstant] = []
    given: set[str] = set()
    for i in range(len(stream)):
        if stream.text[i] != "function_constant" or stream.at(i + 1) != "(" or stream.at(i - 1) != "[":
            continue
        first, last = i - 2, stream.partner[i - 2]
        name = stream.text[first - 1]
        start = stream.statement_start(first)
        type_words = [w for w in stream.text[start : first - 1] if w not in _QUALIFIERS]
        type_name = "".join(type_words)
        if "(" in stream.text[start:first] or stream.at(last + 1) != ";":
            continue  # an attribute of a parameter
        if type_name not in _SCALARS:
            raise SourceError(f"a function constant of type '{type_name}' is not supported", stream.position(start))
        index_text = stream.joined(i + 2, stream.partner[i + 1] - 1)
        try:
            index = integer(index_text)
        except ValueError:
            message = f"the index of a function constant must be a number, not '{index_text}'"
            raise SourceError(message, stream.position(i + 2)) from None
        found.append(FunctionConstant(name, type_name, index))
        value = values.get(index, values.get(name))
        if value is not None:
            given.add(name)
        if value is DEFERRED:
            if type_name != "bool":
                raise SourceError(
                    f"a deferred function constant must be a bool, not a {type_name}", stream.position(start)
                )
            stream.erase(start, last)
            stream.insert_before(start, f"MSLC_DEFERRED_CONSTANT({name}, {index})")
            continue
        if value is OPAQUE:
            for word in range(start, first - 1):
                if stream.text[word] in ("static", "inline", "extern", "constexpr"):
                    stream.erase(word, word)
            stream.erase(first, last)
            stream.insert_before(start, "extern ")
            continue
        stream.erase(first, last)
        stream.insert_after(first - 1, f" = {_literal(type_name, value)}")
        words = stream.text[start : first - 1]
        missing = [word for word in ("static", "constexpr") if word not in words]
        stream.insert_before(start, "".join(word + " " for word in missing))
    _rewrite_is_defined(stream, given)
    return found


def _literal(type_name: str, value: Any) -> str:
    if value is None:
        return f"{type_name}(0)"
    if type_name == "bool":
        return "true" if value else "false"
    if type_name in ("float", "half", "bfloat"):
        number = float(value)
        if number != number:
            return f"{type_name}(NAN)"
        if number in (float("inf"), float("-inf")):
            return f"{type_name}({'-' if number < 0 else ''}INFINITY)"
        return f"{type_name}({number.hex()}f)"
    suffix = "ul" if type_name in ("ulong", "uint") else "l"
    return f"{type_name}({int(value)}{suffix})"


def _rewrite_is_defined(stream: TokenStream, given: set[str]) -> None:
    for i in range(len(stream)):
        if stream.text[i] == "is_function_constant_defined" and stream.at(i + 1) == "(":
            last = stream.partner[i + 1]
            stream.erase(i, last)
            stream.insert_before(i, "true" if stream.text[last - 1] in given else "false")
