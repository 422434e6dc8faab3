"""C casts to vectors: (float4)x becomes a call, because clang's cast would reinterpret the bits of a vector."""

from __future__ import annotations

from ..lexer import TokenStream

_PREFIX_OPERATORS = frozenset(("-", "+", "~", "!", "*", "&", "++", "--"))
_QUALIFIERS = frozenset(("const", "volatile", "device", "constant", "threadgroup", "thread", "typename"))
_INTEGERS = frozenset(("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "size_t"))
_TYPE_WORDS = _QUALIFIERS | _INTEGERS | {"half", "float", "bfloat", "unsigned", "signed", "metal", "::", "*", "&"}


def operand_end(stream: TokenStream, first: int, vectors: set[str]) -> int:
    """Returns the last token of a cast's operand, which consists of prefix operators, casts and a postfix expression.

    The operand starts at `first`. `vectors` are the names of vector types.
    """
    i = first
    while True:
        if stream.at(i) in _PREFIX_OPERATORS:
            i += 1
        elif stream.at(i) == "(" and _is_cast(stream, i, vectors):
            i = stream.partner[i] + 1
        else:
            return _postfix_end(stream, i)


def _is_cast(stream: TokenStream, opening: int, vectors: set[str]) -> bool:
    """Tells if the bracket at `opening` holds the type of a cast."""
    close = stream.partner[opening]
    following = stream.at(close + 1)
    if stream.kind[close + 1 : close + 2] in (["name"], ["number"]):
        return True
    words = stream.text[opening + 1 : close]
    names_type = bool(words) and (words[-1] == "*" or all(w in _TYPE_WORDS or w in vectors for w in words))
    return names_type and (following == "(" or following in _PREFIX_OPERATORS)


def _postfix_end(stream: TokenStream, i: int) -> int:
    if stream.at(i) == "::":
        i += 1
    last = stream.partner[i] if stream.at(i) in ("(", "[", "{") else i
    while True:
        following = stream.at(last + 1)
        if following in ("(", "["):
            last = stream.partner[last + 1]
        elif following in (".", "->", "::"):
            last += 3 if stream.at(last + 2) == "template" else 2
        elif following in ("++", "--"):
            last += 1
        elif following == "<":
            close = stream.close_angle(last + 1)
            if close is None or stream.at(close + 1) not in ("(", "::", "{"):
                return last
            last = close
        elif following == "{" and stream.at(last) == ">":
            last = stream.partner[last + 1]
        else:
            return last
