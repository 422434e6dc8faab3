"""If something is missing, the build says what, and what to install."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("ninja"), reason="needs CMake and Ninja"),
]

ROOT = Path(__file__).resolve().parents[2]


def said(run: subprocess.CompletedProcess[str]) -> str:
    """The text of CMake's error, without CMake's line breaks."""
    assert run.returncode != 0, run.stdout
    return " ".join(run.stderr.split())


def configure(folder: Path, *options: str, env: dict[str, str] | None = None) -> str:
    command = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder / "build"), "-DMLX_ANVIL_ISAS=baseline"]
    python = (
        [] if any("Python_EXECUTABLE" in option for option in options) else [f"-DPython_EXECUTABLE={sys.executable}"]
    )
    return said(subprocess.run([*command, *python, *options], capture_output=True, text=True, env=env))


def call(folder: Path, line: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs one function of cmake/Requirements.cmake."""
    script = folder / "script.cmake"
    script.write_text(f"include({ROOT}/cmake/Requirements.cmake)\n{line}\n")
    return subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True, env={**os.environ, **env})


def folder_with(folder: Path, *tools: str) -> str:
    for tool in tools:
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)


def test_no_compiler(tmp_path: Path):
    (tools := tmp_path / "bin").mkdir()
    env = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    text = configure(
        tmp_path, "--fresh", env={**env, "PATH": folder_with(tools, "cmake", "ninja"), "HOME": str(tmp_path)}
    )
    assert "No C++ compiler is installed; allowed: GCC 12 or later" in text
    assert "apt install g++" in text


@pytest.mark.parametrize(
    ("compiler", "version", "is_taken"),
    [
        ("GNU", "11.4.0", False),
        ("GNU", "12.2.0", True),
        ("GNU", "15.1.0", True),
        ("Clang", "15.0.7", False),
        ("Clang", "16.0.0", True),
        ("AppleClang", "14.0.3.14030022", False),
        ("AppleClang", "15.0.0.15000040", True),
        ("IntelLLVM", "1.0", True),
    ],
)
def test_age_of_the_compiler(compiler: str, version: str, is_taken: bool, tmp_path: Path):
    run = call(tmp_path, f"mlx_anvil_require_compiler({compiler} {version})")
    if is_taken:
        assert run.returncode == 0, run.stderr
    else:
        text = said(run)
        assert f"The C++ compiler is {compiler} {version}; allowed: GCC 12 or later" in text
        assert "CXX=" in text


def test_no_headers_of_python(tmp_path: Path):
    text = configure(tmp_path, f"-DPython_INCLUDE_DIR={tmp_path}/missing")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"The headers of Python {version}" in text
    assert "apt install python3-dev" in text


def test_python_without_packages(tmp_path: Path):
    """With --no-build-isolation, pip does not install what the build needs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    text = configure(tmp_path, f"-DPython_EXECUTABLE={python}")
    assert 'nanobind is not installed; pip install "nanobind==' in text
    assert f"for {python}" in text


@pytest.mark.parametrize("package", ["mlx", "nanobind"])
def test_versions(package: str, tmp_path: Path):
    line = f'set(Python_EXECUTABLE python)\nmlx_anvil_require_version({package} "%s")'
    text = said(call(tmp_path, line % "0.1.2", MLX_ANVIL_ANY_MLX=""))
    assert f"{package} is 0.1.2; allowed: " in text
    assert f'pip install "{package}' in text
    assert call(tmp_path, line % "0.1.2", MLX_ANVIL_ANY_MLX="1").returncode == 0
    assert f"{package} is not installed; pip install" in said(call(tmp_path, line % "", MLX_ANVIL_ANY_MLX="1"))
    pinned = text.partition("allowed: ")[2].partition(",")[0]
    assert f'"{package}=={pinned}' in (ROOT / "pyproject.toml").read_text()
    assert call(tmp_path, line % pinned, MLX_ANVIL_ANY_MLX="").returncode == 0


def test_another_mlx(tmp_path: Path):
    pinned = re.search(r'"nanobind==([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned
    for package, version in (("MLX", "0.99.1"), ("nanobind", pinned[1])):
        (tmp_path / f"{package}Config.cmake").write_text("")
        text = f'set(PACKAGE_VERSION "{version}")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n'
        (tmp_path / f"{package}ConfigVersion.cmake").write_text(text)
    env = {name: value for name, value in os.environ.items() if name != "MLX_ANVIL_ANY_MLX"}
    text = configure(tmp_path, f"-DMLX_ROOT={tmp_path}", f"-Dnanobind_ROOT={tmp_path}", env=env)
    assert "mlx is 0.99.1; allowed: " in text
