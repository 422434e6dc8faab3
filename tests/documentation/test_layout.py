"""Every public op can be found in one guess: by its name, or by that of the folder of csrc/ that defines it.

docs/adding-an-op.md says so too: every file of an op is in its table, and what the page names exists.
"""

import re
import subprocess
from pathlib import Path

import pytest

import op_pages
from mlx_anvil.reference import OPS

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "csrc" / name for name in op_pages.folders()]
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
    assert {"rope, rope_qk and rope_and_cache": "rope.md"} in ops["Ops"]
    assert {"rope, rope_qk and rope_and_cache": "design/rope.md"} in design["Design"]
    text = op_pages.with_entries("# Ops\n\n::: mlx_anvil.{op}\n")
    assert set(NAMES) <= {line.removeprefix("::: mlx_anvil.") for line in text.splitlines()[2:]}


def test_the_navigation_leaves_the_ops_to_that_list():
    text = (ROOT / "mkdocs.yml").read_text()
    assert text.count("{op}.md") == 2
    assert [path.name for path in FOLDERS if f"{path.name}.md" in text] == []


def test_the_repository_holds_no_build_outputs():
    """Every file is text, but for pictures."""
    if not (ROOT / ".git").exists():
        pytest.skip("git knows which files the repository holds, and this is no checkout")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [ROOT / name for name in files.split("\0") if name and not name.endswith(".png")]
    assert [path.name for path in paths if path.exists() and b"\0" in path.read_bytes()] == []


# ---- docs/adding-an-op.md --------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs/adding-an-op.md").read_text()
WORDS = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))
PATHS = [word for word in WORDS if re.fullmatch(r"[\w<>*./-]+(/|\.\w+)", word) and ("/" in word or "<op>" in word)]
COMMANDS = [word for word in WORDS if word.startswith("python ")]
IDENTIFIERS = [word for word in WORDS if re.fullmatch(r"[A-Za-z_]\w{5,}", word)]


def files_named_in_the_table() -> set[str]:
    """In full: the page writes only the last part of a file in the folder of the one before it."""
    named = set()
    for row in re.findall(r"^\| (`[^|]+) \|", PAGE, re.MULTILINE):
        folder = ""
        for path in re.findall(r"`([^`]+)`", row):
            whole = path if "/" in path and path.split("/")[0] in ("csrc", "metal", "python", "tests", "bench", "docs") \
                else folder + path  # fmt: skip
            folder = whole.replace("simd/", "").rpartition("/")[0] + "/"
            named.add(whole.replace("<op>", "{}"))
    return named


def test_the_page_names_something_of_each_kind():
    assert len(PATHS) > 20
    assert len(COMMANDS) >= 4
    assert len(IDENTIFIERS) > 10


@pytest.mark.parametrize("path", PATHS)
def test_paths_exist(path):
    pattern = path.replace("<op>", "*").rstrip("/")
    roots = (".", "csrc", "csrc/common", "csrc/*", "docs", "metal/*")
    assert any(list(ROOT.glob(f"{root}/{pattern}")) for root in roots), path


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command):
    script = re.match(r"python (-m )?([\w./]+)", command)
    assert script, command
    path = script[2].replace(".", "/") + ".py" if script[1] else script[2]
    package = ROOT / "python" / path.removesuffix(".py")
    assert (ROOT / path).is_file() or (package / "__main__.py").is_file(), command


@pytest.mark.parametrize("name", IDENTIFIERS)
def test_identifiers_exist(name):
    whole = re.compile(rf"\b{name}\b")
    sources = (path for folder in ("csrc", "metal", "python", "tests") for path in (ROOT / folder).rglob("*.*"))
    kinds = (".cpp", ".h", ".metal", ".py")
    assert name in {path.name for path in FOLDERS} or any(
        whole.search(path.read_text()) for path in sources if path.suffix in kinds
    ), name


@pytest.mark.parametrize("place", PLACES)
def test_the_table_has_every_file_of_an_op(place):
    named = files_named_in_the_table()
    assert any(re.fullmatch(re.escape(place).replace(r"\*", "[^/]+"), path) or path == place for path in named), named
