"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from checked_calls import Checked, any_dtype, each_way
from tests.gated_delta.cases import Case, check_gradients, check_results, draw


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    few = {"normalize_eps": 1e-6, "return_states": [1, 0]}
    for dims, steps, per_channel, options in (
        ((64, 35), 3, False, few),
        ((112, 9), 18, True, {}),  # in two chunks
        ((256, 9), 2, bool(rng.integers(2)), few),
    ):
        case = draw(steps, (1, 2), dims, any_dtype(rng), per_channel=per_channel, **options)
        yield Checked(partial(check, case))
    # By chunks: with products of float32, and of pairs of bfloat16, by one SIMD group and by four.
    for per_channel in (False, True):
        by_chunks = draw(70, (1, 2), (64, 72), any_dtype(rng), per_channel=per_channel, normalize_eps=1e-6)
        yield Checked(partial(check, by_chunks))
        pairs = draw(66, (1, 1), (64, 8), mx.bfloat16, per_channel=per_channel)
        yield Checked(partial(check, pairs), matrix_units=True)
        yield Checked(partial(check, pairs), matrix_units=True, group_products=True)
    yield from each_way(rng, "gated_delta_gates", (2, 5, 4))
    yield from each_way(rng, "gated_delta_gates/channels", (1, 11, 3, 14))  # several parts and blocks


def check(case: Case) -> None:
    check_results(case)
    check_gradients(case)
