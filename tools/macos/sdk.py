"""Creates a folder that replaces Apple's SDK and compiler: bin/c++, bin/ar, bin/ranlib, include/, lib/*.tbd."""

import shlex
import sys
from pathlib import Path

import released
import system

HERE = Path(__file__).resolve().parent


def make() -> Path:
    sdk = released.cache_folder() / "sdk"
    for tool in ("c++", "ar", "ranlib"):
        script = sdk / "bin" / tool
        call = shlex.join([sys.executable, str(HERE / "compiler.py"), str(sdk), tool])
        released.write(script, f'#!/bin/sh\nexec {call} "$@"\n')
        script.chmod(0o755)
    system.write_headers(sdk / "include")
    system.write_linker_stubs(sdk / "lib")
    return sdk
