"""A plain ``pytest`` and ``pytest --rest`` are the two parts of ``pytest --all``; what is selected runs."""

from types import SimpleNamespace

import pytest

from quick_run import CASES, QuickRun

pytestmark = pytest.mark.cpu_only

NAMES = ["a.py::test_one", *(f"a.py::test_many[{i}]" for i in range(50)), *(f"a.py::test_slow[{i}]" for i in range(3))]


class Item(SimpleNamespace):
    def get_closest_marker(self, name: str) -> str | None:
        return name if "slow" in self.nodeid else None


def runs(seed: str = "1", *, source: str = "TESTPATHS", **options: object) -> list[str]:
    """The tests that a command line with these options runs."""
    given = {"all": False, "rest": False, "cases": None, "keyword": "", "markexpr": "", "fuzz": None, **options}
    config = SimpleNamespace(
        option=SimpleNamespace(**given),
        args_source=getattr(pytest.Config.ArgsSource, source),
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    items = [Item(nodeid=name) for name in NAMES]
    QuickRun(config, seed).pytest_collection_modifyitems(items)
    return [item.nodeid for item in items]


def test_a_plain_run_keeps_a_few_cases_and_no_slow_test():
    kept = runs()
    assert kept[0] == NAMES[0]
    assert len(kept) == 1 + CASES
    assert not any("slow" in name for name in kept)
    assert kept == sorted(kept, key=NAMES.index)


def test_the_rest_is_what_it_leaves_out():
    plain, rest = runs(), runs(rest=True)
    assert sorted(plain + rest) == sorted(NAMES)


def test_seeds_draw_other_cases():
    assert runs("1") == runs("1")
    assert set().union(*(runs(str(seed)) for seed in range(300))) == {name for name in NAMES if "slow" not in name}


@pytest.mark.parametrize(
    "options",
    [{"all": True}, {"keyword": "many"}, {"markexpr": "slow"}, {"lf": True}, {"fuzz": 60.0}, {"source": "ARGS"}],
)
def test_what_is_selected_runs(options):
    assert runs(**options) == NAMES


def test_cases_are_counted_in_what_is_selected():
    assert len(runs(source="ARGS", cases=2)) == 1 + 2
