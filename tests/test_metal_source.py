"""The Metal source that travels inside the extension is whole. That it fits the host: test_metal_launches.py."""

import re
from pathlib import Path

import pytest

from mlx_anvil import _ext

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
