"""``python -m mlx_anvil``: the table, its options, its exit code."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import mlx_anvil
from mlx_anvil import _check
from mlx_anvil.__main__ import main
from mlx_anvil.reference import DTYPES, OPS

pytestmark = pytest.mark.cpu_only


def invoke(*arguments: str):
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def small(monkeypatch):
    """Every op at a small shape, so that the job is quick."""
    small_ops = {
        name: spec.__class__(**{**spec.__dict__, "check_shapes": spec.contract_shapes[-1:]}) for name, spec in OPS.items()
    }  # fmt: skip
    monkeypatch.setattr(_check, "OPS", small_ops)


@pytest.mark.usefixtures("small")
def test_check_covers_everything():
    result = invoke("check", "--json", "--seed", "3")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert body["seed"] == 3
    seen = {(row["op"], row["variant"], row["what"], row["dtype"]) for row in body["rows"]}
    names = [_check.dtype_name(dtype) for dtype in DTYPES]
    specs = [(spec.name, spec.variant) for spec in OPS.values()]
    assert seen == {(*spec, what, dtype) for spec in specs for what in ("forward", "gradient") for dtype in names}
    for row in body["rows"]:
        assert 0 <= row["error"] <= row["limit"]
        assert row["passed"]
        assert row["ours"] > 0
        assert row["mlx"] > 0
        assert row["peak_memory"] > 0


@pytest.mark.usefixtures("small")
def test_no_command_means_check():
    result = invoke()
    assert result.exit_code == 0, result.output
    assert "silu_gate" in result.stdout
    assert "within limits" in result.stdout


@pytest.mark.usefixtures("small")
def test_a_missed_limit_fails(monkeypatch):
    monkeypatch.setattr(_check, "error_and_limit", lambda case, arrays: (2e-5, 1e-5))
    result = invoke("check")
    assert result.exit_code == 1
    assert "above their limit" in result.stdout


@pytest.mark.usefixtures("small")
def test_a_wrong_op_fails(monkeypatch):
    spec = _check.OPS["silu_gate"]
    wrong = spec.__class__(**{**spec.__dict__, "function": lambda g, u: mlx_anvil.silu_gate(u, g)})
    monkeypatch.setattr(_check, "OPS", {"silu_gate": wrong})
    result = invoke("check", "--op", "silu_gate")
    assert result.exit_code == 1


def test_unknown_choices():
    result = invoke("check", "--op", "nonsense")
    assert result.exit_code == 2
    assert "silu_gate" in result.stderr
    result = invoke("check", "--backend", "metal" if not mlx_anvil.info()["backends"]["metal"]["usable"] else "none")
    assert result.exit_code == 2
    assert "not usable here; usable: cpu" in result.stderr


def test_info():
    result = invoke("info", "--json")
    assert json.loads(result.stdout) == json.loads(json.dumps(mlx_anvil.info()))
    text = invoke("info").stdout
    for word in ("0.1.0", "backend", "cpu", "metal"):
        assert word in text


def test_as_a_module():
    run = subprocess.run([sys.executable, "-m", "mlx_anvil", "--version"], capture_output=True, text=True, check=True)
    assert mlx_anvil.__version__ in run.stdout
