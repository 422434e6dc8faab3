"""Runs the notebooks and writes their outputs into them: ``python tests/run_notebooks.py [NOTEBOOK]...``."""

import sys
import tempfile
from pathlib import Path

from mlx_anvil._extras import missing

try:
    import nbformat
    from nbclient import NotebookClient
except ModuleNotFoundError as error:
    raise missing(error, "test") from None

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run(path: Path) -> nbformat.NotebookNode:
    """Runs every cell in a folder of its own. Returns the notebook with what its readers shall see.

    That is without messages on stderr, times and names of this machine.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    """Runs the named notebooks, or all."""
    for path in map(Path, sys.argv[1:] or NOTEBOOKS):
        nbformat.write(run(path), path)
        print(f"written: {path}, {path.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
