"""Every public name has a docstring with arguments, results and errors, and an entry on an API page."""

import inspect
import re
from pathlib import Path

import pytest

from op_pages import with_entries
from public_names import CLASSES, FUNCTIONS, NAMES, OPS, parameters

pytestmark = pytest.mark.cpu_only

API = Path(__file__).resolve().parents[2] / "docs" / "api"
# Functions without arguments, or that refuse nothing; what the pages say of them is complete.
REFUSE_NOTHING = {"mlx_anvil.info", "mlx_anvil.trace", "mlx_anvil.lm.reports", "mlx_anvil.lm.unpatch_all"}


def section(doc: str, title: str) -> str:
    """The indented text under ``title:``; empty where there is none."""
    found = re.search(rf"^{title}:\n((?:[ \t]+\S.*\n?|\n)+)", inspect.cleandoc(doc) + "\n", re.MULTILINE)
    return found[1] if found else ""


def test_the_names_are_found():
    assert len(OPS) >= 13
    assert len(FUNCTIONS) >= 6
    assert len(CLASSES) >= 12


@pytest.mark.parametrize("path", sorted(OPS | FUNCTIONS))
def test_functions_say_what_goes_in_and_out(path):
    function = NAMES[path]
    doc = function.__doc__ or ""
    if path in OPS:  # behind the signatures
        doc = doc[doc.rindex("\n\n", 0, doc.index("Formula:")) :] if "Formula:" in doc else ""
        assert doc, "an op says its formula"
    given = section(doc, "Args")
    missing = [name for name in parameters(function) if not re.search(rf"^\s+{name}\b.*:", given, re.MULTILINE)]
    assert not missing
    if path in OPS:
        assert section(doc, "Returns")
        for error in ("TypeError", "ValueError"):
            assert re.search(rf"^\s+{error}: ", section(doc, "Raises"), re.MULTILINE), error
    returns_nothing = inspect.isfunction(function) and inspect.signature(function).return_annotation in (None, "None")
    if not returns_nothing:
        assert section(doc, "Returns") or section(doc, "Yields")
    if path not in REFUSE_NOTHING:
        assert section(doc, "Raises")


@pytest.mark.parametrize("path", sorted(CLASSES))
def test_classes_have_docstrings(path):
    doc = NAMES[path].__doc__ or ""
    assert len(doc) > 20
    assert not re.match(r"\w+\(", doc), "what dataclass writes where there is none"


@pytest.mark.parametrize("path", sorted(NAMES))
def test_every_name_has_an_entry_in_the_pages(path):
    text = "\n".join(with_entries(page.read_text()) for page in API.glob("*.md"))
    entries = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert path in entries
    assert len(entries) == len(set(entries))
