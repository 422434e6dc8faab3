"""use_huge_pages moves arrays to huge pages, in place."""

import sys
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_anvil
from tests.runtime.test_threads import run_script

pytestmark = pytest.mark.cpu_only

PAGE = 2 << 20

# In a process of its own: in one that has run other tests, arrays may be in huge pages already.
MOVED = """
from pathlib import Path
import mlx.core as mx
import mlx.nn as nn
import mlx_anvil

def in_huge_pages():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))

layer = nn.Linear(1024, 8192)
x = mx.random.normal((PAGE * 3 // 4 + 100,))
mx.eval(layer, x)
before, weight, values = in_huge_pages(), mx.array(layer.weight), mx.array(x)
mx.eval(weight, values)
moved = mlx_anvil.use_huge_pages([layer.parameters(), {"x": x, "view": x[10:20]}])
sizes = layer.weight.nbytes + layer.bias.nbytes + x.nbytes
assert sizes // 2 <= moved <= sizes  # what shares a page with other kinds of memory stays
assert in_huge_pages() >= before + moved // 2
assert mx.array_equal(layer.weight, weight)
assert mx.array_equal(x, values)
assert mlx_anvil.use_huge_pages(layer) >= layer.weight.nbytes // 2
"""


def collapses() -> bool:
    """Linux 6.1 and newer, unless huge pages are switched off, or on for all memory from the start."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not sys.platform.startswith("linux") or not enabled.exists() or "[always]" in enabled.read_text():
        return False
    major, minor = map(int, Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2])
    return (major, minor) >= (6, 1) and mx.default_device() == mx.cpu


@pytest.mark.skipif(not collapses(), reason="needs Linux 6.1, whose MADV_COLLAPSE moves memory at once")
def test_arrays_are_moved_and_do_not_change():
    run_script(f"PAGE = {PAGE}{MOVED}")


def test_arrays_without_memory():
    assert mlx_anvil.use_huge_pages([]) == 0
    assert mlx_anvil.use_huge_pages(mx.zeros((0, 4))) == 0
    assert mlx_anvil.use_huge_pages({"a": mx.array(1.0) + 1, "b": [mx.broadcast_to(mx.array(2.0), (1 << 20,))]}) < PAGE


def test_errors():
    with pytest.raises(
        TypeError, match=r"^\[use_huge_pages\] weights has a int; allowed: an mlx\.nn\.Module, or arrays"
    ):
        mlx_anvil.use_huge_pages([mx.zeros(3), 1])
