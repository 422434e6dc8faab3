"""Helpers for tests of the Metal source."""

import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def kernels_for_apple() -> frozenset[str]:
    """The kernels that a build for macOS embeds."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "metal_source.cpp")
        command = [sys.executable, ROOT / "tools" / "embed_metal.py", "--root", ROOT, "--output", output]
        subprocess.run([*command, "--compiler", "c++", "--apple"], check=True)
        return frozenset(re.findall(r'^    \{"(\w+)", "metal/', output.read_text(), re.MULTILINE))
