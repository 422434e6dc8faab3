"""The check on import: for each simulated mismatch, the ImportError names both versions and the remedy."""

import subprocess
import sys
import textwrap

import mlx.core as mx
import pytest

from mlx_anvil import _build_info, _compat
from mlx_anvil.mslc import install_command, reinstall_command

pytestmark = pytest.mark.cpu_only


def import_with(preparation: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(preparation) + "\nimport mlx_anvil\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def last_error(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 1
    start = run.stderr.rindex("\nImportError: ")
    return run.stderr[start:].strip()


def test_this_installation_fits():
    assert mx.__version__ == _build_info.MLX_VERSION
    assert _compat.installed_nanobind_tags() == [_build_info.NANOBIND_TAG]


def test_reading_the_tags_leaves_the_interpreter_alone():
    """The dictionary that holds the tags is the interpreter's own: reading it must not release it."""
    for _ in range(100):
        assert _compat.installed_nanobind_tags()


def test_another_mlx():
    error = last_error(import_with("import mlx.core as mx; mx.__version__ = '0.99.1'"))
    assert f"built for MLX {_build_info.MLX_VERSION}, but MLX 0.99.1 is installed" in error
    assert f'pip install "mlx=={_build_info.MLX_VERSION}"' in error


def test_another_nanobind():
    preparation = """
        import sys, types, mlx.core
        import importlib.util
        package = importlib.util.find_spec("mlx_anvil")
        fake = types.ModuleType("mlx_anvil._build_info")
        fake.MLX_VERSION, fake.NANOBIND_TAG = mlx.core.__version__, "nanobind_other_v21"
        sys.modules["mlx_anvil._build_info"] = fake
    """
    error = last_error(import_with(preparation))
    assert "nanobind ABI nanobind_other_v21" in error
    assert _build_info.NANOBIND_TAG in error
    assert error.endswith(reinstall_command())


def test_no_mlx_backend():
    preparation = """
        import sys
        sys.modules["mlx.core"] = None
    """
    error = last_error(import_with(preparation))
    assert "importing mlx.core failed" in error
    for extra in ("cpu", "cuda13"):
        assert install_command(extra) in error


def test_check_accepts_what_fits_and_nothing_else():
    _compat.check("1.0", "tag", "1.0", ["other", "tag"])
    with pytest.raises(ImportError, match=r"MLX 1\.0, but MLX 1\.1"):
        _compat.check("1.0", "tag", "1.1", ["tag"])
    with pytest.raises(ImportError, match="uses none"):
        _compat.check("1.0", "tag", "1.0", [])
