"""The command line of mslc: python -m mlx_anvil.mslc COMMAND."""

from __future__ import annotations

import sys

from .installation import install_command

try:
    import click

    from .commands import all_commands
    from .toolchain import ToolchainError

    commands = all_commands()
except ModuleNotFoundError as error:
    sys.exit(f"the command line of mslc needs {error.name}, which is not installed: {install_command('sim')}")


@click.group()
def main() -> None:
    """Compile, check and run Metal kernels without a Mac."""


for command in commands:
    main.add_command(command)

if __name__ == "__main__":
    try:
        main(prog_name="python -m mlx_anvil.mslc")
    except ToolchainError as error:
        sys.exit(str(error))
