"""How much of MLX's Metal library compiles: every header in the wheel, or a reason why not."""

import pytest

from mlx_anvil.mslc import Source, compiler
from mlx_anvil.mslc.conformance import conformance
from tests.mslc.control.headers import PREREQUISITES, unsupported
from tests.mslc.control.mlx_kernels import HEADERS, include_dir, source

KERNELS = include_dir() / HEADERS
ALL = sorted(str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.h"))
SUPPORTED = [header for header in ALL if not unsupported(header)]


@pytest.mark.parametrize("header", SUPPORTED)
def test_header_compiles(header):
    text = source([*PREREQUISITES.get(header, []), header], [])
    unit = Source.load(text, [include_dir()], {"MLX_METAL_JIT": 1})
    preprocessed = compiler.run_preprocessor(unit)
    rewritten = compiler.run_rewriter(unit, preprocessed)
    flags = [*compiler.PRECISION_FLAGS, *compiler.RELAXED_SPACES, "-fsyntax-only"]
    compiler.run_compiler(unit, preprocessed, rewritten, flags)


@pytest.mark.parametrize("header", SUPPORTED)
def test_header_conforms(header):
    """A rule that one of MLX's headers breaks, which Apple's compiler takes, would be too strict."""
    text = source([*PREREQUISITES.get(header, []), header], [])
    unit = Source.load(text, [include_dir()], {"MLX_METAL_JIT": 1})
    assert [str(finding) for finding in conformance(unit)] == []


def test_most_headers_are_supported():
    assert len(SUPPORTED) >= 75
    assert all("nax" in header for header in set(ALL) - set(SUPPORTED))
