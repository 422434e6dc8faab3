"""``info()``: versions, backends and build options of this installation."""

import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

import mlx.core as mx

from mlx_anvil import _build_info, _cuda, _ext

__version__ = version("mlx-anvil")


class BackendInfo(TypedDict):
    """State of one backend: compiled in, usable here, and details or the reason why not."""

    built: bool
    usable: bool
    detail: str


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
    backends: dict[str, BackendInfo]


def _backends() -> dict[str, BackendInfo]:
    metal_built = _ext._has_metal()
    simulator_usable = all(find_spec(name) for name in ("numpy", "ziglang"))
    cuda_built = _ext._has_cuda() and _cuda.FOLDER.is_dir()
    why_no_cuda = _ext._why_no_gpu() if cuda_built else "this build has no PTX (docs/backends.md)"
    cubins = f"cubins for {', '.join(_cuda.architectures())}" if _cuda.architectures() else ""
    return {
        "cpu": {"built": True, "usable": True, "detail": f"{_ext._current_isa()}, {_ext._max_threads()} threads"},
        "simulator": {
            "built": True,
            "usable": simulator_usable,
            "detail": "used inside simulate()" if simulator_usable else 'needs pip install "mlx-anvil[sim]"',
        },
        "metal": {
            "built": metal_built,
            "usable": metal_built and mx.metal.is_available(),
            "detail": metal_kernels() if metal_built else "this build has no Metal host code (MLX here has no Metal)",
        },
        "cuda": {
            "built": cuda_built,
            "usable": not why_no_cuda,
            "detail": "; ".join(filter(None, (why_no_cuda, cubins))),
        },
    }


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
            kernels), and ``backends``. ``backends`` maps each name to ``built``, ``usable`` and ``detail``. The detail
            says why a backend is not usable, if Metal kernels come from a metallib or from source, and which cubins
            CUDA has.
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
        "backends": _backends(),
    }


def usable_backends() -> list[str]:
    """Names of the backends that run ops here, without the simulator, which is for tests."""
    return [name for name, backend in _backends().items() if backend["usable"] and name != "simulator"]
