"""The Python blocks of the README run as written, one after another, as a newcomer would paste them."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

README = Path(__file__).resolve().parent.parent / "README.md"


def test_readme_code_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
