"""How this package was installed, and the ``pip`` commands that fit: what works for a wheel finds nothing for a
checkout.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "mlx-anvil"


@dataclass(frozen=True)
class Origin:
    """Where ``pip`` got the package from.

    Attributes:
        local: folder of the checkout, or path of the wheel; None if it came from elsewhere.
        url: URL that ``pip`` takes, such as ``"git+https://..."``; empty for a package index.
        is_editable: True if the Python files are used in place.
    """

    local: Path | None = None
    url: str = ""
    is_editable: bool = False


def origin() -> Origin:
    """Where this package was installed from. Without metadata, a package index."""
    try:
        text = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return Origin()
    return _parsed(json.loads(text)) if text else Origin()


def _parsed(record: dict[str, Any]) -> Origin:
    """Reads ``direct_url.json`` (PEP 610). A folder or file that is gone cannot be installed from again."""
    url = str(record["url"])
    if version_control := record.get("vcs_info"):
        revision = version_control.get("requested_revision") or version_control["commit_id"]
        return Origin(url=f"{version_control['vcs']}+{url}@{revision}")
    parts = urlsplit(url)
    if parts.scheme != "file":
        return Origin(url=url)
    path = Path(url2pathname(parts.path))
    is_editable = bool(record.get("dir_info", {}).get("editable"))
    exists = path.is_file() or (path / "pyproject.toml").is_file()
    return Origin(path, is_editable=is_editable) if exists else Origin()


def requirement(extra: str = "") -> str:
    """What ``pip install`` takes for this package, with an extra: ``".[sim]"`` in the folder of a checkout."""
    brackets = f"[{extra}]" if extra else ""
    source = origin()
    if source.local is not None:
        return ("." if source.local == _here() else str(source.local)) + brackets
    return f"{NAME}{brackets}" + (f" @ {source.url}" if source.url else "")


def _here() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # the folder was deleted
        return None


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation: ``pip install "mlx-anvil[sim]"`` for a published wheel."""
    return f"pip install {_editable()}{_quoted(requirement(extra))}"


def reinstall_command() -> str:
    """The command that installs or builds the package again."""
    return f"pip install --force-reinstall --no-cache-dir {_editable()}{_quoted(requirement())}"


def _editable() -> str:
    return "-e " if origin().is_editable else ""


def _quoted(text: str) -> str:
    """In double quotes as in the documentation, unless a shell would still read something into them."""
    if os.name == "posix" and re.search(r'["$`\\!]', text):
        return shlex.quote(text)
    return f'"{text}"' if re.search(r"[^\w./-]", text) else text
