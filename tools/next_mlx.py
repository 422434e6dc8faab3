"""Tries a release of MLX that this package is not pinned to yet, and prints in one line what breaks.

  python tools/next_mlx.py             the newest release, if it is newer than the pinned one
  python tools/next_mlx.py 0.32.3      the given release

The exit status is 1 if something breaks. It builds in a temporary environment and needs network, a C++ compiler and,
for the macOS part, LLVM's ld64.lld.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINNED = re.search(r'"mlx==([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
REQUIREMENTS = re.findall(
    r'^  "((?:scikit-build-core|nanobind|hatch)[^"]*)",$', (ROOT / "pyproject.toml").read_text(), re.M
)
TOOLS = ["cmake", "ninja", "wheel", "lief", "ziglang>=0.17,<0.18"]
# Patterns for causes in a log. Earlier ones hide later ones.
CAUSES = (
    r"nanobind ABI .*|ABI tag .*",
    r"undefined symbol.*",
    r"\S+: (?:.* does not export it|not known to be .*)",
    r"\S+:\d+:\d+: (?:fatal )?error: .*",
    r"CMake Error.*\n.*",
    r"\w*Error: .*",
    r"FAILED .*",
)


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]


def newest() -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", "mlx"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.search(r"^mlx \(([\d.]+)\)", listed, re.M)[1]


def cause(log: str) -> str:
    """Returns the line of a log that names the cause."""
    found = (re.search(pattern, log, re.M) for pattern in CAUSES)
    return next((match[0].strip() for match in found if match), log.strip().rpartition("\n")[2])


def steps(python: str, version: str, folder: Path) -> list[Step]:
    pip = [python, "-m", "pip"]
    packages = [f"mlx[cpu]=={version}", *REQUIREMENTS, *TOOLS, "click", "rich", "numpy", "pytest", "hypothesis"]
    wheel = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        f"-Cbuild-dir={folder}/build",
        "--wheel-dir",
        str(folder),
    ]
    return [
        Step("install", [*pip, "install", "--quiet", *packages]),
        Step("headers", [*wheel, str(ROOT)]),
        Step("exports, ABI", [*pip, "install", "--quiet", "--no-deps", "--no-index", "-f", str(folder), "mlx-anvil"]),
        Step("exports, ABI", [python, "-c", "import mlx_anvil"]),
        Step("tests", [python, "-m", "pytest", "-q", "-x", "--rootdir", str(ROOT), str(ROOT / "tests/silu_gate")]),
        Step("macOS", [python, str(ROOT / "tools/macos/build.py"), "--check"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="version of MLX; default: the newest")
    version = parser.parse_args().version or newest()
    if version == PINNED:
        print(f"MLX {version}: the newest release, and the one that this package is for")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        for step in steps(str(folder / "venv" / "bin" / "python"), version, folder):
            environment = {**os.environ, "MLX_ANVIL_ANY_MLX": "1"}
            result = subprocess.run(step.command, cwd=folder, capture_output=True, text=True, env=environment)
            if result.returncode:
                print(f"MLX {version}: {step.name}: {cause(result.stderr + result.stdout)}")
                return 1
    print(f"MLX {version}: nothing breaks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
