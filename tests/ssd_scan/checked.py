"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from checked_calls import Checked, any_dtype
from tests.ssd_scan.cases import Case, check_gradients, check_results, draw


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    for dims, steps, options in (
        ((64, 35), 3, {"return_states": [1, 0]}),
        ((112, 9), 18, {"with_arrays": ("z",), "lengths": mx.array([17])}),  # in two chunks
        ((256, 9), 2, {"with_arrays": ("D", "state")}),
    ):
        yield Checked(partial(check, draw(steps, (1, 2), dims, any_dtype(rng), **options)))


def check(case: Case) -> None:
    check_results(case)
    check_gradients(case)
