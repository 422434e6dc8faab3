"""Few calls that launch every kernel: python -m tests.metal_launches.cover [OP...] prints JSON, by op which of its
calls.

Nothing is run: launches are recorded, as in record.py, and in a process of its own for the same reason.
"""

import json
import sys

import mlx.core as mx

import mlx_anvil
from tests.metal_launches.calls import CALLS
from tests.metal_launches.record import recording


def cover(op: str) -> list[int]:
    """The calls of an op, by number, that launch a kernel which no earlier one did."""
    seen: set[str] = set()
    chosen = []
    for number, call in enumerate(CALLS[op]()):
        with mlx_anvil.trace() as trace:
            mx.eval(call())
        if not seen.issuperset(trace.kernels):
            seen.update(trace.kernels)
            chosen.append(number)
    return chosen


if __name__ == "__main__":
    with recording():
        json.dump({op: cover(op) for op in sys.argv[1:] or CALLS}, sys.stdout)
