"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from checked_calls import Checked, any_dtype, each_way
from mlx_anvil import reference, rope, rope_qk
from support import assert_accurate


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    for entry in ("rope/halves", "rope_qk", "rope_and_cache"):
        yield from each_way(rng, entry, (2, 3, 11, 26))
    dtype = any_dtype(rng)
    q, k = (mx.random.normal((1, heads, 1024, 32)).astype(dtype) for heads in (33, 2))
    options = {"traditional": False, "base": 1e4, "offset": 3}

    def each(function: Callable[..., mx.array]) -> Callable[..., list[mx.array]]:
        return lambda *arrays: [function(x, 32, **options) for x in arrays]

    # Many rows of whole heads: threads share angles.
    yield Checked(lambda: assert_accurate(each(rope), each(reference.rope), [q]), True)
    yield Checked(lambda: assert_accurate(lambda *x: rope_qk(*x, 32, **options), each(reference.rope), [q, k]), True)
