"""mslc: compiles the Metal Shading Language with upstream clang, on any machine."""

from importlib.util import find_spec
from typing import Any

# For the package around this one; not part of the API.
from .installation import install_command as install_command
from .installation import reinstall_command as reinstall_command
from .installation import requirement as requirement
from .progress import progress_bar as progress_bar

_missing: ImportError | None = None
try:
    from .checks import verify
    from .compiler import CHECKED, PROFILED, UNCHECKED, Options
    from .conformance import STANDARDS
    from .diagnostics import CompileError, Diagnostic
    from .estimate_work import Work, measure_work
    from .estimation import Estimate, EstimateError, estimate
    from .metal_kernel import metal_kernel
    from .preprocess import Source
    from .profile import LaunchProfile
    from .simulator import Finding, Library, Report, SimulationError
    from .toolchain import ToolchainError, find_zig
except ImportError as error:  # the functions that say what to install work nonetheless
    _missing = error

__all__ = [
    "CHECKED",
    "PROFILED",
    "STANDARDS",
    "UNCHECKED",
    "CompileError",
    "Diagnostic",
    "Estimate",
    "EstimateError",
    "Finding",
    "LaunchProfile",
    "Library",
    "Options",
    "Report",
    "SimulationError",
    "Source",
    "ToolchainError",
    "Work",
    "estimate",
    "find_zig",
    "measure_work",
    "metal_kernel",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in __all__ or _missing is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("numpy") is None:
        raise ImportError(f"mlx_anvil.mslc needs NumPy and a compiler: {install_command('sim')}") from None
    raise _missing
