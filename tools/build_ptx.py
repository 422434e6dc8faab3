"""Compiles the Metal kernels to PTX: one xz file per op, for the loader in csrc/common/cuda_module.cpp.

  python tools/build_ptx.py --root . --output build/ptx [--op silu_gate]

A file is a sequence of PTX modules. Each has one kernel and all it needs, because a single module loads in a fraction
of the time of all of them. python/mlx_anvil/_kernel_files.py defines the format. Function constants are deferred; see
mslc's compile_ptx.
"""

import argparse
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_anvil.mslc.ptx import PtxModule

# The oldest architecture with the bfloat16 arithmetic and matrix products that mslc emits. Drivers compile it for newer
# ones.
ARCHITECTURE = "sm_80"
ENTRY = re.compile(r"^\.visible \.entry (\w+)\(.*?^\}\n", re.MULTILINE | re.DOTALL)
# Variables outside of functions. The compiler writes each on one line.
VARIABLE = re.compile(
    r"^(?:\.visible |\.extern |\.weak )?\.(?:shared|const|global) [^\n]*?([\w$]+)(?:\[\d*\])?(?: = [^\n]*)?;\n"
)


def single_kernels(text: str) -> dict[str, str]:
    """Splits a PTX module of many kernels into modules of one kernel each, without unused variables."""
    shared_text = ENTRY.sub("", text).splitlines(keepends=True)
    modules = {}
    for entry in ENTRY.finditer(text):
        words = set(re.findall(r"[\w$]+", entry[0]))
        kept = []
        for line in shared_text:
            variable = VARIABLE.match(line)
            if not line.isspace() and not line.startswith("//") and (not variable or variable[1] in words):
                kept.append(line)
        modules[entry[1]] = "".join(kept) + entry[0]
    return modules


def compile_file(root: Path, path: Path) -> dict[str, str]:
    from mslc.preprocess import Source
    from mslc.ptx import compile_ptx

    return kernels_of(compile_ptx(Source.load(path, [root]), ARCHITECTURE, defers_constants=True))


def kernels_of(module: "PtxModule") -> dict[str, str]:
    """Returns what a file has for each kernel: the bindings of its parameters, and a PTX module."""
    text = re.sub(r"^[ \t]*//.*\n|[ \t]+//.*$", "", module.text, flags=re.MULTILINE)
    bindings = {kernel.entry: " ".join(str(p.index) for p in kernel.parameters) for kernel in module.kernels}
    return {name: f"// bindings {bindings[name]}\n{kernel}" for name, kernel in single_kernels(text).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder with metal/ and python/")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--op", action="append", help="build only this op")
    args = parser.parse_args()
    root, output = args.root.resolve(), args.output.resolve()
    # This path avoids importing the package around mslc, whose extension is not built yet.
    sys.path.insert(0, str(root / "python" / "mlx_anvil"))
    from _kernel_files import pack_ptx

    ops = args.op or sorted(path.name for path in (root / "metal").iterdir() if any(path.glob("*.metal")))
    output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for op in ops:
            files = sorted((root / "metal" / op).glob("*.metal"))
            kernels: dict[str, str] = {}
            for modules in pool.map(lambda path: compile_file(root, path), files):
                kernels |= modules
            data = pack_ptx(kernels)
            (output / f"{op}.ptx.xz").write_bytes(data)
            size = sum(map(len, kernels.values()))
            print(f"{op}: {len(kernels)} kernels, {size / 1e6:.1f} MB of PTX, {len(data) / 1e6:.2f} MB packed")


if __name__ == "__main__":
    main()
