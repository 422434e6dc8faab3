"""Hooks of MkDocs: add the files outside of ``docs/`` that pages link to, and put users' pages first in the search.

Pages are read in the repository too, where ``../bench/results/rope_cpu.json`` is the file itself. In the site, the same
link leads to a copy, so every figure stays one click from its measurement, wherever the site is hosted.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")


def _target(page: str, link: str) -> str:
    """Returns the linked file, relative to the repository. ``page`` is relative to ``docs/``."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))


def _copy(target: str) -> str:
    """Returns the path of the copy in the site. MkDocs leaves out names that start with a dot."""
    return f"repository/{target}".replace("/.", "/")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the linked files. Links to missing files stay as they are and fail the build."""
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for _, link in _LINK.findall(page.content_string):
            target = _target(page.src_uri, link)
            outside = not target.startswith("docs/")
            if outside and (root / target).is_file() and not files.get_file_from_path(_copy(target)):
                files.append(File.generated(config, _copy(target), abs_src_path=str(root / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirects the links to the copies. Reference pages come after the others in the search."""
    source = page.file.src_uri
    if source.startswith(("api/", "design/")):
        page.meta["search"] = {"boost": 0.3}

    def replace(match: re.Match[str]) -> str:
        copy = _copy(_target(source, match[2]))
        if not files.get_file_from_path(copy):
            return match[0]
        return match[1] + posixpath.relpath(copy, posixpath.dirname(source) or ".")

    return _LINK.sub(replace, markdown)
