"""``check_ranks``: the processes of a group agree on versions, arrays and settings, or all of them say what differs."""

import hashlib
import json
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_anvil.distributed._exchange import gather_bytes, has, listed

_NAME = "[check_ranks]"
_PACKAGES = ("mlx-anvil", "mlx", "mlx-lm")
_LONGEST_LIST = 8
_NONE = "none"
Value = str | int | float | bool | None


def check_ranks(group: mx.distributed.Group | None = None, *, arrays: Any = None, **values: Value) -> None:
    """Raises the same error in every process of ``group`` if they do not agree. Call it before the first kernel.

    A collective of MLX takes the shape and dtype of its own process for granted: if they differ between processes, it
    hangs or returns garbage. Other versions of a package may issue other collectives. All processes of the group have
    to call ``check_ranks``, each at the same place in its communication. It evaluates none of the arrays.

    Compared are the versions of mlx-anvil and MLX, that of mlx-lm between the processes that have imported it, and
    what is given:

    Args:
        group: the processes; the global group of ``mx.distributed.init()`` if None. Of one process: nothing happens.
        arrays: a model (its parameters) or a tree of arrays, compared by path, shape and dtype. Leave out what is
            to differ, for example the parameters of an unevenly sharded model.
        values: settings by name, for example ``batch_size=8``: strings, numbers, bools or None.

    Raises:
        ValueError: the processes differ. The text names the ranks and what differs.
        TypeError: a value is of another type, or ``arrays`` has leaves that are no arrays.

    Example:
        >>> group = mx.distributed.init()
        >>> mlx_anvil.distributed.check_ranks(group, arrays=model, batch_size=8)
    """
    group = group or mx.distributed.init()
    own = {"version of": _versions(), "": _described(arrays), "value of": _checked(values)}
    if group.size() == 1:
        return
    text = json.dumps(own, sort_keys=True).encode()
    # The digests are the same in every process, so all of them gather the descriptions or none does.
    if len(set(gather_bytes(hashlib.sha256(text).digest(), group))) == 1:
        return
    descriptions = [json.loads(each) for each in gather_bytes(text, group)]
    lines = [line for kind in own for line in _differences(kind, [each[kind] for each in descriptions])]
    if not lines:
        return
    if len(lines) > _LONGEST_LIST:
        lines[_LONGEST_LIST:] = [f"and {len(lines) - _LONGEST_LIST} more"]
    raise ValueError(f"{_NAME} the processes differ; allowed: none does. {'; '.join(lines)}.")


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        if package.replace("-", "_") in sys.modules:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:  # imported from a source tree
                versions[package] = "unknown"
    return versions


def _described(arrays: Any) -> dict[str, str]:
    described = {}
    tree = arrays.parameters() if isinstance(arrays, nn.Module) else arrays  # type: ignore[no-untyped-call]
    leaves: list[tuple[str, Any]] = [] if tree is None else tree_flatten(tree)  # type: ignore[assignment]
    for path, leaf in leaves:
        if not isinstance(leaf, mx.array):
            raise TypeError(f"{_NAME} arrays has a {type(leaf).__name__} at {path or 'its root'}; allowed: arrays.")
        described[path or "arrays"] = f"{str(leaf.dtype).removeprefix('mlx.core.')} {list(leaf.shape)}"
    return described


def _checked(values: dict[str, Value]) -> dict[str, str]:
    for name, value in values.items():
        if not isinstance(value, Value):
            raise TypeError(f"{_NAME} {name} is a {type(value).__name__}; allowed: str, int, float, bool, None.")
    return {name: repr(value) for name, value in values.items()}


def _differences(kind: str, descriptions: list[dict[str, str]]) -> list[str]:
    """A line for each name that processes describe in different ways, such as ``"rank 1 has mlx 1, rank 0 has 2"``."""
    lines = []
    names = dict.fromkeys(name for description in descriptions for name in description)
    for name in names:
        given = [description.get(name, _NONE) for description in descriptions]
        if kind == "version of":  # a package that a process has not imported does no harm
            given = [each if each != _NONE else "" for each in given]
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(given):
            if each:
                ranks.setdefault(each, []).append(rank)
        if len(ranks) < 2:
            continue
        # Few ranks first: they are likely to be the wrong ones. Of two halves, that without rank 0.
        count = Counter(given)
        order = sorted(ranks, key=lambda each: (count[each], -ranks[each][0]))
        what = " ".join(filter(None, (kind, name)))
        lines.append(f"{what}: " + ", ".join(f"{listed(ranks[each])} {has(ranks[each])} {each}" for each in order))
    return lines
