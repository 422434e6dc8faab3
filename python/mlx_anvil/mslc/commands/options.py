"""Options shared by several subcommands."""

from __future__ import annotations

from collections.abc import Callable

import click

from ..preprocess import Source

_DECORATORS = (
    click.option("-I", "include_dirs", multiple=True, metavar="DIR", help="Directory to search for included files."),
    click.option("-D", "defines", multiple=True, metavar="NAME[=VALUE]", help="Macro to define."),
    click.option("-C", "--constant", "constants", multiple=True, metavar="NAME=VALUE", help="A function constant."),
)


def source_options(function: Callable) -> Callable:
    for decorator in reversed(_DECORATORS):
        function = decorator(function)
    return function


def load_source(path: str, include_dirs: tuple[str, ...], defines: tuple[str, ...]) -> Source:
    from pathlib import Path

    pairs = (definition.partition("=") for definition in defines)
    return Source.load(Path(path), include_dirs, {name: value or "1" for name, _, value in pairs})


def parse_constants(texts: tuple[str, ...]) -> dict[int | str, object]:
    """Parses NAME=VALUE or INDEX=VALUE. The value is true, false, an integer or a real number."""
    constants: dict[int | str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"'{text}' is not NAME=VALUE", param_hint="--constant")
        key: int | str = int(name) if name.isdigit() else name
        constants[key] = _number(value)
    return constants


def _number(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"'{text}' is not a number or true or false", param_hint="--constant") from None
