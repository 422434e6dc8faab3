"""Assembles the kernels that language models launch: one .tar.xz file per op and architecture, for the loader in
csrc/common/cuda_module.cpp.

    python tools/build_cubins.py --root . --ptx build/ptx --output build/cubin [--op rope] [--arch sm_90]

The PTX is that of tools/build_ptx.py, tools/cubins.txt the list of kernels with the values of their function constants. ptxas is
found as mslc finds it (pip install nvidia-cuda-nvcc); architectures that it does not know are left out.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

# A cubin runs on its architecture and on those of the same generation after it: Ampere and Ada, Hopper, Blackwell.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def keys_by_op(path: Path) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            op, _, key = line.partition("/")
            keys.setdefault(op, []).append(key)
    return keys


def supported(architectures: Iterable[str]) -> list[str]:
    """Those that the ptxas at hand has code for."""
    from mslc.ptx import find_ptxas

    ptxas = find_ptxas()
    known = subprocess.run([ptxas, "--help"], check=True, capture_output=True, text=True).stdout
    found = []
    for architecture in architectures:
        if f"'{architecture}'" in known:
            found.append(architecture)
        else:
            print(f"{architecture}: left out, {ptxas} has no code for it")
    return found


def assembled(modules: dict[str, str], key: str, architecture: str) -> bytes:
    """The cubin of one pipeline, after the line that tells its bindings."""
    from _kernel_files import parse_key
    from mslc.ptx import cubin, with_constants

    name, values = parse_key(key)
    text = modules[name]
    return text[: text.index("\n") + 1].encode() + cubin(with_constants(text, values), architecture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder that holds metal/ and python/")
    parser.add_argument("--ptx", type=Path, required=True, help="the folder that tools/build_ptx.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--op", action="append", help="leave out the others")
    parser.add_argument("--arch", action="append", help=f"default: {', '.join(ARCHITECTURES)}")
    args = parser.parse_args()
    root = args.root.resolve()
    sys.path.insert(0, str(root / "python" / "mlx_anvil"))  # as in build_ptx.py
    from _kernel_files import cubins_name, pack_cubins, unpack_ptx

    keys = keys_by_op(root / "tools" / "cubins.txt")
    architectures = supported(args.arch or ARCHITECTURES)
    modules = {op: unpack_ptx((args.ptx / f"{op}.ptx.xz").read_bytes()) for op in args.op or keys}
    args.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for architecture in architectures:
            count, size, packed = 0, 0, 0
            for op, kernels in modules.items():
                images = pool.map(partial(assembled, kernels, architecture=architecture), keys[op])
                cubins = dict(zip(keys[op], images, strict=True))
                data = pack_cubins(cubins)
                (args.output / cubins_name(op, architecture)).write_bytes(data)
                count, size, packed = count + len(cubins), size + sum(map(len, cubins.values())), packed + len(data)
            print(f"{architecture}: {count} cubins, {size / 1e6:.1f} MB, {packed / 1e6:.2f} MB packed")


if __name__ == "__main__":
    main()
