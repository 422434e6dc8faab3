"""Runs the code of a Markdown page: ``python tests/documents.py docs/mslc.md``. The tests do so with every page.

Blocks run from top to bottom, Python in one namespace, in a folder of their own that looks like the repository. What a
block is says its language:

- ``python`` is executed.
- ``sh`` and ``bash``, line by line: ``python ...`` is executed, and has to succeed (to fail, in a block opened by
  ``sh fails``). ``pip install`` is compared with the extras of pyproject.toml, of ``pytest`` only its options are
  tried.
- a block with ``title="name"`` is written to that file.
- ``text`` right behind a block that ran is what it prints: every line, in this order; ``...`` stands for anything.
  Elsewhere it is a formula or a drawing, as are blocks without a language.

A comment above a block changes that::

    <!-- not run: needs an NVIDIA GPU -->      not executed; its commands still have to exist
    <!-- Linux: the simulator -->              executed on Linux only
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHELLS = ("sh", "bash")
_BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NOT_RUN = "not run:"
_LEFT_OUT = re.compile(r"\..*|build.*|dist|site|__pycache__")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    place: str
    language: str
    options: str
    code: str
    note: str
    is_adjacent: bool  # nothing between this block and the one before

    @property
    def is_code(self) -> bool:
        return self.language not in ("", "text")

    @property
    def runs(self) -> bool:
        elsewhere = self.note.startswith("Linux:") and sys.platform != "linux"
        return not self.note.startswith(_NOT_RUN) and not elsewhere

    @property
    def title(self) -> str:
        found = re.search(r'title="([^"]+)"', self.options)
        return found[1] if found else ""


def pages() -> list[Path]:
    """Every page that readers copy code from."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    name = page.relative_to(ROOT)
    blocks, end = [], 0
    for match in _BLOCK.finditer(text):
        note = match["note"] or ""
        if note and not note.startswith((_NOT_RUN, "Linux:")):
            note = ""
        place = f"{name}:{text.count(chr(10), 0, match.start('code'))}"
        is_adjacent = not match["note"] and not text[end : match.start()].strip()
        blocks.append(Block(place, match["language"], match["options"], match["code"], note, is_adjacent))
        end = match.end()
    fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
    assert fences == 2 * len(blocks), f"{name} has {fences} fences, of which {2 * len(blocks)} make blocks"
    return blocks


def _words(text: str) -> str:
    return " ".join(text.split())


def assert_shows(output: str, expected: str) -> None:
    """Every line of ``expected`` is in the output, in this order; ``...`` stands for anything."""
    rest = _words(output)
    for line in filter(None, map(_words, expected.splitlines())):
        found = re.search(".*?".join(map(re.escape, line.split("..."))), rest)
        assert found, f"{line!r} is not in the output, or not after the line before:\n{output}"
        rest = rest[found.end() :]


def commands(block: Block) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The commands of a shell block, each with the variables that are set for it."""
    for line in block.code.replace("\\\n", " ").splitlines():
        command: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                command.append(word)
            elif command:
                count = next((i for i, w in enumerate(command) if not re.match(r"[A-Z_]+=", w)), len(command))
                variables = dict(w.split("=", 1) for w in command[:count])
                yield variables, command[count:]
                command = []


def _extras() -> set[str]:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


def check_command(words: list[str]) -> None:
    """What can be said about a command without running it: scripts, modules and extras exist."""
    if words[0] == "python" and words[1:2] != ["-m"] and words[1] != "-c":
        assert (ROOT / words[1]).is_file() or Path(words[1]).is_file(), f"no script {words[1]}"
    if words[:2] == ["pip", "install"]:
        for word in words[2:]:
            found = re.fullmatch(r"(?:\.|mlx-anvil)\[([\w,]+)\]", word)
            unknown = set(found[1].split(",")) - _extras() if found else set()
            assert not unknown, f"pyproject.toml has no extras {unknown}"


def run_shell(block: Block) -> str:
    """Runs the commands of a block; what they print."""
    printed = ""
    for variables, words in commands(block):
        check_command(words)
        if words[0] == "pip":
            continue
        if words[0] == "pytest":
            words = ["python", "-m", *words, "--collect-only", "-q", "-p", "no:cacheprovider"]
        assert words[0] == "python", f"{block.place}: neither run nor marked as not run: {' '.join(words)}"
        environment = {**os.environ, "COLUMNS": "160", **variables}
        result = subprocess.run(
            [sys.executable, *words[1:]], capture_output=True, text=True, env=environment, check=False
        )
        printed += result.stdout + result.stderr
        assert bool(result.returncode) == ("fails" in block.options.split()), f"{' '.join(words)}:\n{printed}"
    return printed


def run_page(page: Path) -> None:
    """Runs the blocks of a page in the current folder."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    output: str | None = None  # of the last block, if it ran
    for block in read_blocks(page):
        if block.language == "text" and block.is_adjacent and output is not None:
            assert_shows(output, block.code)
            continue
        output = None
        if not block.is_code:
            continue
        if not block.runs:
            if block.language in SHELLS:
                for _, words in commands(block):
                    check_command(words)
            continue
        print(f"-- {block.place}", flush=True)
        if block.title:
            Path(block.title).write_text(block.code)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                # Line numbers are those of the page.
                line = int(block.place.rpartition(":")[2])
                exec(compile("\n" * line + block.code, str(page), "exec"), namespace)
            output = printed.getvalue()
        elif block.language in SHELLS:
            output = run_shell(block)
        else:
            raise AssertionError(f"{block.place}: neither run nor marked as not run")


def main() -> None:
    """Runs one page in a temporary copy of the repository, made of links."""
    if len(sys.argv) != 2:
        raise SystemExit("Usage: python tests/documents.py PAGE")
    page = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        for path in ROOT.iterdir():
            if not _LEFT_OUT.fullmatch(path.name):
                (Path(folder) / path.name).symlink_to(path)
        os.chdir(folder)
        run_page(page)
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
