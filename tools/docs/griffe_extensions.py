"""Extensions of griffe, which reads the docstrings for the API pages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]


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


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    """Everything that is defined in ``parent``, not what it imports."""
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            yield member
            if member.is_module or member.is_class:
                yield from _objects(member)


def _binding(name: str) -> tuple[str, int]:
    """The file and line that bind an op, a class or its attribute: its stub is not in the repository."""
    constant = "k" + name.title().replace("_", "")
    of_op = rf'\bm\.def\(\s*(?:"{name}"|{constant})[,\s]'
    of_class = rf'\bnb::class_<\w+>\(\s*m, "{name}"|\.def_ro\("{name}"'
    for path in sorted((ROOT / "csrc").glob("*/python*.cpp")):
        text = path.read_text()
        if found := re.search(f"{of_op}|{of_class}", text):
            return path.relative_to(ROOT).as_posix(), text.count("\n", 0, found.end()) + 1
    raise LookupError(f"no csrc/*/python*.cpp binds {name}")


class Links(griffe.Extension):
    """Adds links to docstrings: ``:func:`` and ``:class:`` lead to their entries, and a line at the end to the
    source."""

    def __init__(self) -> None:
        super().__init__()
        found = re.search(r'^Repository = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert found, "pyproject.toml has [project.urls] with a Repository"
        self.repository = found[1]

    def _source(self, obj: griffe.Object) -> str:
        path, line = f"python/{obj.relative_package_filepath.as_posix()}", obj.lineno
        if path.endswith("/_ext.pyi"):
            path, line = _binding(obj.name)
        return f"[Source: `{path}`]({self.repository}/blob/main/{path}#L{line})" + "{ .source }"

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Runs after a package is read."""
        if pkg.name != "mlx_anvil":
            return
        for obj in _objects(pkg):
            if obj.docstring and not obj.name.startswith("_"):
                text = re.sub(r":(?:func|class):`~?([\w.]+)`", r"[`\1`][\1]", obj.docstring.value)
                if not obj.is_module:
                    text = f"{text.rstrip()}\n\n{self._source(obj)}"
                obj.docstring.value = text
        # A function that has the name of its module hides the module, for readers as for Python.
        mslc = pkg["mslc"]
        mslc.set_member("metal_kernel", mslc["metal_kernel.metal_kernel"])
