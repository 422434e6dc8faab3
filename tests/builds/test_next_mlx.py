"""The trial of a new MLX says in one line what breaks."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only
_SPEC = importlib.util.spec_from_file_location(
    "next_mlx", Path(__file__).resolve().parents[2] / "tools" / "next_mlx.py"
)
next_mlx = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(next_mlx)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "error: subprocess-exited-with-error\n[3/9] Building CXX\ncsrc/common/launch.cpp:3:10: fatal error: mlx/gone.h: No such file\ncompilation ended.\n",
            "csrc/common/launch.cpp:3:10: fatal error: mlx/gone.h: No such file",
        ),
        (
            "Traceback\nImportError: _ext.so: undefined symbol: _ZN3mlx4core4goneEv\n",
            "undefined symbol: _ZN3mlx4core4goneEv",
        ),
        (
            "ImportError: mlx_anvil was built with nanobind ABI v22, but MLX 0.40 here uses v23. Types cannot pass\n",
            "nanobind ABI v22, but MLX 0.40 here uses v23. Types cannot pass",
        ),
        (
            "x.whl: __ZN3mlx4core4goneEv: libmlx.dylib does not export it\n",
            "x.whl: __ZN3mlx4core4goneEv: libmlx.dylib does not export it",
        ),
        ("something else\nthe last line\n", "the last line"),
    ],
)
def test_cause(log, line):
    assert next_mlx.cause(log) == line


def test_pins_are_read():
    assert next_mlx.PINNED.count(".") == 2
    assert [requirement.partition("=")[0].rstrip(">") for requirement in next_mlx.REQUIREMENTS] == [
        "scikit-build-core",
        "nanobind",
        "hatch-fancy-pypi-readme",
    ]
