"""Every public op can be found in one guess: by its name, or by that of the folder of csrc/ that defines it."""

from pathlib import Path

import pytest

import op_pages
from mlx_anvil.reference import OPS

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [path for path in sorted((ROOT / "csrc").iterdir()) if path.is_dir() and path.name != "common"]
NAMES = sorted({spec.name for spec in OPS.values()})
PLACES = (
    *("csrc/{}/{}.cpp", "csrc/{}/python.cpp", "csrc/{}/simd/*.cpp", "metal/{}/*.metal"),
    *("python/mlx_anvil/reference/{}.py", "tests/{}/test_*.py", "tests/{}/launches.py"),
    *("tests/{}/checked.py", "bench/{}.py"),
    *("docs/{}.md", "docs/design/{}.md"),
)


def folders_that_define(op: str) -> list[str]:
    """The folder of that name, or those whose sources call an op by it."""
    named = [path.name for path in FOLDERS if path.name == op]
    return named or [path.name for path in FOLDERS if any(f'"{op}"' in file.read_text() for file in path.glob("*.cpp"))]


@pytest.mark.parametrize("op", NAMES)
def test_one_folder_defines_an_op(op):
    assert len(folders_that_define(op)) == 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("folder", [path.name for path in FOLDERS])
def test_an_op_has_its_files(folder, place):
    path = place.replace("{}", folder)
    assert list(ROOT.glob(path)), f"no {path}"


def test_folders_are_those_of_ops():
    assert {path.name for path in FOLDERS} == {folder for op in NAMES for folder in folders_that_define(op)}


def test_the_site_lists_every_op():
    nav = [{"Ops": ["ops.md", "{op}.md"]}, {"Design": [{"CUDA": "design/cuda.md"}, "design/{op}.md"]}]
    ops, design = op_pages.with_pages(nav)
    folders = [path.name for path in FOLDERS]
    assert ops["Ops"][0] == "ops.md"
    assert [page for entry in ops["Ops"][1:] for page in entry.values()] == [f"{name}.md" for name in folders]
    assert design["Design"][0] == {"CUDA": "design/cuda.md"}
    assert [page for entry in design["Design"][1:] for page in entry.values()] == [f"design/{n}.md" for n in folders]
    assert {"rope and rope_qk": "rope.md"} in ops["Ops"]
    assert {"rope and rope_qk": "design/rope.md"} in design["Design"]
    text = op_pages.with_entries("# Ops\n\n::: mlx_anvil.{op}\n")
    assert set(NAMES) <= {line.removeprefix("::: mlx_anvil.") for line in text.splitlines()[2:]}


def test_the_navigation_leaves_the_ops_to_that_list():
    text = (ROOT / "mkdocs.yml").read_text()
    assert text.count("{op}.md") == 2
    assert [path.name for path in FOLDERS if f"{path.name}.md" in text] == []
