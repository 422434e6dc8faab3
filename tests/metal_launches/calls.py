"""Calls of every op that between them ask for every kernel: all dtypes, tiles, formats and layouts that dispatches tell
apart. What they compute does not matter, only what they launch. They are those of tests/<op>/launches.py, by op."""

from importlib import import_module

from tests.metal_launches import ROOT

OPS = sorted(path.name for path in (ROOT / "metal").iterdir() if path.name != "common")
_MODULES = {op: import_module(f"tests.{op}.launches") for op in OPS}
CALLS = {op: module.every_kernel for op, module in _MODULES.items()}
CALLS_OF_MODELS = {op: module.of_models for op, module in _MODULES.items()}
