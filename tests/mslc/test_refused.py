"""What Apple's compiler refuses has a finding at its file, line and column. The twin that it accepts has none."""

import pytest

from mlx_anvil.mslc import Library, Source
from mlx_anvil.mslc.conformance import conformance
from mlx_anvil.mslc.diagnostics import CompileError
from tests.mslc.refused import CATALOGUE, HOST

FILE = "mine.metal"


@pytest.mark.parametrize("case", CATALOGUE, ids=lambda case: case.name)
def test_refused_metal_is_found_where_it_stands(case):
    found = [(d.file, d.line, d.column) for d in conformance(Source(case.source, FILE)) if case.message in d.message]
    assert (FILE, *case.place) in found, [str(d) for d in conformance(Source(case.source, FILE))]


@pytest.mark.parametrize("case", CATALOGUE, ids=lambda case: case.name)
def test_its_twin_has_no_finding(case):
    assert [str(d) for d in conformance(Source(case.accepted, FILE))] == []


@pytest.mark.parametrize("case", HOST, ids=lambda case: case.name)
def test_what_reaches_the_host_is_not_run_either(case):
    with pytest.raises(CompileError) as refused:
        Library(Source(case.source, FILE))
    places = [(d.file, d.line, d.column) for d in refused.value.diagnostics if case.message in d.message]
    assert (FILE, *case.place) in places, str(refused.value)
    Library(Source(case.accepted, FILE))


def test_headers_of_the_host_are_not_found():
    with pytest.raises(CompileError, match=r"'stdlib\.h' file not found"):
        Library("#include <stdlib.h>\nkernel void k() {}\n")


def test_the_catalogue_is_large():
    assert len({case.name for case in CATALOGUE}) == len(CATALOGUE) >= 30
