"""Finds the function constants that a kernel needs: those mentioned by the kernel or by anything it refers to.

Metal refuses to build a kernel's pipeline if such a constant has no value, unless the source calls
is_function_constant_defined.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..entry import FunctionConstant, Kernel
from ..lexer import TokenStream
from ..structure import CLASS, FUNCTION, NAMESPACE, Structure


def note_missing_constants(
    stream: TokenStream,
    structure: Structure,
    kernels: Iterable[Kernel],
    constants: Iterable[FunctionConstant],
    given: Iterable[int | str],
) -> None:
    """Sets Kernel.missing_constants."""
    provided = set(given)
    missing = {c.name for c in constants if not provided & {c.name, c.index}}
    missing -= {
        stream.text[stream.partner[i + 1] - 1]
        for i, text in enumerate(stream.text)
        if text == "is_function_constant_defined"
    }
    if not missing:
        return
    mentions = _mentions(stream, structure)
    for kernel in kernels:
        reached: set[str] = set()
        pending = set(kernel.function.split())
        while pending:
            reached |= pending
            pending = set().union(*(mentions.get(name, ()) for name in pending)) - reached
        kernel.missing_constants = sorted(missing & reached)


def _mentions(stream: TokenStream, structure: Structure) -> dict[str, set[str]]:
    """Maps each name declared outside functions and classes to the names that its declarations mention."""
    mentions: dict[str, set[str]] = {}
    first = 0
    for i, text in enumerate(stream.text):
        outside = structure.kind[structure.enclosing[i]] == NAMESPACE
        closes_body = text == "}" and outside and structure.kind.get(stream.partner[i]) in (FUNCTION, CLASS)
        if text == "{" and structure.kind.get(i) == NAMESPACE:
            first = i + 1
        elif (outside and text == ";") or closes_body:
            name = _declared_name(stream, first, i)
            names = {stream.text[j] for j in range(first, i) if stream.kind[j] == "name"}
            mentions.setdefault(name, set()).update(names)
            first = i + 1
        elif outside and text == "}":
            first = i + 1
    return mentions


def _declared_name(stream: TokenStream, first: int, end: int) -> str:
    """Returns the name declared by tokens first..end-1, or "" if there is none."""
    if stream.at(first) == "using":
        return stream.at(first + 1)
    if stream.at(first) == "typedef":
        return stream.at(end - 1)
    i, previous, is_class = first, "", False
    while i < end:
        text = stream.text[i]
        if text == "[":
            if stream.at(i + 1) != "[":
                return previous  # an array
            i = stream.partner[i]
        elif text == "<":
            i = stream.close_angle(i) or i
        elif text in ("struct", "class", "union", "enum"):
            is_class = True
        elif stream.kind[i] == "name":
            if is_class:
                return text
            previous = text
        elif text in ("(", "=", "{"):
            return previous
        i += 1
    return previous
