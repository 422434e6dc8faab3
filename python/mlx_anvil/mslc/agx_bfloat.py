"""Replaces bfloat in LLVM IR, which SPIR-V lacks: 16 bits in memory, float32 in arithmetic.

A value becomes its bits, an i16. An operation extends its operands, works in float and rounds the result to the nearest
bfloat, which is what MSL asks for and what a GPU without the type has to do.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator

_TYPE = r"(?:bfloat|<\d+ x bfloat>)"
_FLAGS = r"(?:(?:nnan|ninf|nsz|arcp|contract|afn|reassoc|fast) )*"
_ARITHMETIC = re.compile(rf"  (%\S+) = (fadd|fsub|fmul|fdiv|frem|fneg) ({_FLAGS})({_TYPE}) (.*)")
_COMPARISON = re.compile(rf"  (%\S+) = fcmp ({_FLAGS})(\w+) ({_TYPE}) (.*)")
_FROM_BFLOAT = re.compile(rf"  (%\S+) = (fpext|fptosi|fptoui) {_FLAGS}({_TYPE}) (.*) to (.*)")
_TO_BFLOAT = re.compile(rf"  (%\S+) = (fptrunc|sitofp|uitofp) {_FLAGS}(.*) to ({_TYPE})")
_INTRINSIC = re.compile(r"  (%\S+) = (?:tail )?call [^@]*?([\w.<> ]*?) @(llvm\.[\w.]*bf16[\w.]*)\((.*)\)(?: #\d+)?")
_RETURNED = re.compile(r"((?:<\d+ x )?\w+>?)$")
_CONSTANT = re.compile(r"0xR([0-9A-F]{4})")
_DECLARED = re.compile(r"^declare [^\n]*@llvm\.[\w.]*bf16[^\n]*\n", re.MULTILINE)
_FLAGGED = re.compile(rf"\b(select|phi|call) {_FLAGS}")
_CLASSES = re.compile(r"nofpclass\([^)]*\) ")
# The type; before it, what only looks like it: texts and names.
_NAME_OR_TYPE = re.compile(r'[@%!]?"[^"]*"|[@%][\w.$-]+|\bbfloat\b')
_METADATA = re.compile(r"(?:, ![\w.]+ !\d+)+$")


def without_bfloat(code: str) -> str:
    """Returns the module without bfloat. A module that has none is returned as it is."""
    if "bfloat" not in code:
        return code
    rewriter = _Rewriter()
    lines = [new for line in _DECLARED.sub("", code).split("\n") for new in rewriter.line(line)]
    text = _CONSTANT.sub(lambda found: str(int(found[1], 16)), "\n".join(lines))
    text = _NAME_OR_TYPE.sub(lambda found: "i16" if found[0] == "bfloat" else found[0], text)
    declared = [line for line in sorted(rewriter.declarations) if not re.search(_declaration(line), text)]
    conversions = [_conversions(width) for width in sorted(rewriter.widths)]
    return "\n".join([text, *declared, *conversions])


def _declaration(line: str) -> str:
    return rf"(?m)^declare [^\n]*{re.escape(line[line.index('@') : line.index('(') + 1])}"


class _Rewriter:
    def __init__(self) -> None:
        self.widths: set[int] = set()  # lengths of vectors that are converted; 1 for scalars
        self.declarations: set[str] = set()

    def line(self, line: str) -> Iterator[str]:
        if "bfloat" not in line:
            yield line
            return
        line = _METADATA.sub("", line)
        if found := _ARITHMETIC.fullmatch(line):
            result, operation, flags, type_name, operands = found.groups()
            extended = yield from self._extend_all(result, type_name, _split(operands))
            wide = _float_of(type_name)
            yield f"  {_part(result, 'r')} = {operation} {flags}{wide} {', '.join(extended)}"
            yield self._round(result, type_name, _part(result, "r"))
        elif found := _COMPARISON.fullmatch(line):
            result, flags, condition, type_name, operands = found.groups()
            extended = yield from self._extend_all(result, type_name, _split(operands))
            yield f"  {result} = fcmp {flags}{condition} {_float_of(type_name)} {', '.join(extended)}"
        elif found := _FROM_BFLOAT.fullmatch(line):
            result, operation, type_name, operand, to = found.groups()
            wide = _float_of(type_name)
            if to == wide:
                yield self._extend(result, type_name, operand)
            else:
                yield self._extend(_part(result, "x"), type_name, operand)
                yield f"  {result} = {operation} {wide} {_part(result, 'x')} to {to}"
        elif found := _TO_BFLOAT.fullmatch(line):
            result, operation, operand, type_name = found.groups()
            wide, value = _float_of(type_name), operand.split(" ")[-1]
            if not operand.startswith(f"{wide} "):
                value = _part(result, "x")
                yield f"  {value} = {operation} {operand} to {wide}"
            else:
                value = operand[len(wide) + 1 :]
            yield self._round(result, type_name, value)
        elif found := _INTRINSIC.fullmatch(line):
            yield from self._intrinsic(*found.groups())
        else:
            yield _CLASSES.sub("", _FLAGGED.sub(r"\1 ", line))

    def _intrinsic(self, result: str, returned: str, name: str, arguments: str) -> Iterator[str]:
        passed, types = [], []
        for position, argument in enumerate(_split(arguments)):
            words = _CLASSES.sub("", argument).replace("noundef ", "")
            found = re.match(rf"({_TYPE}) (.*)", words)
            if found:
                value = _part(result, f"x{position}")
                yield self._extend(value, found[1], found[2])
                words = f"{_float_of(found[1])} {value}"
            passed.append(words)
            types.append(words[: words.rindex(" ")])
        last = _RETURNED.search(returned)
        assert last is not None
        narrow = last[1]
        is_bfloat = "bfloat" in narrow
        wide = _float_of(narrow) if is_bfloat else narrow
        callee = f"@{name.replace('bf16', 'f32')}"
        self.declarations.add(f"declare {wide} {callee}({', '.join(types)})")
        target = _part(result, "r") if is_bfloat else result
        yield f"  {target} = call {wide} {callee}({', '.join(passed)})"
        if is_bfloat:
            yield self._round(result, narrow, target)

    def _extend_all(self, result: str, type_name: str, operands: list[str]) -> Generator[str, None, list[str]]:
        names = [_part(result, f"x{position}") for position in range(len(operands))]
        for name, operand in zip(names, operands, strict=True):
            yield self._extend(name, type_name, operand)
        return names

    def _extend(self, result: str, type_name: str, operand: str) -> str:
        self.widths.add(_width(type_name))
        return f"  {result} = call {_float_of(type_name)} @mslc.extend.{_width(type_name)}({type_name} {operand})"

    def _round(self, result: str, type_name: str, operand: str) -> str:
        self.widths.add(_width(type_name))
        wide = _float_of(type_name)
        return f"  {result} = call {type_name} @mslc.round.{_width(type_name)}({wide} {operand})"


def _part(result: str, suffix: str) -> str:
    """A name for an intermediate value: named values leave the numbers of the others alone."""
    return f"%mslc.{result[1:].strip(chr(34))}.{suffix}"


def _width(type_name: str) -> int:
    return int(type_name[1 : type_name.index(" ")]) if type_name.startswith("<") else 1


def _float_of(type_name: str) -> str:
    return type_name.replace("bfloat", "float")


def _split(operands: str) -> list[str]:
    """Splits at the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in operands:
        depth += (character in "<([{") - (character in ">)]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _conversions(width: int) -> str:
    def vector(element: str) -> str:
        return element if width == 1 else f"<{width} x {element}>"

    def splat(element: str, value: str) -> str:
        return value if width == 1 else f"<{', '.join([f'{element} {value}'] * width)}>"

    i16, i32, wide, bit = vector("i16"), vector("i32"), vector("float"), vector("i1")
    return f"""
define internal {wide} @mslc.extend.{width}({i16} %x) alwaysinline {{
  %long = zext {i16} %x to {i32}
  %bits = shl {i32} %long, {splat("i32", "16")}
  %value = bitcast {i32} %bits to {wide}
  ret {wide} %value
}}

define internal {i16} @mslc.round.{width}({wide} %x) alwaysinline {{
  %bits = bitcast {wide} %x to {i32}
  %kept = lshr {i32} %bits, {splat("i32", "16")}
  %odd = and {i32} %kept, {splat("i32", "1")}
  %half = add {i32} %odd, {splat("i32", "32767")}
  %sum = add {i32} %bits, %half
  %high = lshr {i32} %sum, {splat("i32", "16")}
  %rounded = trunc {i32} %high to {i16}
  %nan = fcmp uno {wide} %x, %x
  %value = select {bit} %nan, {i16} {splat("i16", "32704")}, {i16} %rounded
  ret {i16} %value
}}
"""
