"""Options and fixtures of the whole suite.

``--backend NAME [--checked]`` runs the op tests on that backend (default: cpu); tests marked ``cpu_only`` are about the
CPU kernels or about no kernel at all and are left out elsewhere. ``MLX_ANVIL_TEST_SEED`` fixes the random inputs;
without it every run draws a fresh seed and prints it. ``--all`` runs the tests that a plain run leaves out
(quick_run.py).
"""

import os
import re
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import quick_run
import support
from fuzz_session import FuzzSession, seconds
from mlx_anvil import _check

BACKENDS = {"cpu": mx.cpu, "simulator": mx.cpu, "metal": mx.gpu, "cuda": mx.gpu}
SEED_VARIABLE = "MLX_ANVIL_TEST_SEED"
# Launches are those of the table, not of a file that someone has measured on this machine.
os.environ["MLX_ANVIL_TUNING"] = "off"
CPU_ONLY_FILE = re.compile(r"^pytestmark = (?:\[\s*)?pytest\.mark\.cpu_only\b", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="cpu", choices=sorted(BACKENDS), help="backend that the op tests run on")
    parser.addoption("--checked", action="store_true", help="with --backend simulator: find races and bad accesses")
    quick_run.add_options(parser)
    parser.addoption(
        "--fuzz", type=seconds, metavar="30m", help="run the random tests (tests/fuzz) alone, for that long"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    quick_run.choose_workers(config)


def pytest_configure(config: pytest.Config) -> None:
    _check.keep_float32_exact()
    # In the environment, so that parallel workers draw from the same seed.
    os.environ.setdefault(SEED_VARIABLE, str(secrets.randbelow(2**31)))
    backend = config.getoption("--backend")
    usable = mlx_anvil.info()["backends"][backend]
    if usable["usable"]:
        mx.set_default_device(BACKENDS[backend])
    elif backend != "cuda":
        raise pytest.UsageError(f"--backend {backend} is not usable here: {usable['detail']}")
    support.backend = backend
    support.check_simulation = config.getoption("--checked")
    config.pluginmanager.register(quick_run.QuickRun(config, os.environ[SEED_VARIABLE]))
    config.pluginmanager.register(FuzzSession(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """On other backends than the CPU, files that are ``cpu_only`` as a whole are not imported, which would take
    seconds."""
    if config.getoption("--backend") == "cpu" or collection_path.suffix != ".py":
        return None
    return True if CPU_ONLY_FILE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--backend") == "cpu":
        return
    left_out = [item for item in items if item.get_closest_marker("cpu_only") or _is_simulated_anyway(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    cuda = mlx_anvil.info()["backends"]["cuda"]
    if config.getoption("--backend") == "cuda" and not cuda["usable"]:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA: {cuda['detail']}"))


def _is_simulated_anyway(item: pytest.Item) -> bool:
    """True if the test runs in the simulator without --backend too, with the same checks."""
    simulated = {"gpu_with_matrix_units", "group_products"}
    return support.backend == "simulator" and not simulated.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_report_header(config: pytest.Config) -> str:
    return f"mlx-anvil: backend {config.getoption('--backend')}, {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds MLX for each test from the run's seed and the test's name, so that a test alone repeats what it did in the
    suite."""
    value = (int(os.environ[SEED_VARIABLE]) + zlib.crc32(request.node.nodeid.encode())) % 2**31
    mx.random.seed(value)
    return value


@pytest.fixture(autouse=True)
def on_backend() -> Iterator[None]:
    """Runs each test on the chosen backend."""
    with support.backend_scope():
        yield


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """NumPy's generator, seeded in the same way."""
    return np.random.default_rng(seed)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with ``instruction_set`` run once for each of the CPU, and once on other backends."""
    if "instruction_set" in metafunc.fixturenames:
        on_cpu = support.backend == "cpu"
        metafunc.parametrize("instruction_set", support.isas() if on_cpu else [support.backend], indirect=True)


@pytest.fixture
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with support.on_isa(request.param) if support.backend == "cpu" else nullcontext():
        yield


@contextmanager
def nvidia_kernels(**gpu: bool) -> Iterator[None]:
    """With ``--backend cuda`` those of the GPU, otherwise those of such a GPU in the checked simulator."""
    if support.backend == "metal":
        pytest.skip("Apple's GPUs run other kernels")
    if support.backend == "cuda":
        yield
        return
    with mx.stream(mx.cpu), mlx_anvil.simulate(checked=True, **gpu):
        yield


@pytest.fixture
def checked_simulator() -> Iterator[None]:
    """Runs a test on a GPU backend as it is, and otherwise with Apple's kernels in the checked simulator."""
    with nullcontext() if support.backend in ("metal", "cuda") else mlx_anvil.simulate(checked=True):
        yield


@pytest.fixture
def gpu_with_matrix_units() -> Iterator[None]:
    """Runs a test with ``--backend cuda`` on the GPU, and otherwise like ``matrix_units``."""
    with nvidia_kernels(matrix_units=True):
        yield


@pytest.fixture
def group_products() -> Iterator[None]:
    """Runs a test with the kernels of a GPU that multiplies for four SIMD groups at once: with ``--backend cuda`` on one
    of compute capability 9.0, otherwise in the checked simulator, where products complete when they start."""
    if support.backend == "cuda" and mx.device_info(mx.gpu).get("compute_capability_major") != 9:
        pytest.skip("this GPU has no products of four SIMD groups")
    with nvidia_kernels(group_products=True):
        yield


@pytest.fixture
def matrix_units() -> Iterator[None]:
    """Runs a test in the checked simulator, with the kernels of a GPU that has matrix units."""
    with mlx_anvil.simulate(checked=True, matrix_units=True):
        yield
