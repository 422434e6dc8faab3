"""The package is typed: a strict type checker accepts a sample that uses all of it, and refuses misuse."""

import subprocess
import sys
from pathlib import Path

import pytest

import mlx_anvil

pytestmark = pytest.mark.cpu_only

SAMPLE = Path(__file__).parent / "typing_sample.py"


def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=SAMPLE.parent)


@pytest.mark.slow
def test_the_sample_passes():
    run = mypy(str(SAMPLE))
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_misuse_is_refused():
    run = mypy("-c", "import mlx_anvil\nmlx_anvil.silu_gate([1.0], 2)\nx: int = mlx_anvil.info()\n")
    assert run.returncode == 1
    assert run.stdout.count("error:") >= 3, run.stdout


def test_the_sample_runs_and_covers_everything():
    subprocess.run([sys.executable, str(SAMPLE)], check=True, capture_output=True)
    text = SAMPLE.read_text()
    assert [name for name in mlx_anvil.__all__ if name not in text] == []


def test_everything_public_is_documented():
    for name in mlx_anvil.__all__:
        if name != "__version__":
            assert (getattr(mlx_anvil, name).__doc__ or "").strip(), name
    text = mlx_anvil.silu_gate.__doc__
    for part in ("Formula", "Args", "Returns", "Raises", "float32, float16 or bfloat16", "Matches"):
        assert part in text
