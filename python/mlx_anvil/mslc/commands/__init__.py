"""Subcommands of `python -m mlx_anvil.mslc`: one module each, with a click command named `command`.

To add one, write the module and add its name to MODULES.
"""

from __future__ import annotations

import importlib

import click

MODULES = ("check", "list", "run", "profile", "ptx", "agx", "estimate")


def all_commands() -> list[click.Command]:
    return [importlib.import_module(f"{__name__}.{name}").command for name in MODULES]
