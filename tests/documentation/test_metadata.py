"""Files agree about the project's metadata, and the release check finds a wrong sdist or wheel."""

import re
import tarfile
import zipfile
from pathlib import Path

import pytest

import documents
import release_check

pytestmark = pytest.mark.cpu_only

ROOT = documents.ROOT
PROJECT = (ROOT / "pyproject.toml").read_text()
TEST_COMMAND = 'pip install ".[cpu,test]" && pytest'


def setting(key: str) -> str:
    """The value of a key of pyproject.toml that occurs once."""
    (found,) = re.findall(rf'^{key} = "(.+)"$', PROJECT, re.MULTILINE)
    return found


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("README.md", "In a clone of {}:"),
        ("CITATION.cff", "repository-code: {}"),
        ("mkdocs.yml", "repo_url: {}"),
        (".github/ISSUE_TEMPLATE/config.yml", "    url: {}/security/advisories/new"),
    ],
)
def test_the_repository_is_the_same(file, line):
    assert line.format(setting("Repository")) in (ROOT / file).read_text().splitlines()


def test_the_version_is_the_same():
    assert f"version: {setting('version')}" in (ROOT / "CITATION.cff").read_text().splitlines()


def test_the_readme_starts_with_its_two_commands():
    blocks = documents.read_blocks(ROOT / "README.md")
    assert [block.code.strip() for block in blocks[:2]] == [
        'pip install ".[cpu]" && python -m mlx_anvil',
        TEST_COMMAND,
    ]


def test_ci_runs_the_command_of_the_readme():
    assert f"{{ {TEST_COMMAND}; }} || exit 1" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_readme_names_what_a_build_needs():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "`python3-dev`" in text
    assert "GCC 12, Clang 16, Xcode 15" in text
    assert f"Python {setting('requires-python').removeprefix('>=')} or later" in text


LINKING = [*sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md"]


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the sections of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Checks pages outside docs/; MkDocs checks the others."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in (link for link in links if not link.startswith("https://")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


# ---- tools/release_check.py ------------------------------------------------------------------------------------------


def make_sdist(folder: Path, *names: str) -> Path:
    """An sdist of empty files."""
    sdist = folder / "sdist.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return sdist


TOP = f"mlx_anvil-{release_check.VERSION}"


def test_an_sdist_is_what_is_tracked(tmp_path):
    sdist = make_sdist(tmp_path, *(f"{TOP}/{name}" for name in ("PKG-INFO", "a.py", "csrc/b.cpp")))
    assert release_check.sdist_problems(sdist, {"a.py", "csrc/b.cpp"}) == []


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([f"{TOP}/PKG-INFO"], "a.py is tracked and missing"),
        ([f"{TOP}/a.py"], "PKG-INFO is tracked and missing"),
        ([f"{TOP}/PKG-INFO", f"{TOP}/a.py", f"{TOP}/build/x.so"], "build/x.so is not tracked"),
        ([f"{TOP}/PKG-INFO", f"{TOP}/a.py", "b.py"], f"b.py is not under {TOP}/"),
    ],
)
def test_a_wrong_sdist_is_found(tmp_path, names, problem):
    assert release_check.sdist_problems(make_sdist(tmp_path, *names), {"a.py"}) == [problem]


def make_wheel(folder: Path, *names: str, platform: str = release_check.PLATFORM) -> Path:
    """A wheel of empty files."""
    wheel = folder / f"mlx_anvil-{release_check.VERSION}-cp312-cp312-{platform}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return wheel


PACKAGE = [
    f"mlx_anvil/{name}"
    for name in ("__init__.py", "py.typed", "_ext.pyi", "_build_info.py", "mslc/shim/a.h", "mslc/runtime/a.cpp")
]
COMPILED = ["mlx_anvil/_ext.cpython-312-x86_64-linux-gnu.so", "mlx_anvil/ptx/a.ptx.xz", "mlx_anvil/cubin/a.tar.xz"]
WHEEL = [*PACKAGE, *COMPILED, f"mlx_anvil-{release_check.VERSION}.dist-info/licenses/LICENSE"]


def test_a_wheel_is_the_package(tmp_path):
    assert release_check.wheel_problems(make_wheel(tmp_path, *WHEEL)) == []


@pytest.mark.parametrize("name", ["mlx_anvil.libs/libmlx.so", "mlx_anvil/libmlx.so", "tests/a.py", "mlx_anvil/a.cpp"])
def test_what_does_not_belong_in_a_wheel(tmp_path, name):
    wheel = make_wheel(tmp_path, *WHEEL, name)
    assert release_check.wheel_problems(wheel) == [f"{name} is not for users"]


@pytest.mark.parametrize("name", WHEEL if release_check.LINUX else PACKAGE)
def test_what_a_wheel_lacks(tmp_path, name):
    (problem,) = release_check.wheel_problems(make_wheel(tmp_path, *(other for other in WHEEL if other != name)))
    assert re.fullmatch(problem.removeprefix("nothing matches "), name)


def test_a_wheel_for_another_system(tmp_path):
    (problem,) = release_check.wheel_problems(make_wheel(tmp_path, *WHEEL, platform="manylinux_2_99_x86_64"))
    assert problem == f"its tag is not {release_check.PLATFORM}"
