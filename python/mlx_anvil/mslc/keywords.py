"""Keywords of the language, which name nothing in a namespace and are not available as identifiers."""

from __future__ import annotations

from .lexer import SourceError, TokenStream

CASTS = frozenset(("static_cast", "reinterpret_cast", "const_cast", "dynamic_cast", "as_type"))
# Metal's keywords in addition to those of C++. Types such as `half` and `uint` are members of namespace metal instead.
METAL = frozenset(
    (
        "as_type",
        "constant",
        "device",
        "thread",
        "threadgroup",
        "threadgroup_imageblock",
        "ray_data",
        "object_data",
        "kernel",
        "vertex",
        "fragment",
    )
)
_CPP_WORDS = """
    alignas alignof auto bool break case catch char class const constexpr continue decltype default do double
    else enum explicit extern false float for friend goto if inline int long mutable namespace noexcept
    nullptr private protected public return short signed sizeof static static_assert struct switch this throw
    true try typedef typeid typename union unsigned using virtual void volatile while
"""
# After `::` C++ allows `template`, `operator`, `new` and `delete`, so they are left out.
NEVER_QUALIFIED = METAL | CASTS | frozenset(_CPP_WORDS.split())


def reject_misused_keywords(stream: TokenStream) -> None:
    """Raises SourceError if a namespace qualifies a keyword, or if a cast operator lacks its type."""
    for i, text in enumerate(stream.text):
        if stream.kind[i] != "name":
            continue
        if text in NEVER_QUALIFIED and stream.at(i - 1) == "::":
            raise SourceError(
                f"'{_qualified(stream, i)}': '{text}' is a keyword and belongs to no namespace", stream.position(i)
            )
        if text in CASTS and stream.at(i + 1) != "<":
            raise SourceError(f"'{text}' is a cast operator: {text}<T>(x)", stream.position(i))


def _qualified(stream: TokenStream, i: int) -> str:
    """Returns the qualified name that ends at token i, as the author wrote it."""
    first = i - 1
    if first > 0 and stream.kind[first - 1] == "name":
        first -= 1
    return "".join(stream.text[first : i + 1])
