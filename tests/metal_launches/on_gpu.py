"""Runs calls of cover.py on the GPU: python -m tests.metal_launches.on_gpu COVER PART PARTS

prints the kernels that were launched, one a line. tools/sanitize_cuda.py runs it under compute-sanitizer.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx

import mlx_anvil
from tests.metal_launches.calls import CALLS


def main(cover: Path, part: int, parts: int) -> None:
    mx.set_default_device(mx.gpu)
    wanted = [(op, number) for op, numbers in json.loads(cover.read_text()).items() for number in numbers]
    mine = set(wanted[part::parts])
    kernels = set()
    for op, calls in CALLS.items():
        for number, call in enumerate(calls()):
            if (op, number) in mine:
                with mlx_anvil.trace() as trace:
                    mx.eval(call())
                kernels.update(event.kernel for event in trace.events if event.device.startswith(("cuda", "metal")))
    print("\n".join(sorted(kernels)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
