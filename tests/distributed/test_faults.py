"""A process that dies, stops, stalls or differs ends the others with an error that names it."""

import re
import time

import fault_programs
import pytest

from mlx_anvil import distributed
from mlx_anvil.distributed import _local

pytestmark = pytest.mark.cpu_only

TIMEOUT = 2.0
# The others end within two seconds of the time limit; one more is for other tests on the same cores.
ENDING_SECONDS = 3.0
STATUS = 75
DIFFER = "[check_ranks] the processes differ; allowed: none does. "


@pytest.mark.parametrize(
    ("fault", "failing", "processes", "how", "seconds"),
    [
        ("kill", 2, 3, "ended", 0),
        ("kill", 0, 3, "ended", 0),
        ("stop", 1, 3, "has not answered for", TIMEOUT),
        ("stop", 0, 2, "has not answered for", TIMEOUT),
        ("loop", 1, 2, "has taken no step for", TIMEOUT),
        ("exit", 1, 3, "failed: SystemExit: 3", 0),
        ("error", 0, 3, "failed: ValueError: no such batch", 0),
        ("exit 0", 1, 2, "has left the block", TIMEOUT),
    ],
)
def test_the_others_name_the_one_that_fails(fault: str, failing: int, processes: int, how: str, seconds: float):
    begin = time.monotonic()
    ended = _local.run(fault_programs.steps_with_fault, processes, fault, failing, TIMEOUT, seconds=40)
    pid, failed_at = re.search(r"pid (\d+) fails at ([\d.]+)", ended[failing].output).groups()
    for rank, process in enumerate(ended):
        if rank == failing:
            continue
        text = process.result or process.output
        name = rf"rank {failing} \([^ ]+, pid {pid}\)"
        assert re.search(rf"\[watch\] {name}(, in fail at \S+:\d+,)? {re.escape(how)}", text), text
        assert f"This is rank {rank} of {processes}." in text
        assert process.status == (0 if process.result else STATUS), text
        assert seconds - 0.5 < begin + process.seconds - float(failed_at) < seconds + ENDING_SECONDS


def test_slow_processes_are_no_fault():
    assert _local.results(fault_programs.slow_but_well, 2, 1.0, 5.0) == [[3.0] * 4] * 2


def test_ranks_that_stall_together_say_where():
    """Each waits for the other: none is ahead."""
    ended = _local.run(fault_programs.stall_together, 2, TIMEOUT, seconds=40)
    for process in ended:
        assert process.status == STATUS
        assert re.search(
            r"all ranks have taken no step for 2\.\d s after step 1: rank 0 is in stall_together at", process.output
        )


def test_a_watch_that_cannot_connect():
    (zero, no_address, refused), *others = _local.results(fault_programs.unreachable, 3)
    assert zero == "[watch] timeout is 0.0; allowed: a positive number of seconds."
    assert no_address.startswith("[watch] rank 0: cannot listen at localhost:no: ")
    assert re.fullmatch(
        r"\[watch\] ranks 0 and 2: rank 2 has not connected within 2\.0 s; allowed: an address= of rank 0 that all can "
        r"reach\.",
        refused,
    )
    assert others == [[zero, no_address, refused]] * 2


def test_ranks_that_differ_raise_the_same_error():
    errors, *others = _local.results(fault_programs.differences, 3)
    assert others == [errors] * 2
    same, shaped, typed, missing, many, value, version, imported, listed, number = errors
    assert same == imported == ""
    assert shaped == f"{DIFFER}layers.0.weight: rank 2 has float32 [2, 4], ranks 0 and 1 have float32 [2, 3]."
    assert typed == f"{DIFFER}layers.0.weight: rank 1 has float16 [2, 3], ranks 0 and 2 have float32 [2, 3]."
    assert missing == f"{DIFFER}layers.1.weight: rank 0 has float32 [3, 4], ranks 1 and 2 have none."
    assert many.startswith(f"{DIFFER}w0: rank 2 has float32 [3], rank 1 has float32 [2], rank 0 has float32 [1]; w1: ")
    assert many.endswith("; and 12 more.")
    assert value == f"{DIFFER}value of batch_size: rank 2 has 9, ranks 0 and 1 have 8."
    assert re.fullmatch(rf"{re.escape(DIFFER)}version of mlx: rank 2 has 0\.1, ranks 0 and 1 have [\d.]+\.", version)
    assert listed == "[check_ranks] batch_size is a list; allowed: str, int, float, bool, None."
    assert number == "[check_ranks] arrays has a int at 0; allowed: arrays."


def test_one_process_needs_no_watch():
    with distributed.watch(timeout=0.1) as watcher:
        watcher.step()
        time.sleep(0.3)
    distributed.check_ranks(batch_size=8)
