"""``python -m mlx_anvil tune``, the file that it writes, and what a file does. The search runs in the simulator, where
counts stand for times, and with times that are made up."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result

import mlx_anvil
from mlx_anvil import _ext, _tuning
from mlx_anvil.__main__ import main
from mlx_anvil.tune import candidates, search
from mlx_anvil.tune.candidates import Candidates, Workload
from mlx_anvil.tune.search import Tuner

pytestmark = pytest.mark.cpu_only

NORM = "norm.elements_per_thread"


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file that ``MLX_ANVIL_TUNING`` names."""
    path = tmp_path / "folder" / "tuning.json"
    path.parent.mkdir()
    monkeypatch.setenv("MLX_ANVIL_TUNING", str(path))
    _tuning.forget()
    yield path
    monkeypatch.undo()
    _tuning.forget()


def write(file: Path, choices: object, device: str = "simulator") -> None:
    file.write_text(json.dumps({"format": 1, "devices": {device: {"choices": choices}}}))
    _tuning.forget()


def elements(**chip: Any) -> int:
    with mlx_anvil.simulate(**chip):
        return _ext._choices("cpu")[NORM]


def threads_of_norm() -> int:
    """Of a kernel's threadgroup, for a row of 1024 elements."""
    with mlx_anvil.simulate(), mlx_anvil.trace() as trace:
        mx.eval(mlx_anvil.rms_norm(mx.ones((2, 1024)), mx.ones(1024)))
    return trace.events[0].threadgroup[0]


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["tune", *arguments])


# ---- the file


def test_a_file_changes_launches(file):
    write(file, {})
    assert threads_of_norm() == 128
    write(file, {NORM: 4})
    assert threads_of_norm() == 256
    write(file, {NORM: 16})  # at most 32 bytes of float32
    assert threads_of_norm() == 128


def test_a_section_belongs_to_one_device(file):
    write(file, {NORM: 2}, "simulator: M4 Max")
    assert [elements(), elements(chip="M4 Max"), elements(chip="M4 Pro"), elements(matrix_units=True)] == [8, 2, 8, 16]


def test_a_file_can_route_older_chips_to_mlx(file, rng):
    write(file, {"flash_attention.mlx_queries": 12, "quantized_matmul.mlx_rows": 20}, "simulator: M3")
    q = {n: mx.array(rng.standard_normal((1, 1, n, 64))).astype(mx.float16) for n in (11, 12)}
    w = mx.quantize(mx.array(rng.standard_normal((40, 128))).astype(mx.float16))
    x = {n: mx.array(rng.standard_normal((n, 128))).astype(mx.float16) for n in (19, 20)}
    by_mlx = []
    for call in (
        *(lambda n=n: mlx_anvil.flash_attention(q[n], q[n], q[n]) for n in q),
        *(lambda n=n: mlx_anvil.quantized_matmul(x[n], *w) for n in x),
    ):
        with mlx_anvil.simulate(chip="M3"), mlx_anvil.strict(), mlx_anvil.trace() as trace:
            mx.eval(call())
        by_mlx.append([event.reason for event in trace.events if event.kernel.startswith("mx.")])
    assert by_mlx == [[], ["MLX's kernel is faster, says the tuning file"]] * 2


def test_off(file, monkeypatch):
    write(file, {NORM: 2})
    assert elements() == 2
    monkeypatch.setenv("MLX_ANVIL_TUNING", "off")
    _tuning.forget()
    assert elements() == 8
    assert mlx_anvil.info()["tuning"] == "off (MLX_ANVIL_TUNING)"
    result = tune("--backend", "simulator")
    assert result.exit_code == 1
    assert "MLX_ANVIL_TUNING is off, so no file is read; unset it, or add --dry-run." in result.output


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON: Expecting property name"),
        ("\xff", "it is not JSON"),
        ("[1]", 'it has no "format": 1'),
        ('{"format": 2, "devices": {}}', 'it has no "format": 1'),
        ('{"format": 1}', 'it has no "devices", each with its "choices"'),
        ('{"format": 1, "devices": {"simulator": []}}', 'it has no "devices", each with its "choices"'),
        ('{"format": 1, "devices": {"simulator": {"choices": 3}}}', 'it has no "devices", each with its "choices"'),
    ],
)
def test_files_that_are_none(file, text, why):
    file.write_bytes(text.encode("latin-1"))
    with pytest.warns(RuntimeWarning, match=r"^\[tune\] .*tuning.json: .* The defaults are used\.") as warned:
        assert elements() == 8
    assert why in str(warned[0].message)
    assert why in mlx_anvil.info()["tuning"]
    result = tune("--backend", "simulator", "--choice", NORM)
    assert result.exit_code == 1
    assert "Move it away, and try again." in result.output
    assert file.read_bytes() == text.encode("latin-1")


def test_a_file_that_is_not_there(file):
    with pytest.warns(RuntimeWarning, match="No such file or directory. The defaults are used"):
        assert elements() == 8
    assert mlx_anvil.info()["tuning"].startswith("defaults; ")


def test_a_folder(file):
    file.mkdir()
    with pytest.warns(RuntimeWarning, match="Is a directory. The defaults are used"):
        assert elements() == 8


@pytest.mark.parametrize("value", [0, 17, -1, 2**70, 1.5, "4", None, True, [4]])
def test_values_that_are_not_allowed(file, value):
    write(file, {NORM: value, "quantized_matmul.split_rows": 16})
    with pytest.warns(RuntimeWarning, match=rf"{NORM} is .*; allowed: integers from 1 to 16. Ignored"):
        assert elements() == 8
    with mlx_anvil.simulate():
        assert _ext._choices("cpu")["quantized_matmul.split_rows"] == 16
    assert "; ignored: norm" in mlx_anvil.info()["tuning"]


def test_a_choice_of_another_version(file):
    write(file, {"silu_gate.warp": 1, NORM: 4})
    with pytest.warns(RuntimeWarning, match="silu_gate.warp is not a choice of this version. Ignored"):
        assert elements() == 4


def test_warnings_that_are_errors_reach_the_caller(file):
    file.write_text("{")
    with pytest.raises(RuntimeError, match=r"^\[tune\] the tuning file: .*it is not JSON"):
        threads_of_norm()


def test_the_default_place(monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_ANVIL_TUNING")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert _tuning.path() == tmp_path / "mlx-anvil" / "tuning.json"
    assert _tuning.state() == "defaults"
    assert _tuning._read("simulator") == {}
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _tuning.path() == tmp_path / ".config" / "mlx-anvil" / "tuning.json"
    assert _tuning.shown(_tuning.path()) == "~/.config/mlx-anvil/tuning.json"
    monkeypatch.setattr("sys.platform", "darwin")
    assert _tuning.path() == tmp_path / "Library" / "Application Support" / "mlx-anvil" / "tuning.json"


# ---- the command


@pytest.mark.slow
def test_tune_in_the_simulator(file):
    """Every choice that the simulator can count; a second device is added to the file."""
    result = tune("--backend", "simulator", "--all")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if str(file) not in line), result.stdout
    assert "The simulator has no times." in result.stdout
    assert " ".join(result.stdout.split()).endswith(f"Wrote {file}.")
    body = json.loads(file.read_text())
    (section,) = body["devices"].values()
    assert set(section["measured"]) == {each.name for each in candidates.of_backend("simulator")}
    assert all(row["counts"] > 0 for rows in section["measured"].values() for row in rows)
    with mlx_anvil.simulate():
        now = _ext._choices("cpu")
    assert {name: now[name] for name in section["choices"]} == section["choices"]
    assert str(file) in mlx_anvil.info()["tuning"]

    again = tune("--chip", "M4 Max", "--choice", NORM, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["device"] == "simulator: M4 Max"
    assert json.loads(file.read_text())["devices"]["simulator"] == section


def test_a_dry_run_writes_nothing(file):
    result = tune("--backend", "simulator", "--choice", NORM, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "No file was written." in result.stdout
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--backend", "gpu"), "gpu is not usable here; usable:"),
        (("--backend", "simulator", "--chip", "M9"), "chip is 'M9'; allowed: M1"),
        (("--backend", "simulator", "--choice", "flash_attention.mlx_queries"), "simulator does not have"),
        (("--choice", "nothing"), "'nothing' is not one of"),
        (("--rounds", "1"), "1 is not in the range"),
    ],
)
def test_wrong_arguments(arguments, text):
    result = tune(*arguments)
    assert result.exit_code != 0
    assert text in " ".join(result.output.split())
    assert "Traceback" not in result.output


# ---- the search, with made-up costs and a kernel that is sometimes wrong


def found(
    monkeypatch: pytest.MonkeyPatch, costs: dict[int, float], wrong: tuple[int, ...] = (), default: int = 8
) -> search.Found:
    """What is selected if values have these costs, and wrong ones give wrong results."""

    def make() -> Callable[[], mx.array]:
        x = mx.random.normal((2, 64)).astype(mx.bfloat16)

        def call() -> mx.array:
            result = mlx_anvil.rms_norm(x, mx.ones(64))
            return result * 1.5 if tuner._forced.get(NORM) in wrong else result

        return call

    made_up = Candidates(NORM, tuple(costs), lambda value, size: value, lambda small: [Workload("call", 0, make)])
    monkeypatch.setattr(Tuner, "_counts", lambda self, right: {key: [costs[key]] for key in right})
    with Tuner("simulator") as tuner:
        result = tuner.search(made_up)
    assert elements() == 8, "values are forced no longer"
    return result


def test_the_best_is_selected(file, monkeypatch):
    write(file, {NORM: 2})  # ignored while values are tried
    file.unlink()
    write(file, {})
    best = found(monkeypatch, {4: 90, 8: 100, 16: 95})
    assert (best.default, best.chosen, best.wrong) == (8, 4, [])
    assert best.gain == pytest.approx(100 / 90)


def test_too_little_gain(file, monkeypatch):
    write(file, {})
    assert found(monkeypatch, {4: 98, 8: 100}).chosen == 8
    assert found(monkeypatch, {4: 96, 8: 100}).chosen == 4
    assert found(monkeypatch, {4: 100, 8: 100, 16: 100}).chosen == 8


def test_a_threshold_is_judged_by_the_calls_that_it_changes(file, monkeypatch):
    """One of eight calls gains 10 %, which is 1.3 % of all."""
    write(file, {})
    x = mx.ones((2, 64), mx.bfloat16)
    calls = [Workload(f"{size}", size, lambda: lambda: mlx_anvil.rms_norm(x, mx.ones(64))) for size in range(8)]
    made_up = Candidates(NORM, (1, 8), lambda value, size: value == 1 and size == 3, lambda small: calls)
    monkeypatch.setattr(Tuner, "_counts", lambda self, right: {key: [90.0 if key else 100.0] for key in right})
    with Tuner("simulator") as tuner:
        best = tuner.search(made_up)
    assert (best.chosen, best.gain) == (1, pytest.approx(100 / 90))


def test_wrong_results_are_never_selected(file, monkeypatch):
    write(file, {})
    best = found(monkeypatch, {4: 10, 8: 100, 16: 90}, wrong=(4,))
    assert (best.chosen, best.wrong) == (16, [4])
    (row,) = [row for row in best.rows if row.values == (4,)]
    assert not row.right


def test_a_wrong_default_is_replaced(file, monkeypatch):
    write(file, {})
    best = found(monkeypatch, {4: 100, 8: 10}, wrong=(8,))
    assert (best.chosen, best.wrong) == (4, [8])


def test_values_that_do_the_same_are_measured_once():
    for each in candidates.ALL:
        fields = _ext._choice_fields()[each.name]
        assert all(fields[0] <= value <= fields[1] for value in each.values)
        for workload in each.workloads(False):
            behaviours = {each.behaviour(value, workload.size) for value in each.values}
            assert 1 <= len(behaviours) <= len(each.values)
        assert any(
            len({each.behaviour(value, workload.size) for value in each.values}) > 1
            for workload in each.workloads(False)
        ), each.name
