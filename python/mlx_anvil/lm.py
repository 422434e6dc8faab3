"""mlx-lm with our ops: every model that it loads, patched."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from mlx_anvil.patching import patch

__all__ = ["patch_all", "unpatch_all"]

_lock = threading.Lock()
_original: Callable[..., Any] | None = None


def patch_all(
    *,
    attention: bool = True,
    swiglu: bool = True,
    quantized: bool = True,
    norm: bool = True,
    rope: bool = True,
    prebuild: bool = False,
) -> None:
    """From now on, whatever loads a model through mlx-lm (``mlx_lm.load``, its commands, its server) gets it as after
    :func:`mlx_anvil.patch` with these options. Models that exist are not changed; ``patch(model)`` again gives the report
    of one that was loaded. A second call replaces the options.

    Args:
        attention: as for :func:`mlx_anvil.patch`.
        swiglu: likewise.
        quantized: likewise.
        norm: likewise.
        rope: likewise.
        prebuild: likewise.

    Raises:
        ImportError: mlx-lm is not installed (``pip install "mlx-anvil[lm]"``).
    """
    import mlx_lm.utils as utils

    options = {
        "attention": attention,
        "swiglu": swiglu,
        "quantized": quantized,
        "norm": norm,
        "rope": rope,
        "prebuild": prebuild,
    }
    global _original
    with _lock:
        loads = utils.load_model
        if _original is None:
            _original = loads
        _replace(loads, _patching(_original, options))


def unpatch_all() -> None:
    """Ends what :func:`patch_all` began. Models loaded in between stay patched until ``mlx_anvil.unpatch(model)``."""
    global _original
    with _lock:
        if _original is not None:
            _replace(sys.modules["mlx_lm.utils"].load_model, _original)
            _original = None


def _patching(load_model: Callable[..., Any], options: dict[str, bool]) -> Callable[..., Any]:
    @functools.wraps(load_model)
    def load_and_patch(*args: Any, **kwargs: Any) -> Any:
        model, *config = load_model(*args, **kwargs)
        patch(model, **options)
        return model, *config

    return load_and_patch


def _replace(current: Callable[..., Any], new: Callable[..., Any]) -> None:
    """In every module of mlx-lm that holds the function by name."""
    for module in _modules_of_mlx_lm():
        for name, value in list(vars(module).items()):
            if value is current:
                setattr(module, name, new)


def _modules_of_mlx_lm() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0] == "mlx_lm":
            yield module
