"""Faults that would kill the process become findings with the kernel's line, with and without checks."""

import signal
import subprocess
import sys

import numpy as np
import pytest

from mlx_anvil.mslc import Library, SimulationError
from mlx_anvil.mslc.compiler import CHECKED, UNCHECKED
from tests.mslc.msl import HEAD

FUNCTIONS = """struct S { float a; float b; };
int endless(int n) { return n == -1 ? 0 : (1 + endless(n + 1)) ^ n; }
float far(device float* x, int n);
float near(device float* x, int n) { float a[64]; for (int j = 0; j < 64; ++j) a[j] = x[0] + n; return far(x, n + 1) + a[n & 63]; }
float far(device float* x, int n) { return n == -1 ? 0 : near(x, n + 1) * 2; }
void back(thread int& j) { j = 0; }
"""
PARAMETERS = "device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]"
LINE = (HEAD + FUNCTIONS).count("\n") + 2  # of a body
OVERFLOW = "a thread used more than 256 KB of stack"


def library(body, options):
    return Library(f"{HEAD}{FUNCTIONS}kernel void k({PARAMETERS}) {{\n{body}\n}}\n", options=options)


def run(body, options, threads=4, groups=1, **settings):
    x = np.zeros(4096, np.float32)
    library(body, options).run("k", {0: x}, (groups,), (threads,), step_limit=200_000, **settings)
    return x


def finding(body, options, **settings):
    with pytest.raises(SimulationError) as caught:
        run(body, options, **settings)
    return caught.value.findings[0]


@pytest.mark.parametrize("options", [UNCHECKED, CHECKED], ids=["unchecked", "checked"])
@pytest.mark.parametrize(
    ("body", "kind", "words", "line"),
    [
        # The frame is made before the first statement runs: the line is the kernel's.
        ("float a[100000]; a[i + 99990 * int(x[0] + 1)] = 5; x[i] = a[3];", "stack overflow", OVERFLOW, LINE - 1),
        ("x[i] = endless(int(x[0]));", "stack overflow", OVERFLOW, LINE - 6),
        # Either function may be the one whose frame does not fit: their frames differ between processors.
        ("x[i] = near(x, int(i));", "stack overflow", OVERFLOW, (LINE - 4, LINE - 3)),
        ("device float* p = nullptr; *p = 1;", "device out of bounds", "write through a null pointer", LINE),
        ("device float* p = nullptr; x[i] = p[0];", "device out of bounds", "read through a null pointer", LINE),
        ("device S* p = nullptr; x[i] = p->b;", "device out of bounds", "read through a null pointer", LINE),
        ("device float* p = x[i] ? x : nullptr; x[i] = *p;", "device out of bounds", "through a null pointer", LINE),
        ("x[i] = *(device float*)(0x123456789000ul + 4 * i);", "device out of bounds", "outside every buffer", LINE),
        ("__builtin_trap();", "trap", "a trap", LINE),
        ("for (int j = 0; j < 9; ++j) j = 0;", "step limit", "does not seem to end", LINE),
        ("for (int j = 0; j < 9; ++j) back(j);", "step limit", "does not seem to end", LINE),
        ("int n = 9; for (int j = 0; j < n; ++j) n += 1;", "step limit", "does not seem to end", LINE),
        ("for (uint j = 0; j != 9; j += 2) {}", "step limit", "does not seem to end", LINE),
        ("while (true) {}", "step limit", "does not seem to end", LINE),
    ],
)
def test_fault_is_a_finding(body, kind, words, line, options):
    found = finding(body, options)
    assert (found.kernel, found.kind, found.file) == ("k", kind, "kernel.metal"), found
    assert found.line in (line if isinstance(line, tuple) else (line,)), found
    assert words in found.message
    np.testing.assert_array_equal(run("x[i] = i;", options)[:4], np.arange(4))  # a fault poisons no later run


@pytest.mark.parametrize("seed", [0, 3])
def test_fault_while_other_threads_wait(seed):
    body = """threadgroup float shared[1024];
    shared[i & 1023] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if ((i & 1023) == 700) x[i] = near(x, 0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    x[i] = shared[1023 - (i & 1023)];"""
    found = finding(body, UNCHECKED, threads=1024, groups=4, seed=seed)
    assert (found.kind, found.thread) == ("stack overflow", 700)
    good = run(body.replace("near(x, 0)", "1"), UNCHECKED, threads=1024, groups=4)
    np.testing.assert_array_equal(good.reshape(4, 1024), np.arange(4096).reshape(4, 1024)[:, ::-1])


def test_stacks_are_as_large_as_they_say():
    x = run("float a[60000]; for (int j = 0; j < 60000; ++j) a[j] = x[i] + j; x[i] = a[59999 - i];", UNCHECKED)
    np.testing.assert_array_equal(x[:4], [59999, 59998, 59997, 59996])


@pytest.mark.parametrize("fault", ["ctypes.string_at(0)", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_faults_of_others_still_end_the_process(fault):
    script = f"""
import ctypes, os, signal
import numpy as np
from mlx_anvil.mslc import Library
x = np.zeros(1, np.float32)
Library("kernel void k(device float* x [[buffer(0)]]) {{ x[0] = 1; }}\\n").run("k", {{0: x}}, (1,), (1,))
assert x[0] == 1
{fault}
print("went on")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, ""), ended.stderr
