"""The compiler that mslc runs, and the cache of compiled files."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .installation import install_command

PACKAGE = Path(__file__).parent
SHIM = PACKAGE / "shim"
STUBS = PACKAGE / "stubs"
RUNTIME = PACKAGE / "runtime"


class ToolchainError(RuntimeError):
    """The compiler is missing, or failed for a reason that is not in the source."""


@functools.cache
def find_zig() -> str:
    """Returns the path of zig, which contains clang and lld."""
    given = os.environ.get("MLX_ANVIL_ZIG")
    if given:
        return _given_zig(given)
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.submodule_search_locations:
        zig = Path(spec.submodule_search_locations[0]) / ("zig.exe" if os.name == "nt" else "zig")
        if zig.exists():
            return str(zig)
    on_path = shutil.which("zig")
    if on_path:
        return on_path
    raise ToolchainError(f"the Metal compiler of mslc is not installed: {install_command('sim')}")


def _given_zig(given: str) -> str:
    allowed = "it must be the path or the command name of a zig executable; if unset, mslc uses the ziglang package"
    found = shutil.which(given)
    if found is None:
        raise ToolchainError(f"MLX_ANVIL_ZIG is '{given}', which is not an executable file: {allowed}")
    try:
        answer = subprocess.run([found, "version"], capture_output=True, text=True, errors="replace", check=False)
        version = answer.stdout.strip() if answer.returncode == 0 else ""
    except OSError:
        version = ""
    if not re.match(r"\d+\.\d+", version):
        raise ToolchainError(f"MLX_ANVIL_ZIG is '{given}', which is not zig: {allowed}")
    return found


def run_tool(
    arguments: list[str], text: str | None = None, seconds: float | None = None
) -> subprocess.CompletedProcess:
    """Runs zig with the arguments, and raises subprocess.TimeoutExpired if it takes longer than ``seconds``."""
    return subprocess.run(
        [find_zig(), *arguments],
        input=text,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        timeout=seconds,
    )


def require(result: subprocess.CompletedProcess, doing: str) -> None:
    if result.returncode:
        raise ToolchainError(f"{doing} failed:\n{result.stderr.strip()}")


def cache_directory() -> Path:
    """Returns the folder of compiled libraries. MLX_ANVIL_CACHE overrides the user's cache directory."""
    given = os.environ.get("MLX_ANVIL_CACHE")
    if given:
        directory = Path(given).expanduser().absolute()
    elif sys.platform == "darwin":
        directory = Path.home() / "Library" / "Caches" / "mlx-anvil"
    else:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-anvil"
    directory /= "mslc"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cache_error(directory, error) from None
    return directory


def _cache_error(directory: Path, error: OSError) -> ToolchainError:
    given = os.environ.get("MLX_ANVIL_CACHE")
    why = error.strerror or str(error)
    if given:
        message = f"MLX_ANVIL_CACHE is '{given}', where mslc cannot write its cache ({directory}: {why}): it must "
        message += "name a folder that mslc can create or write; if unset, mslc uses the user's cache folder"
    else:
        message = f"mslc cannot write its cache in {directory} ({why}): MLX_ANVIL_CACHE can name another folder"
    return ToolchainError(message)


def digest(*parts: object) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        hasher.update(str(len(data)).encode() + b":" + data)
    return hasher.hexdigest()[:32]


def write_atomically(path: Path, data: bytes, *, survives_crash: bool = True) -> None:
    """Writes a file so that readers see either all of it or none of it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if survives_crash:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def keep(path: Path, data: bytes) -> None:
    """Writes a cache file, without waiting for the disk: digests tell what a crash has damaged."""
    try:
        write_atomically(path, data, survives_crash=False)
    except OSError as error:
        raise _cache_error(path.parent, error) from None


@functools.cache
def fingerprint() -> str:
    """Hashes the compiler, this package and the processor, which determines the meaning of `-march=native`."""
    zig = os.stat(find_zig())
    parts: list[object] = [zig.st_size, zig.st_mtime_ns, sys.platform, platform.machine(), _processor()]
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".h", ".cpp"):
            parts += [path.relative_to(PACKAGE), path.read_bytes()]
    return digest(*parts)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read(8192).splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    )


def build_runtime() -> Path:
    """Returns the shared library of the simulator's runtime. It is built once and cached."""
    if sys.platform != "linux":
        # The runtime is linked as ELF. Linting and PTX need no linker and work everywhere.
        raise ToolchainError(f"the simulator runs on Linux (x86-64 and arm64), not on {sys.platform}")
    path = cache_directory() / f"libmslc_runtime-{fingerprint()}.so"
    if is_whole(path):
        return path
    flags = [
        "-x",
        "c++",
        "-std=c++20",
        "-O2",
        "-g1",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-sanitize=all",
    ]
    with tempfile.TemporaryDirectory() as directory:
        objects = []
        for source in sorted(RUNTIME.glob("*.cpp")):
            objects.append(os.path.join(directory, source.stem + ".o"))
            arguments = ["cc", *flags, "-march=native", "-c", str(source), "-o", objects[-1]]
            require(run_tool(arguments), f"compiling {source.name}")
        linked = Path(directory, path.name)
        link_shared(objects, linked, soname=path.name, needed=_c_libraries(directory))
        keep_with_digest(path, linked.read_bytes())
    return path


def keep_with_digest(path: Path, data: bytes) -> None:
    """Writes a cache file, and last its digest, which proves that the file is complete."""
    keep(path, data)
    keep(path.with_suffix(".digest"), digest(data).encode())


def is_whole(path: Path) -> bool:
    """Tells if a cache file is complete. A full disk or a crash may have truncated it."""
    try:
        return path.with_suffix(".digest").read_bytes() == digest(path.read_bytes()).encode()
    except OSError:
        return False


def link_shared(objects: list[str], path: Path, *, soname: str = "", needed: list[str] | None = None) -> None:
    """Links ELF objects to a shared library."""
    name = ["-soname", soname] if soname else []
    arguments = ["ld.lld", "-shared", "--build-id=none", "-rpath", "$ORIGIN", *name, *objects, *(needed or [])]
    require(run_tool([*arguments, "-o", str(path)]), "linking")


def _c_libraries(directory: str) -> list[str]:
    """Creates empty libraries that make the linker record this system's C and maths libraries as needed.

    The real files may be anywhere, or be linker scripts. Only the loader needs to find them.
    """
    import ctypes.util

    empty = os.path.join(directory, "empty.o")
    source = os.path.join(directory, "empty.c")
    Path(source).write_text("")
    require(run_tool(["clang", "-c", source, "-o", empty]), "compiling an empty file")
    libraries = []
    for short in ("m", "c"):
        soname = ctypes.util.find_library(short)
        if soname is None:
            continue
        libraries.append(os.path.join(directory, f"lib{short}.so"))
        require(
            run_tool(["ld.lld", "-shared", "-soname", os.path.basename(soname), empty, "-o", libraries[-1]]), "linking"
        )
    return libraries
