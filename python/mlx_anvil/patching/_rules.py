"""Rewrites statements of a function by rules: code before, and code after.

A capital letter in a rule stands for any expression, as a target for any name, and after a dot for any attribute. A
letter stands for the same code wherever it occurs. The target ``_`` matches an assignment and a ``return``::

    Rule(call, "Y = self.M(X, I); _ = (Y * W[..., None]).sum(axis=-2)", "_ = weighted_sum(self.M, X, I, W)")
"""

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from mlx_anvil.patching._code import names_of_form, nested_code, same_code
from mlx_anvil.patching._rebind import Call

Bindings = dict[str, Any]
_RESULT = "_"


class Rule:
    """Statements, and those that replace them where they follow each other in the body of a function.

    Attributes:
        call: the replacement, for the report.
        helpers: functions of the module that the statements call, and what their code has to be.
    """

    def __init__(
        self, call: Call, before: str, after: str, helpers: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        self.call = call
        self.helpers = helpers or {}
        self._before = before
        self._after = after

    # Parsed when a model is patched, not when the package is imported.

    @functools.cached_property
    def before(self) -> list[ast.stmt]:
        return ast.parse(textwrap.dedent(self._before)).body

    @functools.cached_property
    def after(self) -> list[ast.stmt]:
        return ast.parse(textwrap.dedent(self._after)).body

    @functools.cached_property
    def _names(self) -> set[str]:
        nodes = [node for statement in self.before for node in ast.walk(statement)]
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        return {name for name in attributes if not _is_variable(name)}

    @functools.cached_property
    def _targets(self) -> set[str]:
        return set(_stored(self.before))

    def _is_sound(self, found: Bindings) -> bool:
        """False if a statement assigns to a name in what a letter stands for, and a later one reads the letter.

        The statements of ``after`` would read the value from before. Letters that are targets say themselves which.
        """
        stored: set[str] = set()
        for assigned, read in _steps(self.before):
            for letter in (read - self._targets) & found.keys():
                value = found[letter]
                if isinstance(value, _Expression) and stored & _names([value.node]):
                    return False
            stored |= {found[letter].text for letter in assigned & found.keys()}
        return True

    def knows(self, globals_: Mapping[str, Any]) -> bool:
        """True if the helpers are those that the rule expects."""
        found: list[tuple[Any, Callable[..., Any]]] = [(globals_.get(name), f) for name, f in self.helpers.items()]
        return all(hasattr(f, "__code__") and names_of_form(f, form) is not None for f, form in found)

    def may_apply(self, code: CodeType) -> bool:
        """False if the code lacks a name that the rule needs."""
        return self._names <= set(code.co_names)

    def apply(self, body: list[ast.stmt], after: Sequence[ast.stmt] = ()) -> bool:
        """Replaces the first occurrence, also within ``if`` statements. ``after`` is what follows the body."""
        count = len(self.before)
        for i in range(len(body) - count + 1):
            found: Bindings = {}
            statements, later = body[i : i + count], [*body[i + count :], *after]
            if all(map(functools.partial(_matches, found=found), self.before, statements)) and self._is_sound(found):
                replacements = [_filled(s, found, statements[-1]) for s in self.after]
                if not _lost(statements, replacements) & _names(later):
                    body[i : i + count] = replacements
                    return True
        inner = ((block, i) for i, s in enumerate(body) if isinstance(s, ast.If) for block in (s.body, s.orelse))
        return any(self.apply(block, [*body[i + 1 :], *after]) for block, i in inner)


def calls_of(function: FunctionType, rules: Sequence[Rule]) -> frozenset[Call]:
    """The calls of the rules that apply to the function."""
    return _rewritten(function.__code__, _known(function, rules))[1]


def rewritten(method: FunctionType, ours: FunctionType, rules: Sequence[Rule]) -> FunctionType:
    """``ours``, a copy of ``method`` with other globals, after all rules that apply, in their order."""
    code, _ = _rewritten(method.__code__, _known(method, rules))
    copy = FunctionType(code, ours.__globals__, ours.__name__, ours.__defaults__, ours.__closure__)
    copy.__kwdefaults__ = ours.__kwdefaults__
    functools.update_wrapper(copy, method)
    return copy


def _known(function: FunctionType, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if rule.knows(function.__globals__))


@functools.lru_cache(maxsize=1024)
def _rewritten(code: CodeType, rules: tuple[Rule, ...]) -> tuple[CodeType, frozenset[Call]]:
    nothing: tuple[CodeType, frozenset[Call]] = code, frozenset()
    if not any(rule.may_apply(code) for rule in rules):
        return nothing
    try:
        # The whole file, as the code of a function depends on what its module imports.
        tree = ast.parse("".join(inspect.findsource(code)[0]))
    except (OSError, TypeError, SyntaxError):
        return nothing
    original = _compiled(tree, code)
    if original is None or not same_code(original, code):
        return nothing  # the file has changed since it was imported
    definition = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _is_of(node, code))
    calls = frozenset(rule.call for rule in rules if rule.apply(definition.body))
    result = _compiled(tree, code) if calls else None
    return nothing if result is None else (result, calls)


def _is_of(function: ast.FunctionDef, code: CodeType) -> bool:
    first = function.decorator_list[0] if function.decorator_list else function
    return first.lineno == code.co_firstlineno and function.name == code.co_name


def _compiled(tree: ast.Module, code: CodeType) -> CodeType | None:
    every = nested_code(compile(tree, code.co_filename, "exec"))
    return next((c for c in every if (c.co_firstlineno, c.co_name) == (code.co_firstlineno, code.co_name)), None)


def _is_variable(name: object) -> bool:
    return isinstance(name, str) and len(name) == 1 and name.isupper()


def _matches(pattern: Any, node: Any, found: Bindings) -> bool:
    """Compares code with that of a rule, and notes what its letters stand for."""
    if isinstance(pattern, ast.Name) and _is_variable(pattern.id):
        is_name = isinstance(node, ast.Name) or isinstance(pattern.ctx, ast.Load)
        return is_name and isinstance(node, ast.expr) and found.setdefault(pattern.id, _Expression(node)) == node
    if _is_variable(pattern):
        return isinstance(node, str) and found.setdefault(pattern, node) == node
    if _is_result(pattern) and isinstance(node, ast.Assign | ast.Return) and node.value is not None:
        return _matches(pattern.value, node.value, found)
    if isinstance(pattern, list):
        same_length = isinstance(node, list) and len(pattern) == len(node)
        return same_length and all(_matches(p, n, found) for p, n in zip(pattern, node, strict=True))
    if isinstance(pattern, ast.AST):
        fields = [field for field in pattern._fields if field not in ("ctx", "kind", "type_comment")]
        same_type = type(pattern) is type(node)
        return same_type and all(_matches(getattr(pattern, f), getattr(node, f), found) for f in fields)
    return bool(pattern == node) and type(pattern) is type(node)


class _Expression:
    """An expression that equals another one with the same code."""

    def __init__(self, node: ast.expr) -> None:
        self.node = node
        self.text = ast.unparse(node)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ast.expr) and ast.unparse(other) == self.text

    __hash__ = None  # type: ignore[assignment]


def _is_result(statement: Any) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == _RESULT


class _Fill(ast.NodeTransformer):
    def __init__(self, found: Bindings) -> None:
        self.found = found

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not _is_variable(node.id):
            return node
        expression: ast.expr = copy.deepcopy(self.found[node.id].node)
        if isinstance(expression, ast.Name):
            expression.ctx = node.ctx
        return expression

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        node.attr = self.found[node.attr] if _is_variable(node.attr) else node.attr
        return node


def _filled(statement: ast.stmt, found: Bindings, last: ast.stmt) -> ast.stmt:
    """A statement of a rule with what its letters stand for. ``_`` becomes the target of the ``last`` statement."""
    filled: Any = _Fill(found).visit(copy.deepcopy(statement))
    if _is_result(filled):
        assert isinstance(last, ast.Assign | ast.Return)  # as _matches saw
        filled = ast.Return(filled.value) if isinstance(last, ast.Return) else ast.Assign(last.targets, filled.value)
    for node in ast.walk(filled):
        if "lineno" in node._attributes:
            ast.copy_location(node, last)
    result: ast.stmt = filled
    return result


def _stored(statements: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _lost(before: Sequence[ast.stmt], after: Sequence[ast.stmt]) -> set[str]:
    """Names that statements assign and their replacements do not."""
    return set(_stored(before)) - set(_stored(after))


def _steps(statements: Sequence[ast.stmt]) -> Iterator[tuple[set[str], set[str]]]:
    """The names that each statement assigns, and those that it reads before, in the order of the code."""
    for statement in statements:
        if isinstance(statement, ast.If):
            yield set(), _names([statement.test])
            yield from _steps(statement.body)
            yield from _steps(statement.orelse)
        else:
            yield set(_stored([statement])), _names([statement])


def _names(statements: Sequence[ast.AST]) -> set[str]:
    return {node.id for s in statements for node in ast.walk(s) if isinstance(node, ast.Name)}
