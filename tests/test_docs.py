"""The README and the pages under docs/ say what is true: their code runs, as written (``documents.py`` says how)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import documents

pytestmark = pytest.mark.cpu_only

PAGES = {str(page.relative_to(documents.ROOT)): page for page in documents.pages()}

# Blocks that are not run, for the reason that the page gives in a comment above. A new one is to be counted here.
NOT_RUN = {
    "README.md": 1,
    "docs/backends.md": 1,
    "docs/macos.md": 1,
}


def code_blocks(page: Path) -> list[documents.Block]:
    return [block for block in documents.read_blocks(page) if block.is_code]


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if code_blocks(page)])
def test_code_runs(name):
    result = subprocess.run([sys.executable, documents.__file__, PAGES[name]], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_blocks_that_are_not_run_are_counted():
    counts = {name: sum(not block.runs for block in code_blocks(page)) for name, page in PAGES.items()}
    assert {name: count for name, count in counts.items() if count} == NOT_RUN


def test_python_is_not_left_out():
    """Only commands may be: they need another machine, or are what CI runs anyway."""
    for page in PAGES.values():
        for block in code_blocks(page):
            assert block.runs or block.language in documents.SHELLS or block.note.startswith("Linux:"), block.place


@pytest.mark.parametrize("code", ["print(1)", "raise SystemExit(3)"])
def test_a_wrong_page_is_found(tmp_path, code):
    """Output that is not shown, and code that fails."""
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{code}\n```\n```text\n2\n```\n")
    result = subprocess.run(
        [sys.executable, "-c", f"import documents; documents.ROOT = documents.Path({str(tmp_path)!r}); "
         f"documents.run_page(documents.Path({str(page)!r}))"],
        cwd=Path(documents.__file__).parent, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode != 0
    assert re.search(r"'2' is not in the output|", result.stderr)
