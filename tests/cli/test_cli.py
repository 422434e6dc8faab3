"""``python -m mlx_anvil``: the table, its options, its exit status."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import mlx_anvil
from mlx_anvil import _check, _info
from mlx_anvil.__main__ import main
from mlx_anvil._cli import time_text
from mlx_anvil.mslc import install_command
from mlx_anvil.reference import DTYPES, OPS

pytestmark = pytest.mark.cpu_only


def invoke(*arguments: str):
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.996e-4, "1 ms"), (9.994e-4, "999 us"), (0.9999, "1 s"), (12.34e-6, "12.3 us"), (1234.5, "1230 s")],
)
def test_time_text(seconds, text):
    assert time_text(seconds) == text


@pytest.fixture
def small(monkeypatch):
    """Reduces every op to a small shape, so that the command is fast."""
    small_ops = {
        name: spec.__class__(**{**spec.__dict__, "check_shapes": spec.contract_shapes[-1:]}) for name, spec in OPS.items()
    }  # fmt: skip
    monkeypatch.setattr(_check, "OPS", small_ops)


def few(monkeypatch, **functions):
    """Reduces the registry to the named ops, with other functions."""
    specs = {
        name: _check.OPS[name].__class__(**{**_check.OPS[name].__dict__, "function": function})
        for name, function in functions.items()
    }
    monkeypatch.setattr(_check, "OPS", specs)


def check_tables(text: str) -> None:
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines()), text


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("show_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_check_covers_everything(show_all):
    result = invoke("check", "--json", "--seed", "3", *(["--all"] if show_all else []))
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
        assert row["ran_on"] == "cpu" or row["what"] == "gradient"
        assert ("ours" in row) == (show_all or row["represents_op"])
        if "ours" in row:
            assert row["ours"] > 0
            assert row["mlx"] > 0
            assert row["peak_memory"] > 0


@pytest.mark.usefixtures("small")
def test_no_command_means_check():
    result = invoke("--backend", "cpu")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    rows = lines[1 : lines.index("")]
    assert [line.split()[0] for line in rows] == sorted({spec.name for spec in OPS.values()})
    assert all("-" not in line.split()[4:] for line in rows), "every op has its times"
    assert "Passed: all" in result.stdout
    check_tables(result.stdout)


@pytest.mark.usefixtures("small")
def test_all_has_every_row():
    result = invoke("--all", "--op", "softmax_topk", "--op", "rope_qk")
    assert result.exit_code == 0, result.output
    variants = sum(spec.name in ("softmax_topk", "rope_qk") for spec in OPS.values())
    assert sum(line.startswith(("  forward", "  gradient")) for line in result.stdout.splitlines()) == 6 * variants
    check_tables(result.stdout)


@pytest.mark.usefixtures("small")
def test_a_missed_limit_fails(monkeypatch):
    monkeypatch.setattr(_check, "error_and_limit", lambda case, arrays: (2e-5, 1e-5))
    result = invoke("check", "--op", "silu_gate", "--seed", "5")
    assert result.exit_code == 1
    assert "FAILED: 6 of 6 results, of silu_gate." in result.stdout
    assert result.stdout.splitlines()[-1] == "python -m mlx_anvil --all --op silu_gate --seed 5"
    check_tables(result.stdout)


@pytest.mark.usefixtures("small")
def test_a_wrong_op_fails(monkeypatch):
    few(monkeypatch, silu_gate=lambda g, u: mlx_anvil.silu_gate(u, g))
    result = invoke("check", "--op", "silu_gate")
    assert result.exit_code == 1


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("arguments", [[], ["--all"], ["--json"]])
def test_an_op_that_raises_fails_and_the_others_run(monkeypatch, arguments):
    def broken(gate, up):
        raise RuntimeError("no such kernel\nand more")

    few(monkeypatch, silu_gate=broken, softmax_topk=_check.OPS["softmax_topk"].function)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    if "--json" in arguments:
        rows = json.loads(result.stdout)["rows"]
        assert {(row["op"], row["error"] is None, row["exception"]) for row in rows} == {
            ("silu_gate", True, "RuntimeError: no such kernel"),
            ("softmax_topk", False, ""),
        }
        return
    text = " ".join(result.stdout.split())
    assert "FAILED: 6 of 12 results, of silu_gate; silu_gate raised RuntimeError: no such kernel." in text
    check_tables(result.stdout)


@pytest.mark.usefixtures("small")
def test_inputs_depend_on_the_seed_and_the_case_alone():
    both, one = (_check.cases(ops, ["cpu"], 7) for ops in (["layer_norm", "rms_norm"], ["rms_norm"]))
    together = [row.error for row in _check.run(both, 7) if row.op == "rms_norm"]
    assert together == [row.error for row in _check.run(one, 7)]


def test_each_seed_draws_a_dtype_for_the_size_of_a_model():
    every = set(_check.cases(["gated"], ["cpu"]))
    drawn = [set(_check.cases(["gated"], ["cpu"], seed)) for seed in range(len(_check.DTYPES))]
    assert set.union(*drawn) == every
    small = {case for case in every if case.shape == case.spec.check_shapes[0]}
    timed = {case for case in every if _check.represents_op(case)}
    assert timed
    assert set.intersection(*drawn) == small | timed
    assert all(len(part) < len(every) for part in drawn)


def test_a_composed_graph_is_named():
    (case, *_) = _check.cases(["silu_gate"], ["cpu"])
    assert _check.run_case(case, timed=False).ran_on == "cpu"
    with mlx_anvil.composed():
        assert _check.run_case(case, timed=False).ran_on == "MLX ops"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["check", "--op", "nonsense"], 2, "'nonsense' is not one of"),
        (["check", "--backend", "abacus"], 2, "abacus is not usable here; usable: cpu"),
        (["--seed", "x"], 2, "'x' is not a valid integer"),
        (["--nonsense"], 2, "No such option"),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["report", "--out", "/dev/null/folder"], 1, "NotADirectoryError: "),
    ],
)
def test_errors_are_one_line(arguments, status, message):
    result = invoke(*arguments)
    assert result.exit_code == status
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_info():
    result = invoke("info", "--json")
    assert json.loads(result.stdout) == json.loads(json.dumps(mlx_anvil.info()))
    lines = invoke("info").stdout.splitlines()
    check_tables("\n".join(lines))
    assert lines[0] == "Backends"
    end = lines.index("This installation")
    text = " ".join(" ".join(lines[:end]).split())
    for name, backend in mlx_anvil.info()["backends"].items():
        state = "usable" if backend["usable"] else "not usable"
        advice = f" To do: {backend['advice']}" if backend["advice"] else ""
        assert f"{name} {state}: {backend['detail']}{advice}" in text
        assert bool(backend["advice"]) != backend["usable"], "what to do about each that is not usable"
    assert any(line.split() == ["version", mlx_anvil.__version__] for line in lines[end:])


def test_a_simulator_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_info, "is_installed", lambda name: name != "ziglang")
    simulator = mlx_anvil.info()["backends"]["simulator"]
    assert not simulator["usable"]
    assert simulator["detail"] == "ziglang not installed"
    assert simulator["advice"] == install_command("sim")


@pytest.mark.parametrize("command", ["check", "bench", "info"])
def test_json_is_a_flag_everywhere(command):
    (option,) = (option for option in main.commands[command].params if option.name == "as_json")
    assert option.is_flag
    assert option.help == "Print JSON instead of a table."


def test_as_a_module():
    run = subprocess.run([sys.executable, "-m", "mlx_anvil", "--version"], capture_output=True, text=True, check=True)
    assert mlx_anvil.__version__ in run.stdout


def test_the_command_needs_no_numpy():
    """``pip install ".[cpu]"`` does not install NumPy."""
    code = "import runpy, sys; sys.modules['numpy'] = None; sys.argv = ['mlx_anvil', '--help']; runpy.run_module('mlx_anvil', run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "check" in run.stdout
