"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator

import numpy as np

from checked_calls import Checked, each_way


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    for entry in ("rope/halves", "rope_qk", "rope_and_cache"):
        yield from each_way(rng, entry, (2, 3, 11, 26))
