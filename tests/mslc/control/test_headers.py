"""Every header of MLX's Metal library in the wheel compiles, or has a reason why not."""

import re
from functools import cache

import pytest

from mlx_anvil.mslc import Source, compiler
from mlx_anvil.mslc.conformance import STANDARDS, conformance
from mlx_anvil.mslc.preprocess import included_files
from tests.mslc.control.headers import METAL_4, PREREQUISITES, defines
from tests.mslc.control.mlx_kernels import HEADERS, include_dir, source

KERNELS = include_dir() / HEADERS
ALL = sorted(str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.h"))


def unit(header: str) -> Source:
    text = source([*PREREQUISITES.get(header, []), header], [])
    return Source.load(text, [include_dir()], defines(header))


@cache
def included(header: str) -> frozenset[str]:
    """The headers that a header and those before it include, and the header itself."""
    found, pending = set(), [*PREREQUISITES.get(header, []), header]
    while pending:
        if (name := pending.pop()) not in found:
            found.add(name)
            pending += re.findall(rf'^#include "{HEADERS}/([^"]+)"', (KERNELS / name).read_text(), re.MULTILINE)
    return frozenset(found)


# A compilation covers what a header includes, so these are enough: no other header includes them.
OUTERMOST = [header for header in ALL if not any(header in included(h) for h in ALL if h != header)]


@pytest.mark.parametrize("header", OUTERMOST)
def test_header_compiles(header):
    alone = unit(header)
    preprocessed = compiler.run_preprocessor(alone)
    rewritten = compiler.run_rewriter(alone, preprocessed)
    flags = [*compiler.PRECISION_FLAGS, *compiler.RELAXED_SPACES, "-fsyntax-only"]
    compiler.run_compiler(alone, preprocessed, rewritten, flags)


@pytest.mark.parametrize("header", OUTERMOST)
def test_header_conforms(header):
    """Apple's compiler accepts MLX's headers, so a rule that one of them breaks would be too strict."""
    standards = [name for name, version in STANDARDS.items() if version >= 400 or METAL_4 not in header]
    assert [str(finding) for finding in conformance(unit(header), standards)] == []


def test_every_header_is_in_what_conforms():
    found = {
        name for header in OUTERMOST for name in included_files(compiler.run_preprocessor(unit(header)), unit(header))
    }
    assert {str(KERNELS / header) for header in ALL} <= found


def test_the_wheel_has_its_headers():
    assert len(ALL) >= 75
