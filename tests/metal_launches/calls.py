"""Calls that together launch every kernel of every op: all dtypes, tiles, formats and layouts that the dispatch
distinguishes. Only the launches matter, not the results. They come from tests/<op>/launches.py."""

from importlib import import_module

from tests.metal_launches import ROOT

OPS = sorted(path.name for path in (ROOT / "metal").iterdir() if path.name != "common")
_MODULES = {op: import_module(f"tests.{op}.launches") for op in OPS}
CALLS = {op: module.every_kernel for op, module in _MODULES.items()}
CALLS_OF_MODELS = {op: module.of_models for op, module in _MODULES.items()}
