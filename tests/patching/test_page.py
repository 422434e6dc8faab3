"""docs/patched-models.md says what the models do now."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.slow
def test_the_matrix_is_that_of_this_build():
    spec = importlib.util.spec_from_file_location("patch_matrix", DOCS / "patch_matrix.py")
    matrix = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(matrix)
    assert matrix.PAGE.read_text() == matrix.page_with("\n".join(matrix.table()))
