"""Random calls of every op of the registry, judged against float64: dtypes, shapes, options, memory layouts, up to two
transformations around the call; and random wrong arguments.

A plain run takes a minute at most, by ``MLX_ANVIL_TEST_SEED``. ``pytest --fuzz 30m`` runs these tests alone, for that
long; ``-n 2`` on two cores. A failure prints the smallest script that shows it.
"""

import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis.strategies import SearchStrategy

from fuzz_draw import bad_calls, cases, scalar_calls, scalars
from fuzz_judge import Wrong, check, check_bad_call, check_scalar_call
from fuzz_ops import GENERATORS
from fuzz_session import Run
from mlx_anvil.reference import OPS

pytestmark = pytest.mark.fuzz
NAMES = list(dict.fromkeys(spec.name for spec in OPS.values()))
each_op = pytest.mark.parametrize("name", NAMES)
QUICK_EXAMPLES = 25


def run_examples(strategy: SearchStrategy[Any], judge: Callable[[Any], None], run: Run, seed: int) -> None:
    """Rounds of examples until the time is up. A plain run has one small round."""

    rules = settings(
        max_examples=50 if run.long else QUICK_EXAMPLES,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    rounds = 0
    while rounds == 0 or (run.long and not run.over):

        @given(strategy)
        def one(example: Any) -> None:
            if not run.over:
                with run.example(example):
                    judge(example)

        try:
            with_seed(zlib.crc32(f"{seed} {rounds}".encode()))(rules(one))()
        except Exception:
            if not isinstance(run.failure, Wrong):
                raise
            break
        rounds += 1
    if isinstance(run.failure, Wrong):
        print(run.failure.script)
        pytest.fail(f"{run.failure}\nThe script below shows it.", pytrace=False)


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["call", "one transformation", "two transformations"])
@each_op
def test_values(name: str, depth: int, fuzz_run: Run, seed: int):
    run_examples(cases(name, depth, small=not fuzz_run.long), check, fuzz_run, seed)


@each_op
def test_bad_calls(name: str, fuzz_run: Run, seed: int):
    run_examples(bad_calls(name), check_bad_call, fuzz_run, seed)


@pytest.mark.parametrize("name", [name for name in NAMES if scalars(name)])
def test_scalars_given_as_arrays(name: str, fuzz_run: Run, seed: int):
    run_examples(scalar_calls(name), check_scalar_call, fuzz_run, seed)


def test_every_op_has_a_generator():
    """Without a generator, only the registry entries of an op are drawn. Its options need a function of their own."""
    assert sorted(GENERATORS) == sorted(NAMES)
