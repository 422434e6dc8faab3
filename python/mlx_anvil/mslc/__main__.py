"""The command line of mslc: python -m mlx_anvil.mslc COMMAND."""

from __future__ import annotations

import sys

try:
    import click
    import rich  # noqa: F401
except ImportError:
    sys.exit('the command line of mslc is not installed: pip install "mlx-anvil[sim]"')

from .commands import all_commands
from .toolchain import ToolchainError


@click.group()
def main() -> None:
    """Compile, check and run Metal kernels without a Mac."""


for command in all_commands():
    main.add_command(command)

if __name__ == "__main__":
    try:
        main(prog_name="python -m mlx_anvil.mslc")
    except ToolchainError as error:
        sys.exit(str(error))
