"""The code of the README and the pages under docs/ runs as written (``documents.py`` says how)."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

import documents
import mlx_anvil
import support_matrix
import tables

pytestmark = pytest.mark.cpu_only

PAGES = {str(page.relative_to(documents.ROOT)): page for page in documents.pages()}

# Blocks that are not run, for the reason that the page gives in a comment above. A new one is to be counted here.
NOT_RUN = {
    "README.md": 2,
    "docs/apple-kernels.md": 2,
    "docs/apple.md": 2,
    "docs/benchmarks.md": 2,
    "docs/cuda.md": 1,
    "docs/distributed-training.md": 1,
    "docs/estimates.md": 1,
    "docs/index.md": 1,
    "docs/macos.md": 4,
    "docs/patching.md": 1,
    "docs/server.md": 1,
    "docs/tuning.md": 1,
    "docs/xcode.md": 1,
}


def code_blocks(page: Path) -> list[documents.Block]:
    return [block for block in documents.read_blocks(page) if block.is_code]


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if code_blocks(page)])
def test_code_runs(name):
    result = subprocess.run([sys.executable, documents.__file__, PAGES[name]], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_training_example_learns(capsys):
    example = next(block for block in code_blocks(PAGES["docs/index.md"]) if "optimizer.update" in block.code)
    exec(compile(example.code, example.place, "exec"), {"mx": mx, "nn": nn, "mlx_anvil": mlx_anvil})
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]


def test_blocks_that_are_not_run_are_counted():
    counts = {name: sum(not block.runs for block in code_blocks(page)) for name, page in PAGES.items()}
    assert {name: count for name, count in counts.items() if count} == NOT_RUN


def test_python_is_not_left_out():
    """Only shell commands may be marked as not run: they need another machine, or CI runs them anyway."""
    for page in PAGES.values():
        for block in code_blocks(page):
            assert block.runs or block.language in documents.SHELLS or block.note.startswith("Linux:"), block.place


@pytest.mark.parametrize(
    ("code", "status", "message"), [("print(1)", 1, "'2' is not in"), ("raise SystemExit(3)", 3, "")]
)
def test_a_wrong_page_is_found(tmp_path, code, status, message):
    """Output that differs from the page, and code that fails."""
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{code}\n```\n```text\n2\n```\n")
    result = subprocess.run(
        [sys.executable, "-c", f"import documents; documents.ROOT = documents.Path({str(tmp_path)!r}); "
         f"documents.run_page(documents.Path({str(page)!r}))"],
        cwd=Path(documents.__file__).parent, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == status
    assert message in result.stderr


# ---- figures, the support matrix, quoted messages and reasons --------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if tables.GENERATED.search(page.read_text())])
def test_tables_are_those_of_the_results(name):
    """``python bench/plot.py`` writes them."""
    page = PAGES[name].read_text()
    assert tables.with_tables(page) == page


def test_every_table_is_on_a_page():
    used = {match[2] for page in PAGES.values() for match in tables.GENERATED.finditer(page.read_text())}
    assert used == set(tables.TABLES)


def test_support_matrix():
    page = support_matrix.PAGE.read_text()
    assert support_matrix.with_table(page) == page, "python tests/support_matrix.py writes the table"


def literals(source: Path) -> str:
    """All string literals of a source file, adjacent ones joined, what is filled in as NUL; blanks are one space."""
    text = source.read_text()
    if source.suffix == ".py":
        strings = [
            "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            if isinstance(node, ast.JoinedStr)
            else node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        ]
    else:
        joined = re.sub(r'"\s*\n\s*"', "", text)
        strings = re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
    return " ".join("\n".join(strings).split())


MESSAGE = re.compile(r"^<!-- message: (\S+) -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_quoted_messages_are_those_of_the_sources():
    text = PAGES["docs/troubleshooting.md"].read_text()
    quoted = MESSAGE.findall(text)
    assert len(quoted) == text.count("<!-- message:") > 5
    for name, message in quoted:
        strings = literals(documents.ROOT / name)
        words = re.sub(r"ImportError: |\[\w+\] ", "", " ".join(message.split()))
        missing = [part for part in words.split("...") if part.strip(" .") not in strings]
        assert not missing, f"{name} does not say {missing}"


def reasons() -> set[str]:
    """Every reason that reaches note_fallback, with ... in place of names."""
    found: set[str] = set()
    for source in sorted((documents.ROOT / "csrc").rglob("*.cpp")):
        text = source.read_text()
        found.update(re.findall(r'\*why_not =\s*"([^"]+)"', text))
        for function in re.findall(r"^const char\* why_not_\w+\(.*?^}", text, re.MULTILINE | re.DOTALL):
            found.update(re.findall(r'"([^"]+)"', function))
        for call in re.findall(r"note_fallback\((?!const)([^;]*)\);", text):
            found.add("...".join(part for part in re.findall(r'"([^"]*)"', call) if " " in part))
    return {reason for reason in found if reason}


def test_reasons_of_fall_backs():
    table = PAGES["docs/troubleshooting.md"].read_text().partition("| reason |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE))
    patterns = {reason: re.escape(reason).replace(r"\.\.\.", ".*") for reason in listed}
    known = reasons()
    assert len(known) > 10
    unlisted = {reason for reason in known if not any(re.fullmatch(p, reason) for p in patterns.values())}
    assert not unlisted
    unknown = {reason for reason, p in patterns.items() if not any(re.fullmatch(p, r) for r in known)}
    assert not unknown
