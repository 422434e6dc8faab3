"""The notebooks run on a CPU and show the committed outputs."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import documents
import run_notebooks

pytestmark = pytest.mark.cpu_only

NAMES = [path.name for path in run_notebooks.NOTEBOOKS]


def shown(notebook: nbformat.NotebookNode) -> list[tuple[str, int]]:
    """What each code cell printed, with # for numbers, and how many pictures it drew."""
    result = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
            pictures = sum("image/png" in output.get("data", {}) for output in cell.outputs)
            result.append((re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "#", printed), pictures))
    return result


def test_there_are_notebooks():
    assert NAMES == ["quickstart.ipynb", "write_a_kernel.ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, tmp_path):
    if name == "write_a_kernel.ipynb" and sys.platform != "linux":
        pytest.skip("the simulator runs on Linux")
    committed = run_notebooks.ROOT / "notebooks" / name
    copy = tmp_path / name
    copy.write_text(committed.read_text())
    result = subprocess.run([sys.executable, run_notebooks.__file__, copy], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert shown(nbformat.read(copy, as_version=4)) == shown(nbformat.read(committed, as_version=4))


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebooks_are_clean(name):
    """In order, with their pictures, small, and without a machine's paths."""
    path = run_notebooks.ROOT / "notebooks" / name
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(pictures for _, pictures in shown(notebook)) >= 2
    assert path.stat().st_size < 150_000
    assert notebook.metadata == run_notebooks.METADATA
    for cell in cells:
        assert not [
            output for output in cell.outputs if output.output_type == "error" or output.get("name") == "stderr"
        ]
        assert not re.search(r"/(home|tmp|root|Users)/", str(cell.outputs))


@pytest.mark.parametrize("name", NAMES)
def test_links_of_notebooks_lead_somewhere(name):
    notebook = nbformat.read(run_notebooks.ROOT / "notebooks" / name, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith("https://")]
    assert links
    assert not [link for link in links if not (run_notebooks.ROOT / "notebooks" / link).is_file()]


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_linked_from_the_pages(name):
    pages = "\n".join(page.read_text() for page in Path(documents.ROOT, "docs").glob("*.md"))
    assert f"(../notebooks/{name})" in pages
