"""Vector constructors and casts, which upstream clang interprets differently; see shim/convert.h."""

from __future__ import annotations

from ..lexer import TokenStream
from ..structure import FUNCTION, Structure
from .casts import operand_end

_SCALARS = ["bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float", "bfloat"]
_ANY_VECTOR = "mslc_any_vec"  # vec<T, N> for every T including bool; see shim/bool_vec.h
_VECTORS = frozenset(f"{prefix}{scalar}{n}" for scalar in _SCALARS for n in (2, 3, 4) for prefix in ("", "packed_"))
_BEFORE_INITIALISERS = frozenset((")", "thread", "device", "constant", "threadgroup", "noexcept"))
# After these words a type name starts an expression, not a declaration.
_EXPRESSION_KEYWORDS = frozenset(("return", "case", "else", "do", "throw", "co_return"))


def rewrite_vectors(stream: TokenStream, structure: Structure) -> None:
    names, templates = _vector_aliases(stream)

    members: dict[tuple[int, str], str] = {}  # (brace of the class, name of a vector member): its type
    for i in range(len(stream)):
        text = stream.text[i]
        if text == "static_cast":
            stream.replace(i, "::mslc::cast")
        elif text == "as_type":
            stream.replace(i, "::mslc::as_type")
        elif stream.kind[i] == "name" and (text in names or text in templates):
            last = i
            if text in templates:
                if stream.at(i + 1) != "<":
                    continue
                close = stream.close_angle(i + 1)
                if close is None:
                    continue
                last = close
                if text == "vec" and _may_hold_bool(stream, structure, i):
                    stream.replace(i, _ANY_VECTOR)
            first = _qualified_start(stream, i)
            if structure.in_class(i) and stream.kind[last + 1] == "name" and stream.at(last + 2) in (";", ",", "="):
                members[structure.enclosing[i], stream.text[last + 1]] = _type_text(stream, first, last)
            _rewrite_use(stream, structure, first, last, names)
    _rewrite_member_initialisers(stream, structure, members)


def _may_hold_bool(stream: TokenStream, structure: Structure, i: int) -> bool:
    """Tells if `vec<T, N>` at i may have bool elements, which need a type of mslc instead of clang's.

    The answer is no where T may be deduced: in parameters, in partial specialisations and in alias templates.
    """
    if stream.at(i + 2) == "bool":
        return True
    if stream.text[i + 2] in _SCALARS:
        return False
    if structure.in_function(i):
        return True
    start = stream.statement_start(i)
    declares_member = structure.in_class(i) and "(" not in stream.text[start:i] and "<" not in stream.text[start:i]
    return declares_member and "operator" not in stream.text[start:i]


def _type_text(stream: TokenStream, first: int, last: int) -> str:
    """Returns a vector type as the rewritten source spells it."""
    text = stream.joined(first, last)
    return text.replace("vec <", f"{_ANY_VECTOR} <") if "vec <" in text and "packed_vec" not in text else text


def _rewrite_member_initialisers(
    stream: TokenStream, structure: Structure, members: dict[tuple[int, str], str]
) -> None:
    """Rewrites constructors that initialise a vector member from several values: S() : v(a, b) {}"""
    for brace, kind in structure.kind.items():
        if kind != FUNCTION or not structure.in_class(brace):
            continue
        i = stream.statement_start(brace)
        while i < brace and not (stream.text[i] == ":" and stream.at(i - 1) in _BEFORE_INITIALISERS):
            i = stream.partner[i] + 1 if stream.text[i] in ("(", "[") else i + 1
        while i < brace:
            opening = i + 2
            if stream.at(opening) not in ("(", "{"):
                break
            vector = members.get((structure.enclosing[brace], stream.text[i + 1]))
            if vector and stream.at(opening) == "(" and stream.partner[opening] > opening + 1:
                stream.insert_after(opening, f"::mslc::make<{vector}>(")
                stream.insert_before(stream.partner[opening], ")")
            i = stream.partner[opening] + 1


def _rewrite_use(stream: TokenStream, structure: Structure, first: int, last: int, names: set[str]) -> None:
    """Rewrites one use of the vector type in tokens first..last."""
    following = stream.at(last + 1)
    if following == "(":
        before = stream.at(first - 1)
        declares = stream.kind[first - 1] == "name" if first else False
        if before in ("operator", "::", "struct", "class") or (declares and before not in _EXPRESSION_KEYWORDS):
            return
        if stream.at(last + 2) == "*":
            return  # parenthesised declarator
        stream.insert_before(first, "::mslc::make<")
        stream.insert_after(last, ">")
    elif following == ")" and stream.at(first - 1) == "(" and _is_cast_operand(stream, first, last + 2):
        stream.replace(first - 1, "::mslc::make<")
        stream.replace(last + 1, ">(")
        stream.insert_after(operand_end(stream, last + 2, names), ")")
    elif structure.in_function(first):
        _rewrite_declaration(stream, first, last)


def _rewrite_declaration(stream: TokenStream, first: int, last: int) -> None:
    """Rewrites declarations with parenthesised initialisers: float2 v(x, y), w(0);"""
    name = last + 1
    while stream.kind[name : name + 1] == ["name"] and stream.at(name + 1) == "(":
        after = stream.partner[name + 1] + 1
        if stream.at(after) not in (";", ",") or stream.at(name + 2) == ")":
            return
        stream.insert_before(name + 1, f" = ::mslc::make<{_type_text(stream, first, last)}>")
        if stream.at(after) == ";":
            return
        name = after + 1


def _is_cast_operand(stream: TokenStream, first: int, operand: int) -> bool:
    """Tells if '(type)' before `operand` is a cast, rather than sizeof(type), f(type) or a parameter list."""
    before = stream.at(first - 2)
    if before == ")" and stream.at(stream.partner[first - 2] - 1) == "operator":
        return False
    if (stream.kind[first - 2 : first - 1] == ["name"] and before not in _EXPRESSION_KEYWORDS) or before in ("]", ">"):
        return False
    kind = stream.kind[operand : operand + 1]
    return kind in (["name"], ["number"]) or stream.at(operand) in ("(", "-", "+", "~", "!", "*")


def _qualified_start(stream: TokenStream, i: int) -> int:
    if stream.at(i - 1) == "::" and stream.at(i - 2) == "metal":
        i -= 2
    if stream.at(i - 1) == "::" and stream.kind[i - 2] != "name":
        i -= 1
    if stream.at(i - 1) == "typename":
        i -= 1
    return i


def _vector_aliases(stream: TokenStream) -> tuple[set[str], set[str]]:
    """Collects the names of vector types and of templates for vector types, `vec` included."""
    names, templates = set(_VECTORS), {"vec", "packed_vec"}

    def names_vector(first: int, end: int) -> bool:
        while stream.at(first) in ("typename", "metal", "::", "const"):
            first += 1
        if stream.at(first) in templates and stream.at(first + 1) == "<":
            return stream.close_angle(first + 1) == end - 1
        return end == first + 1 and stream.at(first) in names

    for i, text in enumerate(stream.text):
        if text == "typedef":
            end = stream.text.index(";", i)
            if names_vector(i + 1, end - 1):
                names.add(stream.text[end - 1])
        elif text == "using" and stream.at(i + 2) == "=":
            end = stream.text.index(";", i)
            if names_vector(i + 3, end):
                (templates if stream.at(i - 1) == ">" else names).add(stream.text[i + 1])
    return names, templates
