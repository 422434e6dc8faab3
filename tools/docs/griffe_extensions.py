"""Extensions of griffe, which reads the docstrings for the API pages."""

import ast
import re
from typing import Any

import griffe


class StubOverloads(griffe.Extension):
    """Functions that a stub gives as overloads only.

    nanobind writes ``_ext.pyi`` with one signature for each way of calling an op and the docstring at the last. A stub has no
    implementation behind its overloads, without which griffe drops the function; here the last overload stands for it.
    """

    def on_module_members(
        self,
        *,
        node: ast.AST | griffe.ObjectNode,
        mod: griffe.Module,
        agent: griffe.Visitor | griffe.Inspector,
        **_: Any,
    ) -> None:
        """Runs when a module has been read."""
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
    """``:func:`` and ``:class:`` in a docstring become links."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Runs when an object and what is in it have been read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r":(?:func|class):`~?([\w.]+)`", r"[`\1`][\1]", obj.docstring.value)
