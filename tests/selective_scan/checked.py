"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from checked_calls import Checked, any_dtype
from tests.selective_scan.cases import check_gradients, check_results, draw


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    for shape, lengths in (((2, 19, 37, 16), [19, 5]), ((1, 5, 9, 3), None)):
        options = {} if lengths is None else {"lengths": mx.array(lengths), "dt_softplus": True}
        case = draw(shape, any_dtype(rng), **options)
        yield Checked(lambda case=case: check_results(case) and None)
        yield Checked(lambda case=case: check_gradients(case) and None)
