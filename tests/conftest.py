"""Options and fixtures of the whole suite.

``--backend NAME`` runs the op tests on that backend (default: cpu). ``MLX_ANVIL_TEST_SEED`` fixes the random inputs;
without it every run draws a fresh seed and prints it.
"""

import os
import secrets
import zlib

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil

BACKENDS = {"cpu": mx.cpu, "metal": mx.gpu}
SEED_VARIABLE = "MLX_ANVIL_TEST_SEED"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="cpu", choices=sorted(BACKENDS), help="backend that the op tests run on")


def pytest_configure(config: pytest.Config) -> None:
    # In the environment, so that parallel workers draw from the same seed.
    os.environ.setdefault(SEED_VARIABLE, str(secrets.randbelow(2**31)))
    backend = config.getoption("--backend")
    usable = mlx_anvil.info()["backends"][backend]
    if not usable["usable"]:
        raise pytest.UsageError(f"--backend {backend} is not usable here: {usable['detail']}")
    mx.set_default_device(BACKENDS[backend])


def pytest_report_header(config: pytest.Config) -> str:
    return f"mlx-anvil: backend {config.getoption('--backend')}, {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds MLX for each test by the run's seed and the test's own name, so that a test repeats alone as in the suite."""
    value = (int(os.environ[SEED_VARIABLE]) + zlib.crc32(request.node.nodeid.encode())) % 2**31
    mx.random.seed(value)
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """NumPy's generator, seeded likewise."""
    return np.random.default_rng(seed)
