"""mlx-lm with our ops: every model that it loads, patched."""

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from mlx_anvil.patching import Report, patch

__all__ = ["patch_all", "reports", "unpatch_all"]

_LOADERS = ("load_model", "sharded_load")  # all others of mlx-lm call these
_MOST_REPORTS = 64

_lock = threading.Lock()
_options: dict[str, bool] | None = None
_originals: dict[Callable[..., Any], Callable[..., Any]] = {}  # by what has been put in their place
_reports: deque[Report] = deque(maxlen=_MOST_REPORTS)
_loading = threading.local()


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
    :func:`mlx_anvil.patch` with these options; a model that is sharded while it is loaded, as after its shards are made.
    Models that exist are not changed; :func:`mlx_anvil.lm.reports` has what became of those that were loaded. A second
    call replaces the options.

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

    global _options
    with _lock:
        _options = {
            "attention": attention,
            "swiglu": swiglu,
            "quantized": quantized,
            "norm": norm,
            "rope": rope,
            "prebuild": prebuild,
        }
        for name in _LOADERS:
            load = getattr(utils, name, None)
            if load is not None and load not in _originals:
                ours = _patching(load)
                _originals[ours] = load
                _replace(load, ours)


def unpatch_all() -> None:
    """Ends what :func:`mlx_anvil.lm.patch_all` began. Models loaded in between stay patched until
    ``mlx_anvil.unpatch(model)``. What another package has put around a function of mlx-lm since stays there, too."""
    global _options
    with _lock:
        _options = None
        while _originals:
            _replace(*_originals.popitem())


def reports() -> tuple[Report, ...]:
    """What :func:`mlx_anvil.patch` reported of each model that was loaded since :func:`mlx_anvil.lm.patch_all`, the
    oldest first: of the last 64. The calls that fall back are counted as the models run.

    Returns:
        tuple[Report, ...]: one for each model; kept by :func:`mlx_anvil.lm.unpatch_all`.
    """
    return tuple(_reports)


def _patching(load: Callable[..., Any]) -> Callable[..., Any]:
    """The function, and then ``patch``. It does no more than the function after ``unpatch_all``, for another package may
    hold it, and inside a call of another of these: that may go on with the model, as ``sharded_load`` does."""

    @functools.wraps(load)
    def load_and_patch(*args: Any, **kwargs: Any) -> Any:
        if _options is None or getattr(_loading, "is_nested", False):
            return load(*args, **kwargs)
        _loading.is_nested = True
        try:
            loaded = load(*args, **kwargs)
        finally:
            _loading.is_nested = False
        if (options := _options) is not None:
            _reports.append(patch(loaded[0], **options))
        return loaded

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
