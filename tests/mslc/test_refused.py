"""What Apple's compiler refuses has a finding at its file, line and column; the twin that it takes has none."""

import pytest
from refused import CATALOGUE

from mlx_anvil.mslc import Source
from mlx_anvil.mslc.conformance import conformance

FILE = "mine.metal"


@pytest.mark.parametrize("case", CATALOGUE, ids=lambda case: case.name)
def test_refused_metal_is_found_where_it_stands(case):
    found = [(d.file, d.line, d.column) for d in conformance(Source(case.source, FILE)) if case.message in d.message]
    assert (FILE, *case.place) in found, [str(d) for d in conformance(Source(case.source, FILE))]


@pytest.mark.parametrize("case", CATALOGUE, ids=lambda case: case.name)
def test_its_twin_has_no_finding(case):
    assert [str(d) for d in conformance(Source(case.accepted, FILE))] == []


def test_the_catalogue_is_large():
    assert len({case.name for case in CATALOGUE}) == len(CATALOGUE) >= 30
