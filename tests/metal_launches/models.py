"""What language models launch on an NVIDIA GPU: python -m tests.metal_launches.models > tools/cubins.txt

These specialisations of the kernels come assembled with the package (tools/build_cubins.py). With `--apple`, it prints
what the same models launch on an Apple GPU, for bench/agx.py. Nothing is run: launches are recorded, as in record.py,
and in a process of its own for the same reason. The calls are those of tests/<op>/launches.py.
"""

import sys

import mlx.core as mx

import mlx_anvil
from tests.metal_launches.calls import CALLS_OF_MODELS
from tests.metal_launches.record import recording

HEADER = """\
# Specialisations that language models launch, as op/pipeline key: cubins of these come with the package.
# Written by `python -m tests.metal_launches.models > tools/cubins.txt`; its source has the calls.
"""


def keys(**gpu: bool) -> set[str]:
    """`gpu`: as for mlx_anvil.simulate."""
    found = set()
    with mlx_anvil.simulate(**gpu):
        for calls in CALLS_OF_MODELS.values():
            for call in calls():
                with mlx_anvil.trace() as trace:
                    mx.eval(call())
                assert not trace.fallbacks, trace
                # Kernels of MLX's come with a reason, and not in cubins of ours.
                found.update(f"{event.op}/{event.kernel}" for event in trace.events if not event.reason)
    return found


if __name__ == "__main__":
    apple = sys.argv[1:] == ["--apple"]
    gpus = [{}] if apple else [{"matrix_units": True}, {"group_products": True}]
    with recording():
        listed = "".join(f"{key}\n" for key in sorted(set().union(*(keys(**gpu) for gpu in gpus))))
    sys.stdout.write(listed if apple else HEADER + listed)
