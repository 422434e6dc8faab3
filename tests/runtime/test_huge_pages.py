"""use_huge_pages moves arrays to huge pages, in place."""

import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_anvil

pytestmark = pytest.mark.cpu_only

PAGE = 2 << 20


def in_huge_pages() -> int:
    """Bytes of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def collapses() -> bool:
    """Linux 6.1 and newer, unless an administrator has switched huge pages off."""
    if not sys.platform.startswith("linux") or not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        return False
    major, minor = map(int, Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2])
    return (major, minor) >= (6, 1) and mx.default_device() == mx.cpu


@pytest.mark.skipif(not collapses(), reason="needs Linux 6.1, whose MADV_COLLAPSE moves memory at once")
def test_arrays_are_moved_and_do_not_change():
    layer = nn.Linear(1024, 8192)
    x = mx.random.normal((3 * PAGE // 4 + 100,))
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


def test_arrays_without_memory():
    assert mlx_anvil.use_huge_pages([]) == 0
    assert mlx_anvil.use_huge_pages(mx.zeros((0, 4))) == 0
    assert mlx_anvil.use_huge_pages({"a": mx.array(1.0) + 1, "b": [mx.broadcast_to(mx.array(2.0), (1 << 20,))]}) < PAGE


def test_errors():
    with pytest.raises(
        TypeError, match=r"^\[use_huge_pages\] weights has a int; allowed: an mlx\.nn\.Module, or arrays"
    ):
        mlx_anvil.use_huge_pages([mx.zeros(3), 1])
