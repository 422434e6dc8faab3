"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from checked_calls import Checked, any_dtype
from tests.mla_decode.cases import check_output, draw


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    for heads, lengths, dims, feature in (
        (17, (1, 40), (512, 64), "causal"),
        (5, (3, 300), (72, 8), "sinks"),
        (3, (2, 33), (37, 5), "additive mask"),
    ):
        case = draw(heads, lengths, dims, any_dtype(rng), feature)
        yield Checked(lambda case=case: check_output(case))
    case = draw(65, (1, 200), (512, 64), any_dtype(rng, (mx.float16, mx.bfloat16)), "sinks")
    yield Checked(lambda: check_output(case), group_products=True)
