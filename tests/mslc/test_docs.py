"""docs/mslc.md says what is true: its files, commands and Python are run in order, and print what it shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "mslc.md"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def words(text: str) -> str:
    return " ".join(text.split())


def assert_shows(output: str, expected: str) -> None:
    """Every line of `expected` is in the output, in this order; `...` stands for anything."""
    rest = words(output)
    for line in filter(None, map(words, expected.splitlines())):
        found = re.search(".*?".join(map(re.escape, line.split("..."))), rest)
        assert found, f"{line!r} is not in the output, or not after the line before:\n{output}"
        rest = rest[found.end() :]


def test_the_document_does_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    output = ""
    counts = dict.fromkeys(("metal", "sh", "python", "text"), 0)
    for language, argument, code in BLOCK.findall(DOCUMENT.read_text()):
        counts[language] += 1
        if language == "metal":
            (tmp_path / argument.strip()).write_text(code)
        elif language == "sh":
            output = run_commands(code, fails="fails" in argument)
        elif language == "python":
            exec(compile(code, f"docs/mslc.md, block {counts['python']}", "exec"), namespace)
            output = capsys.readouterr().out
        elif language == "text":
            assert_shows(output, code)
    assert min(counts.values()) >= 3, counts


def run_commands(code: str, fails: bool) -> str:
    printed = ""
    for line in code.splitlines():
        command = shlex.split(line)
        assert command[0] == "python"
        environment = {**os.environ, "COLUMNS": "160"}
        result = subprocess.run(
            [sys.executable, *command[1:]], capture_output=True, text=True, env=environment, check=False
        )
        printed += result.stdout + result.stderr
        assert bool(result.returncode) == fails, printed
    return printed
