"""Matrix products in PTX text: merges 8x8x8 pseudo-instructions into mma.sync instructions that fill the unit.

`shim/ptx/matrix_ptx.h` emits `mslc.mma.<type> {d0, d1}, {a...}, {b...}, {c0, c1};` for each simdgroup multiplication.
Alone, it becomes the upper half of an m16n8k8. Two products that share `b` are vertically adjacent and become one
instruction. Two full-height 16-bit products become one m16n8k16 if the second accumulates onto the first and nothing
else reads the first result. A double transpose is removed.

The compiler assigns each register once, apart from loop variables, and the reordered instructions have no side effects.
So within a block it is enough to compare the registers that the statements in between read and write.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .ptx_ldmatrix import merge_loads, turn_loads

_PRODUCT = re.compile(r"^\s*mslc\.mma\.(\w+) \{(.*?)\}, \{(.*?)\}, \{(.*?)\}, \{(.*?)\};")
_TRANSPOSE = re.compile(r"^\s*movmatrix\.\S+ (%r\d+), (%r\d+);")
_REGISTER = re.compile(r"%[a-z]+\d+")
_STATEMENT = re.compile(r"^\s*([a-z][\w.:]*)\s+(.*);")
_BLOCK_END = re.compile(r"^\s*(\$\w+:|(@!?%p\d+ )?bra\b|ret;|exit;|trap;|call|\{|\}|brx)")
_WITHOUT_RESULT = ("st.", "red.", "bar.", "barrier.", "membar", "fence", "bra", "prefetch", "discard", "cp.")
_PURE = re.compile(r"^\s*(mov|cvt|add|sub|mul|fma|mad|neg|abs|and|or|xor|not|shl|shr|prmt|selp|setp|movmatrix|shfl)\.")

# Register names for the missing lower half of a product.
_ZERO, _UNUSED = "%mslc_zero", ("%mslc_unused_0", "%mslc_unused_1")
_FILL_DECLARATIONS = f"\t.reg .b32 {_ZERO}, {', '.join(_UNUSED)};\n\tmov.b32 {_ZERO}, 0;"


@dataclass
class Product:
    """One or two (upper, lower) 8x8 results. `a` and `b` have one entry per 8 elements of the inner dimension."""

    type: str
    d: list[tuple[str, ...]]
    a: list[list[tuple[str, ...]]]  # [inner][upper, lower]
    b: list[tuple[str, ...]]  # [inner]
    c: list[tuple[str, ...]]

    @property
    def text(self) -> str:
        lower = len(self.d) == 2
        d = [*self.d[0], *(self.d[1] if lower else _UNUSED)]
        c = [*self.c[0], *(self.c[1] if lower else (_ZERO, _ZERO))]
        a = []
        for halves in self.a:
            for i, upper in enumerate(halves[0]):
                a += [upper, halves[1][i] if lower else _ZERO]
        b = [register for inner in self.b for register in inner]
        depth = 8 * len(self.b)
        shape = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{self.type}.{self.type}.f32"
        groups = ", ".join("{" + ", ".join(group) + "}" for group in (d, a, b, c))
        return f"\t{shape} {groups};"


def _registers(*operands: list[tuple[str, ...]]) -> frozenset[str]:
    return frozenset(register for groups in operands for group in groups for register in group)


@dataclass
class _Statement:
    text: str
    writes: frozenset[str]
    reads: frozenset[str]
    product: Product | None = None

    @property
    def is_pure(self) -> bool:
        """Tells if the statement may move up: it depends on registers only and has no side effects."""
        return _PURE.match(self.text) is not None

    @classmethod
    def parse(cls, line: str) -> _Statement:
        found = _PRODUCT.match(line)
        if found:
            kind, *registers = found.groups()
            d, a, b, c = (tuple(group.split(", ")) for group in registers)
            return cls.of(Product(kind, [d], [[a]], [b], [c]))
        code = line.split("//")[0]
        everything = frozenset(_REGISTER.findall(code))
        found = _STATEMENT.match(code)
        if not found or not everything:
            return cls(line, everything, everything)
        opcode, operands = found.groups()
        if opcode.startswith(_WITHOUT_RESULT):
            return cls(line, frozenset(), everything)
        end = operands.index("}") if operands.startswith("{") else operands.find(",")
        writes = frozenset(_REGISTER.findall(operands[:end] if end >= 0 else operands))
        reads = frozenset(_REGISTER.findall(operands[end:])) if end >= 0 else frozenset()
        return cls(line, writes, reads)

    @classmethod
    def of(cls, product: Product) -> _Statement:
        reads = _registers(*product.a, product.b, product.c)
        return cls("", _registers(product.d), reads, product)


def expand_products(text: str) -> str:
    """Expands all pseudo-instructions. Text without any is returned unchanged."""
    if "mslc.mma." not in text and "ldmatrix" not in text:
        return text
    output: list[str] = []
    function: list[str] | None = None
    for line in text.split("\n"):
        if function is None:
            output.append(line)
            if line == "{":
                function = []
        elif line == "}":
            output += [*merge_loads(_expand_function(turn_loads(function))), line]
            function = None
        else:
            function.append(line)
    return "\n".join(output)


def _expand_function(lines: list[str]) -> list[str]:
    if not any("mslc.mma." in line for line in lines):
        return lines
    statements = [_Statement.parse(line) for line in _without_double_transposes(lines)]
    readers = Counter(register for statement in statements for register in statement.reads)
    output: list[str] = []
    block: list[_Statement] = []
    for statement in statements:
        if _BLOCK_END.match(statement.text):
            output += _expand_block(block, readers)
            block = []
            output.append(statement.text)
        else:
            block.append(statement)
    output += _expand_block(block, readers)
    if any(_ZERO in line for line in output):
        output.insert(0, _FILL_DECLARATIONS)
    return output


def _without_double_transposes(lines: list[str]) -> list[str]:
    statements = [_Statement.parse(line) for line in lines]
    assigned = Counter(register for statement in statements for register in statement.writes)
    readers = Counter(register for statement in statements for register in statement.reads)
    made_of = {found[1]: found[2] for line in lines if (found := _TRANSPOSE.match(line)) and assigned[found[1]] == 1}
    transposes = Counter(made_of.values())
    original: dict[str, str] = {}
    copies: set[str] = set()  # these transposes become copies, because branches may reassign their operand later
    for result, once in made_of.items():
        if once not in made_of:
            continue
        if assigned[made_of[once]] == 1:
            original[result] = made_of[once]
        elif readers[once] == transposes[once]:
            original[result] = once
            copies.add(once)
    if not original:
        return lines
    renamed = []
    for line in lines:
        found = _TRANSPOSE.match(line)
        if found and found[1] in copies:
            renamed.append(f"\tmov.b32 {found[1]}, {found[2]};")
        elif not found or found[1] not in original:
            renamed.append(_REGISTER.sub(lambda register: original.get(register[0], register[0]), line))
    read = Counter(register for line in renamed for register in _Statement.parse(line).reads)
    return [line for line in renamed if not (found := _TRANSPOSE.match(line)) or read[found[1]]]


def _expand_block(block: list[_Statement], readers: Counter[str]) -> list[str]:
    if any(statement.product for statement in block):
        _merge(block, _stacked)
        _merge(block, lambda first, second: _chained(first, second, readers))
    return [statement.product.text if statement.product else statement.text for statement in block]


def _stacked(first: Product, second: Product) -> Product | None:
    if first.type != second.type or first.b != second.b or len(first.d) == 2 or len(second.d) == 2:
        return None
    if _registers(first.d) & (_registers(*second.a, second.c) | _registers(second.d)):
        return None  # the second accumulates onto the first, so they cannot run side by side
    a = [[upper[0], lower[0]] for upper, lower in zip(first.a, second.a, strict=True)]
    return Product(first.type, first.d + second.d, a, first.b, first.c + second.c)


def _chained(first: Product, second: Product, readers: Counter[str]) -> Product | None:
    if first.type not in ("f16", "bf16") or second.type != first.type or second.c != first.d:
        return None
    if len(first.b) + len(second.b) > 2 or any(readers[r] != 1 for d in first.d for r in d):
        return None
    return Product(first.type, second.d, first.a + second.a, first.b + second.b, first.c)


def _merge(block: list[_Statement], combine: Callable[[Product, Product], Product | None]) -> None:
    """Replaces two products by one wherever `combine` returns a product and the order of the block permits it."""
    i = 0
    while i < len(block):
        first = block[i].product
        if first:
            for j in range(i + 1, len(block)):
                second = block[j].product
                product = combine(first, second) if second else None
                if product and _place_together(block, i, j, product):
                    i -= 1  # another statement may now be at i, so look there again
                    break
        i += 1


def _place_together(block: list[_Statement], i: int, j: int, product: Product) -> bool:
    """Moves statement i down and statement j up to one place between them, as early as possible."""
    needed = block[j].reads - block[i].writes
    place = max((k for k in range(i + 1, j) if block[k].writes & needed), default=i)
    if not _can_move(block, i, place, j):
        moved = _raise_operands(block, i, j)
        if moved is None:
            return False
        i = place = moved
    del block[j]
    block.insert(place + 1, _Statement.of(product))
    del block[i]
    return True


def _can_move(block: list[_Statement], i: int, place: int, j: int) -> bool:
    first, second = block[i], block[j]
    for statement in block[i + 1 : place + 1]:  # these would come before `first`
        if statement.reads & first.writes or statement.writes & (first.reads | first.writes):
            return False
    # These would come after `second`.
    return not any((s.reads | s.writes) & second.writes for s in block[place + 1 : j])


def _raise_operands(block: list[_Statement], i: int, j: int) -> int | None:
    """Moves the statements that compute j's operands above i. Returns the new position of i, or None on failure."""
    first, second = block[i], block[j]
    needed = set(second.reads)
    raised: list[int] = []
    for k in range(j - 1, i, -1):
        statement = block[k]
        if statement.writes & needed:
            if not statement.is_pure:
                return None
            needed |= statement.reads
            raised.append(k)
        elif (statement.reads | statement.writes) & second.writes:
            return None
    if needed & first.writes:
        return None
    # A raised statement must not overtake one that reads or writes its result.
    for k in raised:
        for other in range(i, k):
            if other not in raised and (block[other].reads | block[other].writes) & block[k].writes:
                return None
    rest = [block[k] for k in range(i, j) if k not in raised]
    block[i:j] = [block[k] for k in sorted(raised)] + rest
    return i + len(raised)
