"""Extensions of griffe, which reads the docstrings for the API pages."""

import ast
import re
from typing import Any

import griffe


class StubOverloads(griffe.Extension):
    """Handles functions that a stub declares only as overloads.

    nanobind writes ``_ext.pyi`` with one signature for each way of calling an op, and puts the docstring on the last.
    griffe drops overloads without an implementation, which a stub does not have, so the last overload stands in for it.
    """

    def on_module_members(
        self,
        *,
        node: ast.AST | griffe.ObjectNode,
        mod: griffe.Module,
        agent: griffe.Visitor | griffe.Inspector,
        **_: Any,
    ) -> None:
        """Runs after a module is read."""
        for name, overloads in mod.overloads.items():
            if overloads and name not in mod.members:
                last = overloads[-1]
                function = griffe.Function(
                    name,
                    parameters=last.parameters,
                    returns=last.returns,
                    docstring=last.docstring,
                    lineno=last.lineno,
                    endlineno=last.endlineno,
                )
                function.overloads = overloads[:-1]
                mod.set_member(name, function)


class Roles(griffe.Extension):
    """Turns ``:func:`` and ``:class:`` in docstrings into links."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Runs after an object and its members are read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r":(?:func|class):`~?([\w.]+)`", r"[`\1`][\1]", obj.docstring.value)
