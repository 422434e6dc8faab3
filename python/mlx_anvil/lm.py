"""Patches every model that mlx-lm loads, keeps their keys and values in pages, and loads GGUF files."""

import contextlib
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from mlx_anvil._extras import is_installed, need
from mlx_anvil._gguf_model import load_gguf
from mlx_anvil._paged_cache import PagedCache, Sequence
from mlx_anvil._paged_layers import LayerCache
from mlx_anvil.patching import Report, patch

__all__ = ["LayerCache", "PagedCache", "Sequence", "load_gguf", "patch_all", "reports", "unpatch_all"]

_LOADERS = ("load_model", "sharded_load")  # mlx-lm's other loaders call these
_MOST_REPORTS = 64

_lock = threading.Lock()
_options: dict[str, bool] | None = None
_originals: dict[Callable[..., Any], Callable[..., Any]] = {}  # keyed by the wrapper that replaced them
_reports: deque[Report] = deque(maxlen=_MOST_REPORTS)
_loading = threading.local()
_listeners: list[Callable[[Report], None]] = []


def patch_all(
    *,
    attention: bool = True,
    swiglu: bool = True,
    quantized: bool = True,
    norm: bool = True,
    rope: bool = True,
    router: bool = True,
    experts: bool = True,
    recurrence: bool = True,
    repack: bool = False,
    prebuild: bool = False,
) -> None:
    """Applies :func:`mlx_anvil.patch` to every model that mlx-lm loads from now on: by ``mlx_lm.load``, its commands
    and its server.

    A model that is sharded while it loads is patched after it was sharded. Models that exist already are not changed.
    :func:`mlx_anvil.lm.reports` has the report of each model. A second call replaces the options.

    Args:
        attention: see :func:`mlx_anvil.patch`.
        swiglu: see :func:`mlx_anvil.patch`.
        quantized: see :func:`mlx_anvil.patch`.
        norm: see :func:`mlx_anvil.patch`.
        rope: see :func:`mlx_anvil.patch`.
        router: see :func:`mlx_anvil.patch`.
        experts: see :func:`mlx_anvil.patch`.
        recurrence: see :func:`mlx_anvil.patch`.
        repack: see :func:`mlx_anvil.patch`.
        prebuild: see :func:`mlx_anvil.patch`.

    Raises:
        ImportError: mlx-lm is not installed; the text says how to install it.
    """
    if not is_installed("mlx_lm"):
        raise ImportError(need("[patch_all]", "mlx_lm"))
    import mlx_lm.utils as utils

    global _options
    with _lock:
        _options = {
            "attention": attention,
            "swiglu": swiglu,
            "quantized": quantized,
            "norm": norm,
            "rope": rope,
            "router": router,
            "experts": experts,
            "recurrence": recurrence,
            "repack": repack,
            "prebuild": prebuild,
        }
        for name in _LOADERS:
            load = getattr(utils, name, None)
            if load is not None and load not in _originals:
                ours = _patching(load)
                _originals[ours] = load
                _replace(load, ours)


def unpatch_all() -> None:
    """Undoes :func:`mlx_anvil.lm.patch_all`: models that mlx-lm loads from now on are not patched.

    Models that were loaded meanwhile stay patched until ``mlx_anvil.unpatch(model)``. Wrappers that another package put
    around mlx-lm's functions meanwhile stay, too.
    """
    global _options
    with _lock:
        _options = None
        while _originals:
            _replace(*_originals.popitem())


def reports() -> tuple[Report, ...]:
    """The reports of the last 64 models that were loaded since :func:`mlx_anvil.lm.patch_all`.

    Fallbacks are counted while the models run. :func:`mlx_anvil.lm.unpatch_all` keeps the reports.

    Returns:
        tuple[Report, ...]: one per model, oldest first.
    """
    return tuple(_reports)


@contextlib.contextmanager
def _listening(listener: Callable[[Report], None]) -> Iterator[None]:
    """Inside the block, the listener gets the report of every model as soon as the model is patched."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _patching(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a loader so that it patches the model.

    The wrapper only calls the loader after ``unpatch_all``, because another package may still hold it, and inside
    another wrapped loader, because that one may still change the model: ``sharded_load`` does.
    """

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
            report = patch(loaded[0], **options)
            _reports.append(report)
            for listener in _listeners:
                listener(report)
        return loaded

    return load_and_patch


def _replace(current: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Rebinds the function in every module of mlx-lm that has a name for it."""
    for module in _modules_of_mlx_lm():
        for name, value in list(vars(module).items()):
            if value is current:
                setattr(module, name, new)


def _modules_of_mlx_lm() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0] == "mlx_lm":
            yield module
