"""mslc: compiles the Metal Shading Language with upstream clang, on any machine."""

from importlib.util import find_spec

if find_spec("numpy") is None:
    raise ImportError('mlx_anvil.mslc needs NumPy and a compiler: pip install "mlx-anvil[sim]"')

from .checks import verify
from .compiler import CHECKED, PROFILED, UNCHECKED, Options
from .conformance import STANDARDS
from .diagnostics import CompileError, Diagnostic
from .metal_kernel import metal_kernel
from .preprocess import Source
from .profile import LaunchProfile
from .simulator import Finding, Library, Report, SimulationError
from .toolchain import ToolchainError, find_zig

__all__ = [
    "CHECKED",
    "PROFILED",
    "STANDARDS",
    "UNCHECKED",
    "CompileError",
    "Diagnostic",
    "Finding",
    "LaunchProfile",
    "Library",
    "Options",
    "Report",
    "SimulationError",
    "Source",
    "ToolchainError",
    "find_zig",
    "metal_kernel",
    "verify",
]
