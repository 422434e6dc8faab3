"""Launches as text: the arguments of `run` and `profile`, and files that hold several launches.

A .toml or .json file has one table, or a list of tables named `launch`, with these keys:

  source = "softmax.metal"          # relative to the file
  kernel = "softmax_float32"
  grid = [64, 1, 1]                 # threadgroups, or threads with dispatch = "threads"
  threadgroup = [256, 1, 1]
  dispatch = "threadgroups"         # optional, as are the following keys
  threadgroup_memory = [1024]       # bytes, by index
  include = ["../include"]
  label = "ours"
  constants = {aligned = true}      # function constants, by name or index
  defines = {TILE = 32}
  buffers = {0 = "random:float16:64,1024", 1 = "zeros:float16:64,1024", 2 = "uint32:1024"}

The keys of `buffers` are indices or parameter names. A buffer is one of

  in.npy                            read from a file
  zeros:DTYPE:SHAPE                 also ones, arange and random. random gives the same values in every run: normal for
                                    real types, all bits for unsigned integers, 0 to 99 for signed integers
  DTYPE:VALUE                       a constant; a number alone is int32 or float32
  struct:DTYPE=VALUE*COUNT,...      the fields of a struct, without padding

An array may end in `:out.npy`: it is written to that file after the run. DTYPE is NumPy's name, or bfloat16.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .compiler import UNCHECKED, Options
from .preprocess import Source
from .simulator import Library

_KEYS = {"source", "kernel", "grid", "threadgroup", "dispatch", "threadgroup_memory", "include", "label", "constants"}
_KEYS |= {"defines", "buffers"}


class LaunchError(ValueError):
    """The description of a launch is invalid."""


@dataclass
class LaunchDescription:
    source: Path
    kernel: str
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]
    buffers: dict[int | str, str] = field(default_factory=dict)
    dispatch: str = "threadgroups"
    threadgroup_memory: tuple[int, ...] = ()
    include: tuple[str, ...] = ()
    constants: dict[int | str, object] = field(default_factory=dict)
    defines: dict[str, object] = field(default_factory=dict)
    label: str = ""

    def library(self, options: Options = UNCHECKED) -> Library:
        if not self.source.exists():
            raise LaunchError(f"there is no file {self.source}")
        source = Source.load(self.source, self.include, self.defines)
        return Library(source, constants=self.constants, options=options)

    def bind(self) -> Bindings:
        return Bindings({key: parse_buffer(text, key) for key, text in self.buffers.items()})

    def arguments(self, bindings: Bindings) -> dict[str, Any]:
        """Returns the arguments for Library.run and profile()."""
        return {
            "kernel": self.kernel,
            "buffers": bindings.arrays,
            "grid": self.grid,
            "threadgroup": self.threadgroup,
            "threadgroup_memory": self.threadgroup_memory,
            "dispatch": self.dispatch,
        }


class Bindings:
    """The arrays of one launch and the files to save them to."""

    def __init__(self, parsed: Mapping[int | str, tuple[np.ndarray, str]]):
        self.arrays = {key: array for key, (array, _) in parsed.items()}
        self._outputs = {path: array for array, path in parsed.values() if path}

    def save(self) -> None:
        for path, array in self._outputs.items():
            np.save(path, array)


def is_description(path: str | Path) -> bool:
    return Path(path).suffix in (".toml", ".json")


def load_launches(path: str | Path) -> list[LaunchDescription]:
    path = Path(path)
    tables = _read(path)
    listed = tables.get("launch", [tables]) if isinstance(tables, dict) else tables
    return [_description(table, path) for table in listed]


def _read(path: Path) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(path.read_bytes())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise LaunchError(f"{path}: {error}") from None
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise LaunchError(f"{path}: reading TOML needs Python 3.11 or newer; write the launch as JSON") from None
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: {error}") from None


def _description(table: Any, path: Path) -> LaunchDescription:
    if not isinstance(table, dict):
        raise LaunchError(f"{path}: a launch must be a table, not {table!r}")
    unknown = sorted(set(table) - _KEYS)
    missing = [key for key in ("source", "kernel", "grid", "threadgroup") if key not in table]
    if unknown or missing:
        problem = f"unknown key '{unknown[0]}'" if unknown else f"'{missing[0]}' is missing"
        raise LaunchError(f"{path}: {problem}; known keys: {', '.join(sorted(_KEYS))}")
    return LaunchDescription(
        source=path.parent / table["source"],
        kernel=table["kernel"],
        grid=_extent(table, "grid", path),
        threadgroup=_extent(table, "threadgroup", path),
        buffers={_key(key): str(value) for key, value in table.get("buffers", {}).items()},
        dispatch=table.get("dispatch", "threadgroups"),
        threadgroup_memory=tuple(table.get("threadgroup_memory", ())),
        include=tuple(str(path.parent / directory) for directory in table.get("include", ())),
        constants={_key(key): value for key, value in table.get("constants", {}).items()},
        defines=table.get("defines", {}),
        label=table.get("label", ""),
    )


def _extent(table: dict[str, Any], key: str, path: Path) -> tuple[int, ...]:
    extent = table[key]
    if not isinstance(extent, list) or not 1 <= len(extent) <= 3 or not all(type(size) is int for size in extent):
        raise LaunchError(f"{path}: {key} must be a list of one to three whole numbers, not {extent!r}")
    return tuple(extent)


def _key(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def parse_extent(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise LaunchError(f"'{text}' is not a list of whole numbers such as 4,5,6") from None


# ---- buffers


def parse_buffer(text: str, key: int | str = 0) -> tuple[np.ndarray, str]:
    """Returns the array to bind and the file to save it to afterwards ("" for none)."""
    kind, *rest = text.split(":")
    if kind in _FILLS:
        if len(rest) not in (2, 3):
            raise LaunchError(f"'{text}' is not {kind}:DTYPE:SHAPE[:out.npy]")
        dtype, shape = rest[0], parse_extent(rest[1])
        array = _FILLS[kind](dtype, shape, np.random.default_rng(zlib.crc32(str(key).encode())))
        return np.ascontiguousarray(array), rest[2] if len(rest) == 3 else ""
    if kind.endswith(".npy"):
        if not Path(kind).exists():
            raise LaunchError(f"there is no file {kind}")
        return np.ascontiguousarray(np.load(kind)), rest[0] if rest else ""
    if kind == "struct":
        return np.frombuffer(b"".join(_field(part) for part in ":".join(rest).split(",")), np.uint8), ""
    if len(rest) == 1:
        return _constant(kind, rest[0]), ""
    if rest:
        raise LaunchError(f"'{text}' does not describe a buffer")
    return _constant("int32" if _is_whole(text) else "float32", text), ""


def to_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Converts to a data type. bfloat16 values become their bits in uint16."""
    if dtype != "bfloat16":
        return values.astype(_numpy_dtype(dtype))
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _numpy_dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        raise LaunchError(f"'{name}' is not a data type such as float16, bfloat16, uint32") from None


def _constant(dtype: str, text: str) -> np.ndarray:
    numbers = {"true": 1, "false": 0}
    try:
        value = numbers[text] if text in numbers else int(text, 0) if _is_whole(text) else float(text)
    except ValueError:
        raise LaunchError(f"'{text}' is not a number, and not a file that ends in .npy") from None
    return to_dtype(np.array(value), dtype)


def _is_whole(text: str) -> bool:
    return text.lstrip("+-").isdigit() or text.startswith("0x")


def _field(text: str) -> bytes:
    dtype, equals, value = text.partition("=")
    value, _, count = value.partition("*")
    if not equals or (count and not count.isdigit()):
        raise LaunchError(f"'{text}' is not a field such as uint32=5 or float32=0*4")
    return _constant(dtype, value).tobytes() * int(count or 1)


def _random(dtype: str, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    kind = "f" if dtype == "bfloat16" else _numpy_dtype(dtype).kind
    if kind == "u":
        return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    if kind == "i":
        return rng.integers(0, 100, shape, dtype)
    if kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    return to_dtype(rng.standard_normal(shape), dtype)


_FILLS = {
    "zeros": lambda dtype, shape, _: to_dtype(np.zeros(shape), dtype),
    "ones": lambda dtype, shape, _: to_dtype(np.ones(shape), dtype),
    "arange": lambda dtype, shape, _: to_dtype(np.arange(np.prod(shape)).reshape(shape), dtype),
    "random": _random,
}
