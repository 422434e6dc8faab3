"""The package is typed: a strict type checker accepts a sample that uses all of it, and refuses misuse."""

import subprocess
import sys
from pathlib import Path

import pytest

import exports
import mlx_anvil

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = Path(__file__).parent / "typing_sample.py"


# Ops have types too, whether the sample calls them or not.
EVERY_OP = "".join(f"{name}: Callable[..., object] = mlx_anvil.{name}\n" for name in exports.ops())
EVERY_OP = f"from collections.abc import Callable\nimport mlx_anvil\n{EVERY_OP}"
MISUSE = "import mlx_anvil\nmlx_anvil.silu_gate([1.0], 2)\nx: int = mlx_anvil.info()\n"


@pytest.mark.slow
def test_the_sample_passes_and_misuse_is_refused(tmp_path):
    """One run checks both, because most of the time goes to the packages that they import."""
    misuse, every_op = tmp_path / "misuse.py", tmp_path / "every_op.py"
    misuse.write_text(MISUSE)
    every_op.write_text(EVERY_OP)
    command = [sys.executable, "-m", "mypy", "--strict", *(str(path) for path in (SAMPLE, misuse, every_op))]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 1, run.stdout + run.stderr
    errors = [line for line in run.stdout.splitlines() if ": error:" in line]
    in_misuse = [line for line in errors if "misuse.py:" in line]
    assert [line for line in errors if line not in in_misuse] == []
    assert len(in_misuse) >= 3, run.stdout


def test_the_sample_runs_and_covers_everything_but_ops():
    subprocess.run([sys.executable, str(SAMPLE)], check=True, capture_output=True)
    text = SAMPLE.read_text()
    assert [name for name in set(mlx_anvil.__all__) - set(exports.ops()) if name not in text] == []


def test_everything_public_is_documented():
    for name in mlx_anvil.__all__:
        if name != "__version__":
            assert (getattr(mlx_anvil, name).__doc__ or "").strip(), name
    text = mlx_anvil.silu_gate.__doc__
    for part in ("Formula", "Args", "Returns", "Raises", "float32, float16 or bfloat16", "Matches"):
        assert part in text
