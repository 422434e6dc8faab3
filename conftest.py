"""Says what to install if the tests cannot run: pytest reads this file before tests/conftest.py imports it all."""

import sys
from importlib.util import find_spec

_NEEDED = ("mlx_anvil", "numpy", "hypothesis", "xdist", "mlx_lm", "matplotlib", "ziglang")

if missing := [name for name in _NEEDED if find_spec(name) is None]:
    command = 'pip install ".[cpu,test]"'
    if "mlx_anvil" not in missing:
        from mlx_anvil.mslc import install_command

        command = install_command("test")
    sys.exit(f"Error: the tests need {', '.join(missing)}: {command}")
