"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator

import numpy as np

from checked_calls import Checked, each_way
from support import every_second


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    yield from each_way(rng, "sigmoid_gate", (13, 31))
    yield from each_way(rng, "sigmoid_gate", (13, 31), every_second)
