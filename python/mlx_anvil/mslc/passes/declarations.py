"""Rewrites declarations that upstream clang rejects or interprets differently."""

from __future__ import annotations

from ..entry import BUILTINS
from ..lexer import TokenStream
from ..structure import Structure

_SPACES = frozenset(("device", "constant", "threadgroup"))


def rewrite_threadgroup_variables(stream: TokenStream, structure: Structure, target: str) -> None:
    """Rewrites `threadgroup T x[N];` in a function to a reference to memory that the runtime allocates.

    On a GPU target it becomes a static variable in shared memory.
    """
    for i in range(len(stream)):
        if stream.text[i] != "threadgroup" or not structure.in_function(i):
            continue
        start = i
        while stream.at(start - 1) in ("const", "volatile", "static"):
            start -= 1
        alignments = _alignments(stream, start)
        first = alignments[-1][0] if alignments else start
        if stream.at(first - 1) not in (";", "{", "}", ":"):
            continue
        declarators = _declarators(stream, i + 1)
        if not declarators:
            continue
        if target != "cpu":
            static = "" if "static" in stream.text[start:i] else "static "
            # ldmatrix needs more alignment than Metal promises. Code that needs it in Metal too fails on the CPU, which
            # does not add it.
            stream.insert_before(first, "alignas(16) ")
            stream.insert_before(start, static)
            continue
        type_end = declarators[0][0]
        type_text = stream.joined(i + 1, type_end - 1)
        stream.erase(start, i)
        # `alignas` takes a type or a number and may be repeated. Putting all of them on a struct gives the strictest
        # one.
        alignment = f"{stream.text[declarators[0][0]]}_alignment" if alignments else ""
        if alignments:
            stream.insert_before(first, "struct ")
            stream.insert_after(alignments[0][1], f" {alignment} {{}};")
        arguments_end = f", alignof({alignment}))" if alignments else ")"
        for position, (name, end) in enumerate(declarators):
            variable = stream.text[name]
            opening = (
                f'static const mslc_variable {variable}_variable = {{"{variable}"}}; '
                f"auto& {variable} = ::mslc::threadgroup_variable<"
            )
            if position == 0:
                stream.insert_before(start, opening)
                stream.replace(name, "")
            else:
                stream.replace(name - 1, "; " + opening + type_text)
                stream.replace(name, "")
            for bracket in range(name + 1, end):
                # A '>' in an array bound must not end the template argument list.
                if stream.text[bracket] == "[" and stream.partner[bracket] < end:
                    stream.insert_after(bracket, "(")
                    stream.insert_before(stream.partner[bracket], ")")
            stream.insert_before(end, f">(&{variable}_variable{arguments_end}")


def _alignments(stream: TokenStream, start: int) -> list[tuple[int, int]]:
    """Returns (first, last) token of each `alignas(...)` that ends before `start`, in reverse order."""
    found: list[tuple[int, int]] = []
    while stream.at(start - 1) == ")" and stream.at(stream.partner[start - 1] - 1) == "alignas":
        first = stream.partner[start - 1] - 1
        found.append((first, start - 1))
        start = first
    return found


def _declarators(stream: TokenStream, i: int) -> list[tuple[int, int]]:
    """Returns (name, end) of each variable declared from i on, or nothing for pointers, references and functions."""
    declarators: list[tuple[int, int]] = []
    while True:
        text = stream.at(i)
        if text == "<":
            close = stream.close_angle(i)
            if close is None:
                return []
            i = close
        elif text in ("*", "&", "(", "=", "{", ""):
            return []
        elif text in ("[", ",", ";"):
            name = i - 1
            while stream.at(i) == "[":
                i = stream.partner[i] + 1
            if stream.at(i) not in (",", ";"):
                return []
            declarators.append((name, i))
            if stream.at(i) == ";":
                return declarators
        i += 1


def rewrite_array_parameters(stream: TokenStream) -> None:
    """Rewrites parameters like `constant int strides[2]` to pointers: clang would lose their address space."""
    for i in range(1, len(stream)):
        if stream.text[i] != "[" or stream.kind[i - 1] != "name" or stream.at(i + 1) == "[":
            continue
        end = stream.partner[i]
        if stream.at(end + 1) not in (",", ")"):
            continue
        first = i - 1
        while stream.at(first - 1) not in ("(", ",", ";", "{", "}", ")", "=", ""):
            first -= 1
        words = stream.text[first : i - 1]
        if stream.at(first - 1) in ("(", ",") and _SPACES.intersection(words) and not {"*", "&"}.intersection(words):
            stream.erase(i, end)
            stream.insert_before(i - 1, "*")


def strip_attributes(stream: TokenStream) -> None:
    """Removes Metal attributes outside of kernels, such as [[thread_index_in_simdgroup]] on a helper."""
    for i in range(len(stream)):
        if stream.text[i] == "[" and stream.at(i + 1) == "[" and stream.partner[i] == stream.partner[i + 1] + 1:
            word = stream.at(i + 2)
            if word in BUILTINS or word in _METAL_ATTRIBUTES:
                stream.erase(i, stream.partner[i])


def rewrite_logging(stream: TokenStream) -> None:
    """Changes the functions of os_log to take `const char*`, because string literals have no address space in clang."""
    for i in range(len(stream)):
        if stream.text[i] in ("struct", "class") and stream.at(i + 1) == "os_log" and stream.at(i + 2) == "{":
            for j in range(i + 3, stream.partner[i + 2]):
                if stream.text[j] == "constant" and stream.at(j + 1) == "char":
                    stream.replace(j, "const")


_METAL_ATTRIBUTES = frozenset(
    (
        "buffer",
        "threadgroup",
        "function_constant",
        "host_name",
        "kernel",
        "id",
        "user",
        "visible",
        "intersection",
        "max_total_threads_per_threadgroup",
        "required_threads_per_threadgroup",
    )
)
