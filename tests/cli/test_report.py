"""python -m mlx_anvil report: it runs on every backend but Metal, continues after failures, and writes readable
files."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click.testing
import pytest

from mlx_anvil import _check, _ext, _info, mslc
from mlx_anvil.__main__ import main
from mlx_anvil.report import cases, command, compiler, markdown, ops, pipelines, system
from mlx_anvil.report.section import Deadline, Outcome, Section, Skipped

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

# Compiles what it is given, but for the file and the version that it is to refuse.
XCRUN = """#!/bin/sh
case "$*" in
  *--version) {version} ;;
  *metal4.1*) echo "error: invalid value 'metal4.1' in '-std=metal4.1'" >&2; exit 1 ;;
  *rope_*) for last; do :; done
    echo "$last:7:3: error: no member named 'as_type' in namespace 'metal'" >&2; exit 1 ;;
  *silu_gate*) echo "metal/silu_gate/elementwise.h:1:1: warning: unused | variable" >&2 ;;
esac
"""


@pytest.fixture
def xcrun(tmp_path, monkeypatch):
    """Puts a stand-in for Apple's compiler first in PATH. The argument is the script that runs for its version."""

    def install(version: str = 'echo "Apple metal version 32023.155"') -> None:
        path = tmp_path / "bin" / "xcrun"
        path.parent.mkdir(exist_ok=True)
        path.write_text(XCRUN.format(version=version))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    return install


def run(*arguments: str) -> click.testing.Result:
    result = click.testing.CliRunner().invoke(main, ["report", *arguments])
    assert result.exception is None or result.exit_code == 2, result.exception
    return result


def read(folder: Path) -> tuple[str, dict]:
    return (folder / "mlx-anvil-report.md").read_text(), json.loads((folder / "mlx-anvil-report.json").read_text())


def tables(text: str) -> list[list[str]]:
    """The lines of each table."""
    blocks, lines = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            blocks.append(lines)
            lines = []
    return blocks


def test_a_quick_report_on_the_cpu(tmp_path):
    result = run("--quick", "--backend", "cpu", "--out", str(tmp_path / "new"), "--seed", "3")
    assert result.exit_code == 0
    text, body = read(tmp_path / "new")
    assert body["format"] == command.FORMAT
    assert body["options"] == {"quick": True, "seed": 3}
    status = {section["name"]: section["status"] for section in body["sections"]}
    assert status.pop("compiler") in ("skipped", "ok", "findings")
    assert status == {"system": "ok", "pipelines/cpu": "skipped", "ops/cpu": "ok"}
    rows = body["sections"][-1]["data"]["rows"]
    assert {row["op"] for row in rows} == {spec.name for spec in _check.OPS.values()}
    assert all(row["passed"] and 0 <= row["error"] <= row["limit"] for row in rows)
    assert body["sections"][0]["data"]["info"]["version"] == _info.__version__
    assert text.startswith("# mlx-anvil hardware report\n")
    assert str(Path.home()) not in text + json.dumps(body)


def test_pipelines_and_ops_of_the_simulator(monkeypatch):
    few = [spec for spec in cases.OPS.values() if spec.name in ("silu_gate", "rope")]
    monkeypatch.setattr(cases, "OPS", {spec.id: spec for spec in few})
    built = pipelines.run("simulator", True, Deadline(600))
    assert built.findings == 0
    assert len(built.data["rows"]) >= 3
    for row in built.data["rows"]:
        assert row["facts"] == {"max_threads_per_threadgroup": 1024, "thread_execution_width": 32} or (
            0 < row["facts"]["max_threads_per_threadgroup"] < 1024
        )
        assert row["seconds"] > 0
    checked = ops.run("simulator", True, Deadline(600))
    assert checked.findings == 0
    assert checked.summary == f"{2 * len(few)} of {2 * len(few)} cases within limits"


def test_the_cases_with_times_run_on_the_cpu(monkeypatch):
    monkeypatch.setattr(cases, "OPS", {"silu_gate": cases.OPS["silu_gate"]})
    outcome = ops.run("cpu", False, Deadline(600))
    assert outcome.findings == 0
    assert sum("speedup" in row for row in outcome.data["rows"]) == 4
    (times,) = [block for block in tables("\n".join(markdown._ops(outcome.data))) if "ours" in block[0]]
    assert len(times) == 2 + 4


def test_each_file_goes_through_the_compiler_in_each_version(xcrun):
    xcrun()
    outcome = compiler.run(Deadline(600))
    rows = {(row["file"], row["standard"]): row for row in outcome.data["rows"]}
    files = _ext._metal_file_names()
    assert len(files) > 10
    assert tuple(mslc.STANDARDS) == compiler.STANDARDS
    assert set(rows) == {(file, standard) for file in files for standard in compiler.STANDARDS}
    assert all(rows[file, "metal4.1"]["result"] == "unknown version" for file in files)
    broken = [file for file in files if file.startswith("metal/rope/")]
    for file in files:
        assert rows[file, "metal3.1"]["result"] == ("error" if file in broken else "ok")
    assert outcome.findings == len(broken) * 3
    assert rows[broken[0], "metal3.1"]["errors"] == 1
    assert "/tmp" not in rows[broken[0], "metal3.1"]["diagnostics"]
    text = "\n\n".join(markdown._compiler(outcome.data))
    assert "unused | variable" in text
    assert "1 errors" in text


@pytest.mark.parametrize("version", ["exit 1", 'echo "error: missing Metal Toolchain" >&2; exit 1'])
def test_a_compiler_that_does_not_work_is_no_failure(xcrun, version):
    xcrun(version)
    with pytest.raises(Skipped, match=r"does not work: (no message|error: missing Metal Toolchain)"):
        compiler.run(Deadline(600))


def test_a_section_that_fails_leaves_its_traceback_and_the_others(tmp_path, monkeypatch):
    def broken(*arguments):
        raise ValueError(f"cannot read {Path.home()}/secret")

    monkeypatch.setattr(system, "run", broken)
    assert run("--quick", "--backend", "cpu", "--out", str(tmp_path)).exit_code == 0
    text, body = read(tmp_path)
    assert body["sections"][0]["status"] == "failed"
    assert body["sections"][-1]["status"] == "ok"
    assert "ValueError: cannot read ~/secret" in text
    assert "in broken" in text
    assert str(Path.home()) not in json.dumps(body) or str(Path.home()) == "/"


def test_wrong_results_and_exceptions_are_findings(monkeypatch):
    monkeypatch.setattr(cases, "OPS", {"silu_gate": cases.OPS["silu_gate"]})
    monkeypatch.setattr(_check, "error_and_limit", lambda case, arrays: (1.0, 0.5) if case.gradient else 1 / 0)
    outcome = ops.run("cpu", True, Deadline(600))
    assert outcome.findings == 2
    text = "\n".join(markdown._ops(outcome.data))
    assert "ZeroDivisionError" in text
    assert "Above their limits" in text


def test_time_that_is_up_is_said():
    outcome = ops.run("cpu", True, Deadline(0))
    assert outcome.data["rows"] == []
    assert "the time limit left out" in outcome.summary


@pytest.mark.parametrize("arguments", [["report", "--quick", "--out", "."], ["check", "--op", "silu_gate"]])
@pytest.mark.parametrize("given", [None, "1"])
def test_float32_is_judged_without_tf32(arguments, given, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "MLX_ENABLE_TF32"}
    if given is not None:
        environment["MLX_ENABLE_TF32"] = given
    code = (
        "import atexit, os\n"
        "from mlx_anvil.__main__ import main\n"
        "atexit.register(lambda: print('TF32', os.environ.get('MLX_ENABLE_TF32')))\n"
        f"main({[*arguments, '--backend', 'cpu']!r})\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == f"TF32 {given or '0'}"


def test_no_section_takes_the_time_of_those_behind_it(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "backends", lambda: ["cuda", "cpu"])
    given = {}

    def spending(name):
        def run(*arguments):
            given[(name, *arguments[:-2])] = arguments[-1].left
            time.sleep(arguments[-1].left)
            return Outcome("", 0, {})

        return run

    for module in (compiler, pipelines, ops):
        monkeypatch.setattr(module, "run", spending(module.__name__.rpartition(".")[2]))
    assert run("--minutes", "0.1", "--out", str(tmp_path)).exit_code == 0
    assert given.pop(("pipelines", "cpu")) == 0
    assert given.pop(("ops", "cpu")) == pytest.approx(0.6, abs=0.3)
    assert list(given) == [("compiler",), ("pipelines", "cuda"), ("ops", "cuda")]
    assert list(given.values()) == pytest.approx([1.8] * 3, abs=0.3)


def test_every_op_has_its_turn_before_the_second_of_any():
    first = cases.small("cpu", False)[: 6 * len(cases.OPS)]
    assert {case.spec.id for case in first} == set(cases.OPS)


def test_a_crash_leaves_what_was_known(tmp_path):
    code = (
        "import os\n"
        "from mlx_anvil.report import command, ops\n"
        "ops.run = lambda *arguments: os._exit(11)\n"
        f"command.report(['--quick', '--backend', 'cpu', '--out', {str(tmp_path)!r}])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 11
    text, body = read(tmp_path)
    assert [section["status"] for section in body["sections"]][-1] == "running"
    assert "did not finish" in text
    assert body["sections"][0]["data"]["info"]


def test_the_tables_are_well_formed(tmp_path, xcrun):
    xcrun()
    run("--quick", "--backend", "cpu", "--out", str(tmp_path))
    text, _ = read(tmp_path)
    found = tables(text)
    assert len(found) >= 5
    for block in found:
        widths = {line.replace("\\|", "").count("|") for line in block}
        assert len(widths) == 1, block
    assert text.count("<details>") == text.count("</details>") > 0


def test_cells_hold_any_text():
    assert markdown.table(["a"], [["x | y\nz"]]) == "| a |\n| --- |\n| x \\| y z |"


def test_what_identifies_a_gpu_is_left_out(monkeypatch):
    facts = {"device_name": "NVIDIA H200", "uuid": "GPU-cd87", "pci_bus_id": "0000:00:06.0", "total_memory": 7}
    monkeypatch.setattr(system.mx, "is_available", lambda device: True)
    monkeypatch.setattr(system.mx, "device_info", lambda device: facts)
    assert system.gpu_facts() == {"device_name": "NVIDIA H200", "total_memory": "7"}


def test_a_virtual_gpu_is_named(monkeypatch):
    monkeypatch.setattr(system, "gpu_facts", lambda: {"device_name": "Apple Paravirtual device"})
    data = system.run(Deadline(1)).data
    assert "GPU of a virtual machine" in data["virtual_gpu"]
    assert "> Apple Paravirtual device" in markdown._system(data)[0]


def test_a_backend_that_is_not_here(tmp_path):
    result = run("--backend", "metal3", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "metal3 is not usable here" in result.output


def test_a_section_counts_its_seconds():
    section = Section("x", "X")
    section.run(lambda: time.sleep(0.02) or Outcome("fine", 0, {"a": 1}))
    assert (section.status, section.summary, section.data) == ("ok", "fine", {"a": 1})
    assert section.seconds >= 0.02
