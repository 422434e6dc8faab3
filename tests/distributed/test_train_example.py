"""examples/train_distributed.py under mlx.launch: killed, resumed, and with another number of processes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner, Result

import train_distributed
from mlx_anvil.distributed import _local

pytestmark = pytest.mark.cpu_only

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_distributed.py"
LAUNCHER = Path(sys.executable).with_name("mlx.launch")
STEPS = 80
SAVE_EVERY = 20
TINY = ["--dims", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1, "--length", 16, "--batch", 2]
SECONDS = 60


def launch(checkpoint: Path, *options: object) -> subprocess.Popen[str]:
    """Starts two processes."""
    command = [LAUNCHER, "-n", 2, "--backend", "ring", "--python", sys.executable]
    command += ["--starting-port", _local.free_ports(1)[0], EXAMPLE, *TINY, "--checkpoint", checkpoint, *options]
    return subprocess.Popen(
        [str(each) for each in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return output


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for at most SECONDS: the test's assertions then say what is missing."""
    end = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    """Also a process whose parent has not asked for its exit status yet."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state[:1] in ("", "Z")


def run_alone(checkpoint: Path, *options: object) -> Result:
    """Trains in this process."""
    return CliRunner().invoke(
        train_distributed.main, [str(each) for each in (*TINY, "--checkpoint", checkpoint, *options)]
    )


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss ([\d.]+)", output)}


def arrays_of(checkpoint: Path) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in mx.load(str(checkpoint)).items()}


def test_a_killed_training_goes_on_from_its_checkpoint(tmp_path):
    whole, killed, alone = (tmp_path / f"{name}.safetensors" for name in ("whole", "killed", "alone"))
    options = ("--steps", STEPS, "--save-every", SAVE_EVERY)
    expected = losses(output_of(launch(whole, *options)))
    assert list(expected) == list(range(10, STEPS + 1, 10))
    assert expected[STEPS] < expected[10] - 0.3

    process = launch(killed, "--steps", 100 * STEPS, "--save-every", SAVE_EVERY)
    pids = {}
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, "both processes print their ids"
        if match := re.match(r"rank (\d) of 2: pid (\d+)", line):
            pids[int(match[1])] = int(match[2])
    wait_until(killed.exists)
    # mlx.launch ends rank 0 too once it has seen rank 1 end. It must not come before rank 0's own end.
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: has_ended(pids[0]))
    os.kill(process.pid, signal.SIGCONT)
    output = output_of(process)
    assert re.search(rf"\[watch\] rank 1 \(\S+, pid {pids[1]}\) ended\. This is rank 0 of 2\.", output), output
    shutil.copy(killed, alone)

    output = output_of(launch(killed, *options))
    resumed = int(re.search(r"resumes after step (\d+)\n", output)[1])
    assert SAVE_EVERY <= resumed < STEPS, "the machine is too slow for this test"
    assert losses(output) == {step: loss for step, loss in expected.items() if step > resumed}
    parameters, reached = arrays_of(whole), arrays_of(killed)
    assert parameters.keys() == reached.keys()
    for name, array in parameters.items():
        assert np.array_equal(array, reached[name]), name

    output = run_alone(alone, *options).output
    assert f"resumes after step {resumed}\n" in output
    assert losses(output) == pytest.approx({step: expected[step] for step in expected if step > resumed}, abs=2e-3)

    refused = run_alone(alone, *options, "--heads", 1)
    assert refused.exit_code == 1
    text = f"{alone} is of a training with --heads 2; delete it, or give these options."
    assert text in " ".join(refused.output.split()), refused.output


def test_sequences_are_split(tmp_path):
    outputs = [
        output_of(launch(tmp_path / "two.safetensors", "--steps", 20, "--sequence-parallel")),
        run_alone(tmp_path / "one.safetensors", "--steps", 20).output,
    ]
    split, whole = map(losses, outputs)
    assert list(whole) == [10, 20], outputs
    assert split == pytest.approx(whole, abs=1e-3), outputs
