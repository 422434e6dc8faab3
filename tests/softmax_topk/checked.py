"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator

import numpy as np

from checked_calls import Checked, each_way


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    for experts in (13, 257):  # a lane holds 4 of them at most, or 16
        yield from each_way(rng, "softmax_topk", (3, experts))
    # Groups of odd sizes, and rows that a lane does not hold.
    for entry, experts in (("bias and groups", 36), ("bias and groups", 260), ("groups", 36), ("bias", 600)):
        yield from each_way(rng, f"softmax_topk/{entry}", (3, experts))
    yield from each_way(rng, "softmax_topk/sqrtsoftplus", (3, 40))
