"""Writes the lists of ops that the package exports: python tools/exports.py

Type checkers and editors read the names of ops in the source of two ``__init__.py``: in imports and in ``__all__``.
This takes them from the extension and from the modules of ``reference/``. tests/documentation/test_exports.py compares.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlx_anvil import _ext

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "mlx_anvil"
OF_EXTENSION = re.compile(r"^from mlx_anvil\._ext import \([^)]*\)\n", re.MULTILINE)
OF_REFERENCE = re.compile(r"(?:^from mlx_anvil\.reference\.\w+ import (?:\([^)]*\)|.*)\n)+", re.MULTILINE)
LISTED = re.compile(r"^__all__ = \[\n[^]]*\]\n", re.MULTILINE)
LINE_LENGTH = 120


def ops() -> list[str]:
    """Returns the names of the extension's ops, in alphabetical order."""
    return sorted(name for name in dir(_ext) if not name.startswith("_"))


def definitions() -> dict[str, list[str]]:
    """Returns the definitions of ops by module of ``reference/``."""
    found = {}
    for path in sorted((PACKAGE / "reference").glob("[!_]*.py")):
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        found[path.stem] = sorted(functions & set(ops()))
    return found


def exports() -> Iterator[tuple[Path, str]]:
    """Yields the two files and what they should be."""
    path = PACKAGE / "__init__.py"
    lines = "".join(f"    {name},\n" for name in ops())
    check_first = "  # noqa: E402"  # as the imports around it
    yield (
        path,
        rewritten(path.read_text(), OF_EXTENSION, f"from mlx_anvil._ext import ({check_first}\n{lines})\n", ops()),
    )
    path = PACKAGE / "reference" / "__init__.py"
    imports = "".join(_import(f"mlx_anvil.reference.{module}", names) for module, names in definitions().items())
    names = [name for of_module in definitions().values() for name in of_module]
    yield path, rewritten(path.read_text(), OF_REFERENCE, imports, names)


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}\n"
    if len(line) - 1 > LINE_LENGTH:
        return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"
    return line if names else ""


def rewritten(source: str, block: re.Pattern[str], imports: str, names: Iterable[str]) -> str:
    """Returns ``source`` with ``imports`` in place of the block, and their names in ``__all__``."""
    (old,) = block.findall(source)
    (listed,) = LISTED.findall(source)
    imported = {alias.name for node in ast.parse(old).body if isinstance(node, ast.ImportFrom) for alias in node.names}
    kept = set(re.findall(r'"(\w+)"', listed)) - imported
    everything = "".join(f'    "{name}",\n' for name in sorted(kept.union(names)))
    return source.replace(old, imports).replace(listed, f"__all__ = [\n{everything}]\n")


if __name__ == "__main__":
    for path, text in exports():
        path.write_text(text)
