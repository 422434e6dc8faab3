"""The Metal source that travels inside the extension is whole, and names every kernel that the host asks for.

What runs the kernels is the simulator's suite; here no Metal is needed.
"""

import re
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil import _ext
from mlx_anvil.reference import DTYPES
from support import kernel_names

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("op", sorted(path.name for path in (ROOT / "metal").iterdir() if path.name != "common"))
def test_includes_are_resolved(op):
    source = _ext._kernel_source(op)
    assert re.findall(r'#include "', source) == []
    assert "#pragma once" not in source
    for_metal = re.sub(r"#ifndef __METAL__.*?#endif", "", source, flags=re.DOTALL)
    assert set(re.findall(r"#include <(.*)>", for_metal)) == {"metal_stdlib"}
    assert re.search(rf'^#line 1 "metal/{op}/\w+\.metal"$', source, re.MULTILINE)


def test_no_such_op():
    assert _ext._kernel_source("nonsense") == ""


def test_every_kernel_that_the_host_names_exists():
    instantiations = re.findall(r"^INSTANTIATE_DTYPES\((\w+), (\w+), ", _ext._kernel_source("silu_gate"), re.MULTILINE)
    names = {
        f"{kernel}_{str(d).removeprefix('mlx.core.')}_{layout}" for kernel, layout in instantiations for d in DTYPES
    }
    asked = set()
    for dtype in DTYPES:
        x = mx.random.normal((6, 10)).astype(dtype)
        for a, b in ((x, x), (x[:, ::2], x[:, 1::2])):
            with mlx_anvil.trace() as trace:
                mx.eval(mx.vjp(mlx_anvil.silu_gate, [a, b], [a]), mx.jvp(mlx_anvil.silu_gate, [a, b], [a, b]))
            asked |= set(kernel_names(trace))
    assert asked == names
