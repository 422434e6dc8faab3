"""Classifies braces, to tell declarations in functions from those in classes and namespaces."""

from __future__ import annotations

from .lexer import TokenStream

FUNCTION, CLASS, NAMESPACE, OTHER = "function", "class", "namespace", "other"
_AFTER_PARAMETERS = frozenset(
    ("const", "thread", "device", "constant", "threadgroup", "noexcept", "override", "mutable")
)


class Structure:
    """Knows the innermost brace around every token, and the kind of each brace."""

    def __init__(self, stream: TokenStream):
        self.stream = stream
        self.enclosing: list[int] = [-1] * len(stream)  # index of the innermost '{' around each token
        self.kind: dict[int, str] = {-1: NAMESPACE}
        opened = [-1]
        for i, text in enumerate(stream.text):
            if text == "}":
                opened.pop()
            self.enclosing[i] = opened[-1]
            if text == "{":
                self.kind[i] = self._classify(i, self.kind[opened[-1]])
                opened.append(i)

    def in_function(self, i: int) -> bool:
        return self.kind[self.enclosing[i]] == FUNCTION

    def in_class(self, i: int) -> bool:
        return self.kind[self.enclosing[i]] == CLASS

    def _classify(self, brace: int, outer: str) -> str:
        stream = self.stream
        head = stream.statement_start(brace)
        words = stream.text[head:brace]
        if "namespace" in words or (words[:1] == ["extern"] and stream.kind[brace - 1] == "string"):
            return NAMESPACE
        if not words and outer in (FUNCTION, CLASS):
            return FUNCTION  # a block, or in a class the body after a braced member initialiser
        if outer == FUNCTION and words and words[-1] == ":":
            return FUNCTION  # after a case label
        declares_class = any(word in ("struct", "class", "union") for word in self._outside_brackets(head, brace))
        previous = brace - 1
        while stream.at(previous) in _AFTER_PARAMETERS:
            previous -= 1
        if stream.at(previous) == ")" or stream.at(previous) in ("else", "do", "try"):
            return FUNCTION
        if declares_class and "=" not in words:
            return CLASS
        if "enum" in words:
            return OTHER
        if outer in (CLASS, NAMESPACE) and ")" in words and "=" not in words:
            return FUNCTION  # constructor with an initialiser list, or trailing return type
        if outer == FUNCTION and "->" in words and ")" in words:
            return FUNCTION  # lambda with a return type
        return OTHER

    def _outside_brackets(self, first: int, end: int) -> list[str]:
        """Returns the words of a declaration without template parameters, function parameters and attributes."""
        words, i = [], first
        while i < end:
            text = self.stream.text[i]
            if text in ("(", "["):
                i = self.stream.partner[i]
            elif text == "<":
                i = self.stream.close_angle(i) or i
            else:
                words.append(text)
            i += 1
        return words
