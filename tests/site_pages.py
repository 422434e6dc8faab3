"""The built documentation site: one build for all the tests that look at it."""

import atexit
import html
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def build() -> Path:
    """Builds the site, once in a process, into a folder that is removed at the end of the process."""
    folder = tempfile.TemporaryDirectory(prefix="mlx-anvil-site-")
    atexit.register(folder.cleanup)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder.name]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return Path(folder.name)


def repository() -> str:
    """The address of the repository, from the package's metadata."""
    found = re.search(r'^Repository = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def pages() -> list[str]:
    """Paths of the site's pages, without copies of the repository's files."""
    found = (path.relative_to(build()).as_posix() for path in build().rglob("*.html"))
    return sorted(path for path in found if not path.startswith("repository/") and path != "404.html")


def text(source: str) -> str:
    """The visible text of some HTML, with single spaces."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", source)).split())


@cache
def entries() -> dict[str, str]:
    """The HTML of each API entry, by the name that it documents: from its heading to the next entry's."""
    found = {}
    for page in sorted((build() / "api").glob("*.html")):
        article = page.read_text().partition("<article")[2].partition("</article>")[0]
        places = list(re.finditer(r'<h[2-4] id="(mlx_anvil[\w.]*)" class="doc doc-heading">', article))
        for place, following in zip(places, [*places[1:], None], strict=True):
            found[place[1]] = article[place.start() : following.start() if following else len(article)]
    return found
