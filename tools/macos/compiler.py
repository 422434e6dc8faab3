"""c++, ar and ranlib for arm64 macOS on any machine: zig compiles, LLVM's ld64 links.

Zig's Mach-O linker cannot create bundles, and `zig c++` would link a second libc++ into them. The scripts that sdk.py
writes call this file: compiler.py SDK c++|ar|ranlib ARGUMENTS...
"""

import shutil
import subprocess
import sys

OLDEST_MACOS = "14.0"

# Enable libc++'s availability annotations, which it leaves to Apple's headers, so that a function newer than the target
# is an error.
COMPILE = [
    "-target",
    f"aarch64-macos.{OLDEST_MACOS}",
    "-U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS",
    "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1",
    "-Werror=unguarded-availability",
    "-Werror=unguarded-availability-new",
    "-fno-sized-deallocation",  # as in Apple's compiler
    "-Wno-unused-command-line-argument",
]
LINK = ["-arch", "arm64", "-platform_version", "macos", OLDEST_MACOS, OLDEST_MACOS, "--error-limit=0", "-demangle"]
STUBS = ("libc++.1.tbd", "libobjc.A.tbd", "libSystem.B.tbd")

# Zig precompiles a header without being told, and takes CMake's words for it as a second action.
EMIT_PCH = ["-Xclang", "-emit-pch"]

TAKE_A_VALUE = ("-o", "-install_name", "-compatibility_version", "-current_version", "-framework")


def linker() -> str | None:
    names = ["ld64.lld", *(f"ld64.lld-{version}" for version in range(22, 15, -1))]
    return next((path for path in map(shutil.which, names) if path), None)


def find_linker() -> str:
    if found := linker():
        return found
    raise SystemExit("no ld64.lld: install LLVM's linker (on Debian and Ubuntu: apt-get install lld)")


def linker_arguments(arguments: list[str]) -> list[str]:
    """Translates the arguments of a linking compiler for the linker. Options for compilation are dropped."""
    out: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "-bundle" or argument.startswith(("-L", "-l")) or not argument.startswith("-"):
            out.append(argument)
        elif argument.startswith("-Wl,"):
            out += argument.removeprefix("-Wl,").split(",")
        elif argument == "-Xlinker":
            out.append(next(rest))
        elif argument in TAKE_A_VALUE:
            out += [argument, next(rest)]
    return out


def command(sdk: str, tool: str, arguments: list[str]) -> list[str]:
    zig = [sys.executable, "-m", "ziglang"]
    if tool != "c++":
        return [*zig, tool, *arguments]
    if "-bundle" in arguments:
        stubs = [f"{sdk}/lib/{name}" for name in STUBS]
        return [find_linker(), *LINK, *linker_arguments(arguments), *stubs]
    if "-emit-pch" in arguments:
        at = arguments.index("-emit-pch") - 1
        assert arguments[at : at + 2] == EMIT_PCH
        arguments = [*arguments[:at], *arguments[at + 2 :]]
    # CMake compiles a program to see which compiler it has. Linked, it would take all of zig's libc++ with it.
    stop = [] if {"-c", "-E", "--version"} & set(arguments) or "c++-header" in arguments else ["-c"]
    return [*zig, "c++", *COMPILE, *stop, *arguments, "-idirafter", f"{sdk}/include"]


if __name__ == "__main__":
    sys.exit(subprocess.run(command(sys.argv[1], sys.argv[2], sys.argv[3:])).returncode)
