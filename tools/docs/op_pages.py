"""A hook of MkDocs: writes the lists of ops, so that a new op needs no edit of the site.

In the navigation, ``{op}`` stands for every op's folder, and the titles are those of the pages. ``::: mlx_anvil.{op}``
on a page stands for every op of the package.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import mlx_anvil

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).resolve().parents[2]
PLACE = "{op}"
ENTRY = f"::: mlx_anvil.{PLACE}"
# Folders of csrc/ without ops: what ops share, formats of the quantized ops, and what works across processes.
NO_OPS = ("common", "gguf_matmul", "distributed")


def folders() -> list[str]:
    """Returns the names of the folders of ``csrc/`` that hold ops, in alphabetical order."""
    return sorted(path.name for path in (ROOT / "csrc").iterdir() if path.is_dir() and path.name not in NO_OPS)


def names() -> list[str]:
    """Returns the names of all ops of the package, in alphabetical order."""
    return [name for name in sorted(mlx_anvil.__all__) if hasattr(getattr(mlx_anvil, name), "__nb_signature__")]


def with_pages(nav: object) -> object:
    """Returns the navigation with an entry for each op in place of one with ``{op}``."""
    if isinstance(nav, dict):
        return {title: with_pages(entries) for title, entries in nav.items()}
    if not isinstance(nav, list):
        return nav
    entries: list[object] = []
    for entry in nav:
        if isinstance(entry, str) and PLACE in entry:
            pages = (entry.replace(PLACE, folder) for folder in folders())
            entries += [{_title(page): page} for page in pages]
        else:
            entries.append(with_pages(entry))
    return entries


def _title(page: str) -> str:
    heading = (ROOT / "docs" / page).read_text().partition("\n")[0]
    return heading.removeprefix("# ").removesuffix(": design")


def with_entries(markdown: str) -> str:
    """Returns the text of a page with an entry for each op in place of ``::: mlx_anvil.{op}``."""
    return markdown.replace(ENTRY, "\n".join(ENTRY.replace(PLACE, name) for name in names()))


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    config.nav = with_pages(config.nav)
    return config


def on_page_markdown(markdown: str, **_: object) -> str:
    return with_entries(markdown)
