"""A griffe extension: functions that a stub gives as overloads only.

nanobind writes ``_ext.pyi`` with one signature for each way of calling an op and the docstring at the last. A stub has no
implementation behind its overloads, without which griffe drops the function; here the last overload stands for it.
"""

import ast
from typing import Any

import griffe


class StubOverloads(griffe.Extension):
    """Gives every function of a stub a member of its own, with all signatures."""

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
