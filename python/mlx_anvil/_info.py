"""``info()``: versions, backends and build options of this installation."""

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

import mlx.core as mx

from mlx_anvil import _build_info, _cuda, _ext, _tuning
from mlx_anvil._extras import is_installed

__version__ = version("mlx-anvil")


class BackendInfo(TypedDict):
    """State of one backend: compiled in, usable here, details or the reason why not, and then what to do about it."""

    built: bool
    usable: bool
    detail: str
    advice: str


class Info(TypedDict):
    """The dictionary that ``info()`` returns."""

    version: str
    mlx: str
    built_for_mlx: str
    nanobind_tag: str
    python: str
    platform: str
    processor: str
    compiler: str
    build_type: str
    isa: str
    supported_isas: list[str]
    threads: int
    tuning: str
    backends: dict[str, BackendInfo]


def _backends() -> dict[str, BackendInfo]:
    cpu = f"{_ext._current_isa()}, {_ext._max_threads()} threads"
    return {
        "cpu": {"built": True, "usable": True, "detail": cpu, "advice": ""},
        "simulator": _simulator(),
        "metal": _metal(),
        "cuda": _cuda_backend(),
    }


def _simulator() -> BackendInfo:
    missing = [name for name in ("numpy", "ziglang") if not is_installed(name)]
    why = (
        "it runs on Linux only" if sys.platform != "linux" else f"{' and '.join(missing)} not installed" * bool(missing)
    )
    return {
        "built": True,
        "usable": not why,
        "detail": why or "Metal kernels on the CPU, inside simulate()",
        "advice": _install("sim") if missing and sys.platform == "linux" else "use another backend" * bool(why),
    }


def _metal() -> BackendInfo:
    built = _ext._has_metal()
    usable = built and mx.metal.is_available()
    if usable:
        detail, advice = metal_kernels(), ""
    elif sys.platform != "darwin":
        detail, advice = "MLX has Metal on macOS only", "use a Mac with Apple silicon, or the simulator"
    elif built:
        detail, advice = "MLX has no Metal device here", "use a Mac with Apple silicon, not a virtual machine"
    else:
        detail, advice = "this build has no Metal host code", f"build again: {_reinstall()}"
    return {"built": built, "usable": usable, "detail": detail, "advice": advice}


def _cuda_backend() -> BackendInfo:
    cuda_built = _ext._has_cuda() and _cuda.FOLDER.is_dir()
    cubins = f"cubins for {', '.join(_cuda.architectures())}" if _cuda.architectures() else ""
    if cuda_built:
        why = _ext._why_no_gpu()
        advice = "check that nvidia-smi lists a GPU of compute capability 8.0 or newer" if why else ""
    elif sys.platform != "linux":
        why, advice = "MLX has CUDA on Linux only", "use Linux with an NVIDIA GPU"
    else:
        why = "this build has no PTX (docs/cuda.md)"
        advice = f"if there is an NVIDIA GPU: MLX_ANVIL_CUBIN=1 {_install('cuda13')}"
    detail = "; ".join(filter(None, (why, cubins)))
    return {"built": cuda_built, "usable": not why, "detail": detail, "advice": advice}


def _install(extra: str) -> str:
    from mlx_anvil.mslc import install_command  # imports the toolchain, which takes a while

    return install_command(extra)


def _reinstall() -> str:
    from mlx_anvil.mslc import reinstall_command

    return reinstall_command()


def metal_kernels(folder: Path = Path(_ext.__file__).parent) -> str:
    """Says if the Metal kernels come from the metallib beside the extension or from source, and why."""
    if (folder / "mlx_anvil.metallib").is_file():
        return "kernels from a metallib"
    why = _build_info.WHY_NO_METALLIB or "it was removed"
    return f"kernels as source, compiled at their first launch; no metallib: {why}"


def info() -> Info:
    """Versions, backends and build options of this installation, as a dictionary that ``json.dumps`` accepts.

    Returns:
        Info: ``version``, ``mlx`` (installed), ``built_for_mlx``, ``nanobind_tag``, ``python``, ``platform``,
            ``processor``, ``compiler``, ``build_type``, ``isa`` (in use), ``supported_isas``, ``threads`` (of the CPU
            kernels), ``tuning`` (the file in force, docs/tuning.md), and ``backends``. ``backends`` maps each name to ``built``, ``usable``, ``detail`` and
            ``advice``. The detail says why a backend is not usable, if Metal kernels come from a metallib or from
            source, and which cubins CUDA has. The advice says what to do about a backend that is not usable.
    """
    return {
        "version": __version__,
        "mlx": version("mlx"),
        "built_for_mlx": _build_info.MLX_VERSION,
        "nanobind_tag": _build_info.NANOBIND_TAG,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": str(mx.device_info(mx.cpu).get("device_name", "unknown")),
        "compiler": _build_info.COMPILER,
        "build_type": _build_info.BUILD_TYPE,
        "isa": _ext._current_isa(),
        "supported_isas": _ext._supported_isas(),
        "threads": _ext._max_threads(),
        "tuning": _tuning.state(),
        "backends": _backends(),
    }


def usable_backends() -> list[str]:
    """Names of the backends that run ops here, without the simulator, which is for tests."""
    return [name for name, backend in _backends().items() if backend["usable"] and name != "simulator"]
