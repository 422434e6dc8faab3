"""Rewrites kernel functions and their instantiations."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..entry import BUFFER, BUILTIN, BUILTINS, THREADGROUP, Kernel, Parameter
from ..lexer import SourceError, TokenStream, integer
from ..structure import Structure

EntryPoint = Callable[[int, Kernel], str]
_QUALIFIERS = frozenset(("static", "inline", "constexpr"))
_AFTER_KERNEL = _QUALIFIERS | {"void", "["}
_UNSUPPORTED = frozenset(
    ("texture", "sampler", "stage_in", "patch_id", "imageblock_data", "raster_order_group", "color")
)


@dataclass
class _Function:
    parameters: list[Parameter]
    max_threads: str  # an expression, or the variable template that holds it
    template_parameters: int  # 0 if the kernel is not a template


def rewrite_kernels(
    stream: TokenStream, structure: Structure, entry_point: EntryPoint, only: Collection[str] = ()
) -> list[Kernel]:
    """Turns kernels into functions and adds an entry point to each instantiation. `only` restricts the entry points."""
    functions: dict[str, list[_Function]] = {}
    kernels: list[Kernel] = []

    def add(name: str, expression: str, function: _Function, at: int) -> str:
        if only and name not in only:
            return ""
        limit = function.max_threads
        if limit and function.template_parameters:
            limit += expression[expression.index("<") :]
        if structure.enclosing[at] < 0 and not expression.startswith("::"):
            expression = f":: {expression}"  # the library may have a function of the same name
        kernels.append(Kernel(name, expression, function.parameters, limit, stream.position(at)[0]))
        return " " + entry_point(len(kernels) - 1, kernels[-1])

    i = 0
    while i < len(stream):
        if stream.text[i] == "template" and stream.at(i + 1) == "[":
            i = _instantiation(stream, i, functions, add)
        elif _is_kernel_marker(stream, i):
            i = _definition(stream, i, functions, add)
        i += 1
    _reject_duplicates(stream, kernels)
    return kernels


def _is_attribute(stream: TokenStream, i: int) -> bool:
    return stream.at(i) == "[" and stream.at(i + 1) == "[" and stream.partner[i] == stream.partner[i + 1] + 1


def _is_kernel_marker(stream: TokenStream, i: int) -> bool:
    if stream.erased(i):
        return False
    if stream.text[i] == "kernel":
        return stream.at(i - 1) not in (".", "->", "::") and stream.at(i + 1) in _AFTER_KERNEL
    return _is_attribute(stream, i) and "kernel" in stream.text[i : stream.partner[i]]


def _attribute_value(stream: TokenStream, first: int, last: int, name: str) -> str:
    """Returns the argument of attribute `name` in tokens first..last, or "" if there is none."""
    for i in range(first, last):
        if stream.text[i] == name and stream.at(i + 1) == "(":
            return stream.joined(i + 2, stream.partner[i + 1] - 1)
    return ""


def _host_name(stream: TokenStream, first: int, last: int) -> str:
    """Returns the argument of host_name, joining adjacent string literals."""
    return "".join(re.findall(r'"([^"]*)"', _attribute_value(stream, first, last, "host_name")))


def _definition(stream: TokenStream, marker: int, functions: dict[str, list[_Function]], add: Callable) -> int:
    """Rewrites a kernel function. Returns the last token it handled."""
    first = marker
    while stream.at(first - 1) == "]" and _is_attribute(stream, stream.partner[first - 1]):
        first = stream.partner[first - 1]
    i = marker
    while stream.at(i) == "kernel" or stream.at(i) in _QUALIFIERS or _is_attribute(stream, i):
        i = stream.partner[i] + 1 if stream.at(i) == "[" else i + 1
    if stream.at(i) != "void" or stream.kind[i + 1] != "name" or stream.at(i + 2) != "(":
        raise SourceError("a kernel must be a function that returns void", stream.position(marker))
    name, opening = stream.text[i + 1], i + 2
    host_name = _host_name(stream, first, i)
    limit = _attribute_value(stream, first, i, "max_total_threads_per_threadgroup")
    stream.erase(first, i - 1)
    stream.insert_before(i, "MSLC_KERNEL ")

    parameters = _parameters(stream, opening)
    overloads = functions.setdefault(name, [])
    is_template = stream.at(first - 1) == ">"
    head = stream.statement_start(first)
    if limit and is_template:
        variable = f"mslc_max_threads_{name}_{len(overloads)}"
        stream.insert_before(head, f"{stream.joined(head, first - 1)} constexpr unsigned {variable} = {limit}; ")
        limit = variable
    function = _Function(parameters, limit, len(_template_list(stream, head + 1)) if is_template else 0)
    overloads.append(function)
    body = stream.partner[opening] + 1
    if stream.at(body) == "{" and not is_template:
        stream.insert_after(stream.partner[body], add(host_name or name, name, function, i + 1))
    return stream.partner[opening]


def _instantiation(stream: TokenStream, start: int, functions: dict[str, list[_Function]], add: Callable) -> int:
    """Rewrites template [[host_name("x")]] [[kernel]] decltype(f<T>) f<T>; also with the signature written out."""
    end = stream.text.index(";", start)
    host_name = _host_name(stream, start, end)
    i = start + 1
    while _is_attribute(stream, i) or stream.at(i) == "kernel":
        i = stream.partner[i] + 1 if stream.at(i) == "[" else i + 1
    if stream.at(i) == "decltype":
        first = stream.partner[i + 1] + 1
    elif stream.at(i) == "void":
        first = i + 1
    else:
        raise SourceError("an instantiation of a kernel must name a function", stream.position(start))
    last = first
    while stream.at(last + 1) == "::":
        last += 2
    name = stream.text[last]
    arguments = len(_template_list(stream, last + 1))
    if stream.at(last + 1) == "<":
        close = stream.close_angle(last + 1)
        if close is None:
            raise SourceError("unbalanced '<' in an instantiation", stream.position(last + 1))
        last = close
    if name not in functions:
        raise SourceError(f"'{name}' is instantiated as a kernel but is not one", stream.position(first))
    # Of several kernels with one name, choose the one whose parameters match best. Arguments may omit defaults.
    function = min(functions[name], key=lambda f: (f.template_parameters < arguments, f.template_parameters))
    expression = stream.joined(first, last)
    stream.erase(start, end)
    stream.insert_after(end, add(host_name or name, expression, function, first))
    return end


def _template_list(stream: TokenStream, opening: int) -> list[int]:
    """Returns the start of each element in the template list that opens at `opening`; empty if there is no list."""
    close = stream.close_angle(opening) if stream.at(opening) == "<" else None
    if close is None:
        return []
    starts, i = [opening + 1], opening + 1
    while i < close:
        text = stream.text[i]
        if text == "<":
            i = stream.close_angle(i) or i
        elif text in ("(", "[", "{"):
            i = stream.partner[i]
        elif text == ",":
            starts.append(i + 1)
        i += 1
    return starts


def _parameters(stream: TokenStream, opening: int) -> list[Parameter]:
    closing = stream.partner[opening]
    parameters: list[Parameter] = []
    first = i = opening + 1
    while i <= closing:
        text = stream.text[i]
        if text == "," or i == closing:
            if i > first:
                parameters.append(_parameter(stream, first, i, parameters))
            first = i + 1
        elif text == "<":
            i = stream.close_angle(i) or i
        elif text in ("(", "[", "{"):
            i = stream.partner[i]
        i += 1
    return parameters


def _parameter(stream: TokenStream, first: int, end: int, earlier: list[Parameter]) -> Parameter:
    attribute = next((i for i in range(first, end) if _is_attribute(stream, i)), end)
    name_at = attribute - 1
    while stream.at(name_at) == "]":
        name_at = stream.partner[name_at] - 1
    parameter = Parameter(stream.text[name_at], stream.joined(first, name_at - 1), BUFFER)
    words = stream.text[attribute:end]
    builtin = next((word for word in words if word in BUILTINS), "")
    unsupported = next((word for word in words if word in _UNSUPPORTED), "")
    if unsupported:
        raise SourceError(f"[[{unsupported}]] is not supported: kernels take buffers", stream.position(attribute))
    if builtin:
        parameter.kind, parameter.builtin = BUILTIN, builtin
    else:
        parameter.kind = THREADGROUP if "threadgroup" in stream.text[first:name_at] else BUFFER
        keyword = "threadgroup" if parameter.kind == THREADGROUP else "buffer"
        parameter.index = _binding_index(stream, attribute, end, keyword, parameter, earlier)
        parameter.function_constant = _attribute_value(stream, attribute, end, "function_constant")
    if attribute < end:
        stream.erase(attribute, end - 1)
    return parameter


def _binding_index(
    stream: TokenStream, attribute: int, end: int, keyword: str, parameter: Parameter, earlier: list[Parameter]
) -> int:
    text = _attribute_value(stream, attribute, end, keyword)
    if text:
        try:
            return integer(text)
        except ValueError:
            message = f"the index of parameter '{parameter.name}' must be a number, not '{text}'"
            raise SourceError(message, stream.position(attribute)) from None
    is_array = stream.at(attribute - 1) == "]"
    if not is_array and not {"*", "&"}.intersection(parameter.type.split()):
        message = f"kernel parameter '{parameter.name}' has no attribute that mslc knows"
        raise SourceError(message, stream.position(attribute if attribute < end else attribute - 1))
    # Metal numbers buffers that have no attribute.
    used = {p.index for p in earlier if p.kind == parameter.kind}
    return next(i for i in range(len(used) + 1) if i not in used)


def _reject_duplicates(stream: TokenStream, kernels: list[Kernel]) -> None:
    seen: set[str] = set()
    for kernel in kernels:
        if kernel.name in seen:
            raise SourceError(f"two kernels are named '{kernel.name}'", (kernel.line, 1))
        seen.add(kernel.name)
