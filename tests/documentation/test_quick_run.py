"""A plain ``pytest`` and ``pytest --rest`` are the two parts of ``pytest --all``. Selected tests always run."""

from types import SimpleNamespace

import pytest

from quick_run import CASES, SHARE_OF_SLOW, QuickRun
from worker_shares import long_first, shares

pytestmark = pytest.mark.cpu_only

NAMES = ["a.py::test_one", *(f"a.py::test_many[{i}]" for i in range(50)), *(f"a.py::test_slow[{i}]" for i in range(3))]


class Item(SimpleNamespace):
    def get_closest_marker(self, name: str) -> str | None:
        return name if name == "slow" and "slow" in self.nodeid else None


class Alike(Item):
    """A case of a test with two parameters, which are alike for each value of the first."""

    marked = True

    def __init__(self, first: object, dtype: object) -> None:
        spec = SimpleNamespace(params={"first": first, "dtype": dtype})
        super().__init__(nodeid=f"a.py::test_alike[{first}-{dtype}]", callspec=spec)

    def get_closest_marker(self, name: str) -> object:
        marked = name == "alike" and self.marked
        return SimpleNamespace(args=("dtype",)) if marked else super().get_closest_marker(name)


def runs(
    seed: str = "1",
    *,
    source: str = "TESTPATHS",
    workers: int = 0,
    items: list[Item] | None = None,
    **options: object,
) -> list[str]:
    """The tests that a command line with these options runs."""
    given = {
        "all": False,
        "rest": False,
        "cases": None,
        "keyword": "",
        "markexpr": "",
        "fuzz": None,
        "one_of_alike": False,
        "backend": "cpu",
    }
    given |= options
    config = SimpleNamespace(
        option=SimpleNamespace(**given),
        args_source=getattr(pytest.Config.ArgsSource, source),
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
        workerinput={"workercount": workers},
    )
    items = [Item(nodeid=name) for name in NAMES] if items is None else items
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


def test_some_cases_of_the_rest():
    """They are other cases than those of a plain run."""
    plain, rest = runs(), runs(rest=True, cases=8)
    assert len(rest) == 8 + 8 // SHARE_OF_SLOW
    assert not set(plain) & set(rest)
    assert len(runs(rest=True, cases=2)) == 2 + 1
    assert set().union(*(runs(str(seed), rest=True, cases=2) for seed in range(300))) == set(NAMES[1:])


def test_a_list_of_cases_runs_whole():
    class Listed(Item):
        def get_closest_marker(self, name: str) -> str | None:
            return name if name == "every_case" and "many" in self.nodeid else super().get_closest_marker(name)

    items = [Listed(nodeid=name) for name in NAMES]
    plain = runs(items=list(items))
    assert plain == runs()
    assert len(runs(items=list(items), rest=True, cases=2)) == 50 - CASES + 1


def test_seeds_draw_other_cases():
    assert runs("1") == runs("1")
    assert set().union(*(runs(str(seed)) for seed in range(300))) == {name for name in NAMES if "slow" not in name}


@pytest.mark.parametrize(
    "options",
    [{"all": True}, {"keyword": "many"}, {"markexpr": "slow"}, {"lf": True}, {"fuzz": 60.0}, {"source": "ARGS"}],
)
def test_what_is_selected_runs(options):
    assert runs(**options) == NAMES


def test_seeds_draw_one_of_the_cases_that_are_alike():
    def drawn(seed: str) -> list[str]:
        items = [*(Item(nodeid=name) for name in NAMES), *(Alike(i, j) for i in range(5) for j in range(2))]
        kept = runs(seed, items=items, all=True, one_of_alike=True)
        assert kept[: len(NAMES)] == NAMES
        return kept[len(NAMES) :]

    assert [name.partition("-")[0] for name in drawn("1")] == [f"a.py::test_alike[{i}" for i in range(5)]
    assert len(set().union(*(drawn(str(seed)) for seed in range(50)))) == 10


def test_functions_with_the_same_parameters_draw_the_same_dtype_to_compile():
    first = [Alike(i, j) for i in range(5) for j in range(2)]
    second = [Alike(i, j) for i in range(5) for j in range(2)]
    for item in (*first, *second):
        item.marked = False
    for item in second:
        item.nodeid = item.nodeid.replace("test_alike", "test_other")
    assert len(runs(items=[*first, *second], all=True, one_of_alike=True)) == 20
    kept = runs(items=[*first, *second], all=True, one_of_alike=True, backend="simulator")
    assert len(kept) == 10
    assert [name.replace("test_alike", "test_other") for name in kept[:5]] == kept[5:]


def test_a_quantized_format_is_compiled_for_one_dtype():
    """Group sizes do not count, because kernels read them from their params."""

    def drawn(seed: str) -> dict[str, set[str]]:
        formats = [f"{kind}-g{group}" for kind in ("affine-4bit", "affine-8bit") for group in (32, 64, 128)]
        items = [Alike(format, dtype) for format in formats for dtype in ("float32", "float16", "bfloat16")]
        for item in items:
            item.marked, item.callspec.params["format"] = False, item.callspec.params["first"]
        kept = runs(seed, items=items, all=True, one_of_alike=True, backend="simulator")
        assert len(kept) == 6
        return {kind: {name.split("-")[-1] for name in kept if kind in name} for kind in ("4bit", "8bit")}

    found = [drawn(str(seed)) for seed in range(30)]
    assert all(len(dtypes) == 1 for kinds in found for dtypes in kinds.values())
    assert len(set.union(*(kinds["4bit"] for kinds in found))) == 3
    assert any(kinds["4bit"] != kinds["8bit"] for kinds in found)


def test_cases_are_counted_in_what_is_selected():
    assert len(runs(source="ARGS", cases=2)) == 1 + 2


@pytest.mark.parametrize("long", [0, 1, 2, 3, 7, 20])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_worker_starts_with_the_long_tests(workers, long):
    names = [f"a.py::test_{'slow' if i >= 20 - long else 'short'}[{i}]" for i in range(20)]
    ordered = [item.nodeid for item in long_first([Item(nodeid=name) for name in names], workers)]
    assert sorted(ordered) == sorted(names)
    short = [name for name in ordered if "short" in name]
    assert short == sorted(short, key=names.index)
    counts = []
    for share in shares(ordered, workers):
        counts.append(sum("slow" in name for name in share))
        assert all("slow" in name for name in share[: counts[-1]])
    assert max(counts) - min(counts) <= 1


def test_workers_run_the_same_tests_as_one_process():
    names = runs(all=True, workers=2)
    assert names != NAMES
    assert sorted(names) == sorted(NAMES)
