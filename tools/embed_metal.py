"""Writes metal_source.cpp: the Metal source of the kernels for csrc/common/kernel_source.cpp.

It contains every file of metal/ unchanged, and a list of the kernels. For each kernel the list has its file and the
template instance behind its name, taken from the C++ preprocessor's output. Kernels that only mslc sees (`#ifdef
__MSLC__`) are listed unless --apple is given.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The expansion of MLX_ANVIL_KERNEL (metal/common/kernel.h). The name may be several adjacent literals.
KERNEL = re.compile(r"template \[\[host_name\(([^)]*)\)\]\] \[\[kernel\]\] decltype\(.*?\) ([^;]*);")
# Compilers limit the length of a string literal, so longer text is split into adjacent ones.
LITERAL_LIMIT = 8000


def kernels(compiler: str, root: Path, source: Path, apple: bool) -> Iterator[tuple[str, str]]:
    """Yields the name and template instance of each kernel in one .metal file."""
    with tempfile.TemporaryDirectory() as empty:
        Path(empty, "metal_stdlib").touch()  # Metal's library does not affect which kernels exist
        command = [compiler, "-E", "-P", "-x", "c++", "-D__METAL__", f"-I{root}", f"-I{empty}", str(source)]
        command += [] if apple else ["-D__MSLC__"]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name, instance in KERNEL.findall(" ".join(text.split())):
        yield "".join(re.findall(r'"([^"]*)"', name)), instance.strip()


def literals(text: str) -> str:
    """Formats `text` as adjacent C++ raw string literals."""
    pieces = [text[i : i + LITERAL_LIMIT] for i in range(0, len(text), LITERAL_LIMIT)]
    return "\n".join(f'     R"MSL({piece})MSL"' for piece in pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the folder with metal/")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--compiler", required=True, help="the C++ compiler, for its preprocessor")
    parser.add_argument("--apple", action="store_true", help="only kernels that Apple's compiler sees")
    args = parser.parse_args()

    root = args.root.resolve()
    sources = sorted(root.glob("metal/*/*.metal"))
    files = sorted([*sources, *root.glob("metal/*/*.h")])
    embedded = [f'    {{"{path.relative_to(root).as_posix()}",\n{literals(path.read_text())}}},' for path in files]
    listed = [
        f'    {{"{name}", "{source.relative_to(root).as_posix()}", "{instance}"}},'
        for source in sources
        for name, instance in kernels(args.compiler, root, source, args.apple)
    ]
    args.output.write_text(
        "// Written by tools/embed_metal.py.\n"
        '#include "common/kernel_source.h"\n\n'
        "namespace mlx_anvil {\n\n"
        "static const MetalFile kFiles[] = {\n" + "\n".join(embedded) + "\n};\n\n"
        "static const MetalKernel kKernels[] = {\n" + "\n".join(listed) + "\n};\n\n"
        "std::span<const MetalFile> metal_files() { return kFiles; }\n"
        "std::span<const MetalKernel> metal_kernels() { return kKernels; }\n\n"
        "}  // namespace mlx_anvil\n"
    )


if __name__ == "__main__":
    main()
