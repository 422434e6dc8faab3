"""Optional packages that are missing: one line says which extra has them."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from types import TracebackType

# The smallest extra with the module. An empty one: no extra has it, and pip knows it by the module's name.
_EXTRAS = {
    "gguf": "lm",
    "llama_cpp": "bench",
    "matplotlib": "plot",
    "mlx_lm": "lm",
    "nbclient": "test",
    "nbformat": "test",
    "numpy": "sim",
    "pytest": "test",
    "torch": "",
    "ziglang": "sim",
}
_PROJECTS = {"llama_cpp": "llama-cpp-python", "matplotlib": "matplotlib", "mlx_lm": "mlx-lm", "numpy": "NumPy"}


def is_installed(module: str) -> bool:
    """True if the module can be found. It is not imported."""
    return find_spec(module) is not None


def need(what: str, module: str, extra: str = "") -> str:
    """Says what needs a module, and how to install it: ``"--plot needs matplotlib: pip install ..."``.

    Args:
        what: the subject of the sentence.
        module: name of a module that an extra has.
        extra: an extra to name instead of the smallest one.
    """
    from mlx_anvil.mslc import install_command  # imports the toolchain, which takes a while

    extra = extra or _EXTRAS[module]
    command = install_command(extra) if extra else f"pip install {module}"
    return f"{what} needs {_PROJECTS.get(module, module)}: {command}"


def explanation(error: BaseException, what: str, extras: Mapping[str, str] | None = None) -> str | None:
    """The text of :func:`need` for an error that reports a missing module of an extra; None for other errors."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    return need(what, module, (extras or {}).get(module, "")) if module in _EXTRAS else None


def missing(error: ModuleNotFoundError, extra: str) -> BaseException:
    """What a script raises where its imports fail: one line that names the extra, if it is a module of an extra."""
    module = str(error.name).partition(".")[0]
    text = explanation(error, "this script", {module: extra})
    return SystemExit(f"Error: {text}") if text else error


def explain_missing_modules(**extras: str) -> None:
    """From now on, a script that lacks a module of an extra ends with one line instead of a traceback.

    Call it before the modules are imported.

    Args:
        extras: by module, the extra to name instead of the smallest one.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if text := explanation(error, "this script", extras):
            print(f"Error: {text}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook
