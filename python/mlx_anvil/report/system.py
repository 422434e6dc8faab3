"""The machine: chip, memory, and the versions of all software involved."""

import os
import platform
import subprocess
from typing import Any

import mlx.core as mx

from mlx_anvil import _info
from mlx_anvil.report.section import Deadline, Outcome

_TOOLS = {
    "xcode": ("xcodebuild", "-version"),
    "xcode_path": ("xcode-select", "-p"),
    "metal_compiler": ("xcrun", "-sdk", "macosx", "metal", "--version"),
    "nvidia_driver": ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
}
_IDENTIFYING = ("uuid", "pci_bus_id")


def _output(command: tuple[str, ...]) -> str:
    """The first lines of a tool's output, or why there is none."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return "not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {type(error).__name__}"
    text = " / ".join((result.stdout.strip() or result.stderr.strip()).splitlines()[:3])
    return text if result.returncode == 0 else f"fails: {text}"


def gpu_facts() -> dict[str, Any]:
    """``mx.device_info`` of the GPU, without fields that identify the machine; empty if there is no GPU."""
    if not mx.is_available(mx.gpu):
        return {}
    return {name: str(value) for name, value in mx.device_info(mx.gpu).items() if name not in _IDENTIFYING}


def virtual_gpu() -> str:
    """A warning about the GPU of a virtual machine; empty for physical GPUs."""
    name = gpu_facts().get("device_name", "")
    if "virtual" not in name.lower():
        return ""
    return (
        f"{name} is the GPU of a virtual machine. Its times do not represent Apple's GPUs, it has fewer threads and "
        "less memory, and kernels that need a physical GPU may fail."
    )


def run(deadline: Deadline) -> Outcome:
    """Has no findings, and ignores the deadline because it is fast."""
    info = _info.info()
    gpu = gpu_facts()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    data = {
        "info": info,
        "macos": platform.mac_ver()[0],
        "memory_bytes": memory,
        "gpu": gpu,
        "virtual_gpu": virtual_gpu(),
        "tools": {name: _output(command) for name, command in _TOOLS.items()},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("MLX_", "MTL_"))},
    }
    chip = gpu.get("device_name") or info["processor"]
    return Outcome(f"{chip}, {memory / 2**30:.0f} GiB, {info['platform']}, MLX {info['mlx']}", 0, data)
