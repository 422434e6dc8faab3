"""Assembles the kernels that language models launch, for the loader in csrc/common/cuda_module.cpp.

  python tools/build_cubins.py --root . --ptx build/ptx --output build/cubin [--op rope] [--arch sm_90]

It writes one .tar.xz file per op and architecture. The PTX comes from tools/build_ptx.py. tools/cubins.txt lists the
kernels with the values of their function constants. ptxas is found like mslc finds it (pip install nvidia-cuda-nvcc).
Architectures that it does not support are skipped.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

# A cubin also runs on later architectures of the same generation: Ampere and Ada, Hopper, Blackwell.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# PTX for this target uses instructions of Hopper alone.
HOPPER, OF_HOPPER = "sm_90", "sm_90a"


def keys_by_op(path: Path) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            op, _, key = line.partition("/")
            keys.setdefault(op, []).append(key)
    return keys


def supported(architectures: Iterable[str]) -> list[str]:
    """Returns the architectures that the installed ptxas supports."""
    from mslc.ptx import find_ptxas

    ptxas = find_ptxas()
    known = subprocess.run([ptxas, "--help"], check=True, capture_output=True, text=True).stdout
    found = []
    for architecture in architectures:
        if f"'{architecture}'" in known:
            found.append(architecture)
        else:
            print(f"{architecture}: skipped, {ptxas} does not support it")
    return found


def assembled(modules: dict[str, str], key: str, architecture: str) -> bytes:
    """Returns the cubin of one pipeline, after the line with its bindings. Empty if the architecture cannot run it."""
    from _kernel_files import parse_key
    from mslc.ptx import cubin, with_constants

    name, values = parse_key(key)
    text = modules[name]
    if f".target {OF_HOPPER}" in text:
        if architecture != HOPPER:
            return b""
        architecture = OF_HOPPER
    return text[: text.index("\n") + 1].encode() + cubin(with_constants(text, values), architecture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder with metal/ and python/")
    parser.add_argument("--ptx", type=Path, required=True, help="the output folder of tools/build_ptx.py")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--op", action="append", help="build only this op")
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
                cubins = {key: image for key, image in zip(keys[op], images, strict=True) if image}
                data = pack_cubins(cubins)
                (args.output / cubins_name(op, architecture)).write_bytes(data)
                count, size, packed = count + len(cubins), size + sum(map(len, cubins.values())), packed + len(data)
            print(f"{architecture}: {count} cubins, {size / 1e6:.1f} MB, {packed / 1e6:.2f} MB packed")


if __name__ == "__main__":
    main()
