"""The build makes a metallib where Apple's compiler works, and a package with source kernels, which says so, elsewhere.

The project's own CMake code runs here, with a stand-in for xcrun.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import mlx
import pytest

from mlx_anvil import _build_info, _info

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
MLX_CMAKE = Path(next(iter(mlx.__path__))) / "share" / "cmake" / "MLX" / "extension.cmake"
FILES = sorted((ROOT / "metal").glob("*/*.metal"))

# What the build of the package does with Metal, without the extension.
PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(stand_in LANGUAGES NONE)
list(APPEND CMAKE_MODULE_PATH {root}/cmake)
include({mlx})
include(MetalKernels)
add_custom_target(_ext ALL)
mlx_anvil_add_metallib(_ext)
file(WRITE ${{CMAKE_BINARY_DIR}}/why "${{MLX_ANVIL_WHY_NO_METALLIB}}")
"""

# Writes what it was asked for, and fails at the step that FAIL names.
XCRUN = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in
  "-sdk macosx metal --version") step=version ;;
  "-sdk macosx metal "*" -c "*) step=compile ;;
  "-sdk macosx metal "*) step=link ;;
  *) step=unknown ;;
esac
if [ "$step" = "{fail}" ] || [ "$step" = unknown ]; then
  echo "error: cannot $step: missing Metal Toolchain" >&2
  echo "a second line" >&2
  exit 1
fi
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then [ "{fail}" = nothing ] || echo "$step" > "$2"; fi
  shift
done
"""

needs_cmake = pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("ninja")), reason="needs cmake and ninja")


@pytest.fixture
def project(tmp_path):
    """A folder with a project; `build` configures and builds it."""
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT, mlx=MLX_CMAKE))
    (tmp_path / "metal").symlink_to(ROOT / "metal")
    return tmp_path


def build(project: Path, fail: str | None = "", *options: str) -> subprocess.CompletedProcess:
    """Builds with an xcrun that fails at a step, or without xcrun if that is None."""
    tools = project / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("cmake", "ninja", "sh"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(shutil.which(tool))
    if fail is not None:
        (tools / "xcrun").write_text(XCRUN.format(log=project / "log", fail=fail))
        (tools / "xcrun").chmod(0o755)
    environment = {**os.environ, "PATH": str(tools)}
    configure = ["cmake", "-G", "Ninja", "-S", str(project), "-B", str(project / "build"), *options]
    result = subprocess.run(configure, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        subprocess.run(["cmake", "--build", str(project / "build")], env=environment, check=True, capture_output=True)
    return result


def metallib(project: Path) -> Path:
    return project / "build" / "mlx_anvil.metallib"


def why_not(project: Path) -> str:
    return (project / "build" / "why").read_text()


def status(result: subprocess.CompletedProcess) -> list[str]:
    return [line for line in result.stdout.splitlines() if "Metal kernels are shipped as source" in line]


@needs_cmake
def test_a_compiler_that_works_makes_the_metallib(project):
    result = build(project)
    assert metallib(project).read_text() == "link\n"
    assert why_not(project) == ""
    assert status(result) == []
    calls = (project / "log").read_text().splitlines()
    for path in FILES:
        (call,) = [call for call in calls if f"/{path.name} -o" in call and path.parent.name in call]
        assert "-std=metal3.1" in call


@needs_cmake
@pytest.mark.parametrize(
    ("fail", "why"),
    [
        (None, "xcrun -sdk macosx metal does not work (version): no such file or directory"),
        ("version", "xcrun -sdk macosx metal does not work (version): error: cannot version: missing Metal Toolchain"),
        ("compile", "xcrun -sdk macosx metal does not work (compile): error: cannot compile: missing Metal Toolchain"),
        ("link", "xcrun -sdk macosx metal does not work (link): error: cannot link: missing Metal Toolchain"),
        ("nothing", "xcrun -sdk macosx metal wrote no metallib"),
    ],
    ids=["missing", "version", "compile", "link", "no output"],
)
def test_a_compiler_that_does_not_work_leaves_source_kernels(project, fail, why):
    result = build(project, fail)
    assert result.returncode == 0, result.stderr
    assert not metallib(project).exists()
    assert why_not(project).lower() == why.lower()
    (line,) = status(result)
    assert why.lower() in line.lower()
    assert "xcodebuild -downloadComponent MetalToolchain" in line


@needs_cmake
def test_a_metallib_can_be_demanded_or_declined(project):
    result = build(project, "compile", "-DMLX_ANVIL_METALLIB=ON")
    assert result.returncode != 0
    assert "MLX_ANVIL_METALLIB is ON" in result.stderr
    build(project, "", "-DMLX_ANVIL_METALLIB=OFF")
    assert not metallib(project).exists()
    assert why_not(project) == "MLX_ANVIL_METALLIB is OFF"


@needs_cmake
def test_the_line_is_short_enough_to_be_one(project):
    (line,) = status(build(project, None))
    assert "\n" not in line
    assert len(line) < 320


def test_info_says_where_metal_kernels_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(_build_info, "WHY_NO_METALLIB", "xcrun is missing")
    source = _info.metal_kernels(tmp_path)
    assert source == "kernels as source, compiled at their first launch; no metallib: xcrun is missing"
    monkeypatch.setattr(_build_info, "WHY_NO_METALLIB", "")
    assert "it was removed" in _info.metal_kernels(tmp_path)
    (tmp_path / "mlx_anvil.metallib").touch()
    assert _info.metal_kernels(tmp_path) == "kernels from a metallib"


def test_info_of_metal_is_a_line_that_json_can_hold():
    detail = _info.info()["backends"]["metal"]["detail"]
    assert "\n" not in json.loads(json.dumps(detail))
    assert detail
