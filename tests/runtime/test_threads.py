"""Threads of the CPU kernels: their number, calls on a busy machine, forked processes."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(sys.platform != "linux", reason="on macOS Grand Central Dispatch has the threads"),
]


def run_script(code: str, timeout: float = 60) -> str:
    """Runs the code in a new process and returns its output."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_short_lived_threads_leave_none_behind():
    code = """
    import os, threading, time
    import numpy as np
    from mlx_anvil import _ext
    source, target = np.ones(1 << 20, np.float32), np.zeros(1 << 20, np.float32)
    copy = lambda: _ext._copy(source, target, False)  # on the calling thread, with the pool's help
    count = lambda: len(os.listdir("/proc/self/task"))
    copy()
    before = count()
    for _ in range(20):
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
    end = time.time() + 10  # the kernel removes an ended thread a little later
    while count() > before and time.time() < end:
        time.sleep(0.01)
    print(count() - before)
    """
    assert run_script(code) == "0"


def test_many_callers_at_once():
    """More callers than the pool has job slots: every call is right, and none waits forever."""
    code = """
    import threading
    import mlx.core as mx
    import mlx_anvil
    mx.random.seed(1)
    x, weight = mx.random.normal((500, 1000)), mx.random.normal((1000,))
    expected = mlx_anvil.rms_norm(x, weight)
    mx.eval(expected)
    right = []
    def work():
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(30):
                right.append(mx.array_equal(mlx_anvil.rms_norm(x, weight), expected).item())
    threads = [threading.Thread(target=work) for _ in range(40)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(len(right), all(right))
    """
    assert run_script(code) == "1200 True"


def test_forked_child_has_threads_of_its_own():
    """The child uses a new stream, because MLX's thread for the parent's stream does not exist in it."""
    code = """
    import os, signal
    import mlx.core as mx
    import numpy as np
    import mlx_anvil
    from mlx_anvil import _ext
    x, weight = mx.random.normal((2048, 1024)), mx.ones((1024,))
    expected = np.array(mlx_anvil.rms_norm(x, weight))
    source, target = np.ones(1 << 20, np.float32), np.zeros(1 << 20, np.float32)
    _ext._copy(source, target, False)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        target[:] = 0
        _ext._copy(source, target, False)  # on the thread that forked
        with mx.stream(mx.new_stream(mx.cpu)):
            ours = np.array(mlx_anvil.rms_norm(x, weight))
        os._exit(0 if np.array_equal(ours, expected) and target.all() else 1)
    print(os.waitpid(child, 0)[1])
    """
    assert run_script(code) == "0"


def test_busy_machine_does_not_stop_calls():
    """With a busy process on every core, a typical call takes about as long as on an idle machine, because no thread
    spins waiting for one without a core. A call that waits for another process's time slice takes milliseconds."""
    code = """
    import statistics, time
    import mlx.core as mx
    import mlx_anvil
    x, weight = mx.random.normal((512, 4096)), mx.ones((4096,))
    mx.eval(x, weight)
    def median(function):
        seconds = []
        for _ in range(150):
            start = time.perf_counter()
            mx.eval(function(x, weight, 1e-5))
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)
    median(mlx_anvil.rms_norm)
    print(median(mlx_anvil.rms_norm), median(mx.fast.rms_norm))
    """
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(len(os.sched_getaffinity(0)))]
    try:
        ours, mlx = map(float, run_script(code).split())
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert ours <= mlx
