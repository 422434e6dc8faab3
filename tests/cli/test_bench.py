"""``python -m mlx_anvil bench``: the statistics of a comparison, files of results, and the command."""

import itertools
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import mlx_anvil
from mlx_anvil.__main__ import main
from mlx_anvil.bench import command, timing
from mlx_anvil.bench.compare import LEAST_CHANGE, SIGNIFICANCE, compare, tail_probability, verdict
from mlx_anvil.bench.results import SCHEMA, Results, ResultsError, Row, load, save
from mlx_anvil.bench.timing import Timing
from mlx_anvil.mslc import install_command

pytestmark = pytest.mark.cpu_only


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def rounds(count: int, median: float = 1e-3, noise: float = 0.05) -> Timing:
    """Simulated timings: a minimum with a long tail, which other users of the machine make longer."""
    tail = [random.gammavariate(2, 0.5) for _ in range(count)]
    return Timing.of([median * (1 + noise * value) for value in tail])


def make_row(name: str = "silu_gate", ours: Timing | None = None, mlx: Timing | None = None) -> Row:
    return Row("op", name, "cpu", "float32", "3x5", ours or rounds(5), mlx or rounds(5, median=1e-2))


# ---- statistics ------------------------------------------------------------------------------------------------------


def by_counting(a: list[float], b: list[float]) -> float:
    """The two-sided probability, by enumerating every split of the values."""

    def distance(chosen: tuple[float, ...], others: list[float]) -> float:
        return abs(sum(x > y for x in chosen for y in others) - len(a) * len(b) / 2)

    values = a + b
    deals = [
        (chosen, [values[i] for i in range(len(values)) if i not in places])
        for places in itertools.combinations(range(len(values)), len(a))
        for chosen in [tuple(values[i] for i in places)]
    ]
    observed = distance(tuple(a), b)
    return sum(distance(*deal) >= observed for deal in deals) / len(deals)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 4), (3, 2), (4, 4), (5, 5)])
def test_probability_is_that_of_all_deals(m: int, n: int):
    values = [random.random() for _ in range(m + n)]
    assert tail_probability(values[:m], values[m:]) == pytest.approx(by_counting(values[:m], values[m:]))


def test_ties_only_make_a_verdict_less_likely():
    assert tail_probability([1.0] * 9, [1.0] * 9) == 1
    a, b = [float(x) for x in range(9)], [x + 4.0 for x in range(9)]
    apart = [x + 1e-9 for x in b]
    assert tail_probability(a, b) >= tail_probability(a, apart)


@pytest.mark.parametrize("count", [5, 9])
def test_the_same_noise_is_the_same(count: int):
    # At most 1 in 100 is expected to differ by chance; more than 4 in 100 has a chance below 1e-6 at 500 tries.
    verdicts = [verdict(rounds(count), rounds(count)) for _ in range(500)]
    assert sum(v != "same" for v in verdicts) <= 20


@pytest.mark.parametrize("count", [5, 9])
def test_a_clear_shift_has_its_verdict(count: int):
    slow, fast = rounds(count, median=1.3e-3), rounds(count, noise=0.02)
    slow = Timing.of([max(value, 1.2e-3) for value in slow.rounds])
    fast = Timing.of([min(value, 1.15e-3) for value in fast.rounds])
    assert verdict(slow, fast) == "faster"
    assert verdict(fast, slow) == "slower"


def test_too_few_rounds_say_nothing():
    assert verdict(Timing.of([1.0, 1.1, 1.2, 1.3]), Timing.of([2.0, 2.1, 2.2, 2.3])) == "same"


def test_a_shift_within_the_spread_is_the_same():
    before = Timing.of([1.0, 1.4, 1.8, 2.2, 2.6])
    assert verdict(before, Timing.of([value * 1.1 for value in before.rounds])) == "same"


def test_a_shift_too_small_to_matter_is_the_same():
    before = [1.0 + i * 1e-6 for i in range(9)]
    now = [value * (1 + LEAST_CHANGE / 2) for value in before]
    assert tail_probability(before, now) < SIGNIFICANCE
    assert verdict(Timing.of(before), Timing.of(now)) == "same"
    assert verdict(Timing.of(before), Timing.of([value * (1 + 2 * LEAST_CHANGE) for value in before])) == "slower"


def test_compare_pairs_rows_by_what_they_are():
    a, b, c = make_row("a"), make_row("b"), make_row("c")
    twice = Timing.of([value / 2 for value in b.ours.rounds])
    changes = compare([a, b], [replace(b, ours=twice, mlx=Timing.of([v / 4 for v in b.mlx.rounds])), c])
    assert [change.now.name for change in changes] == ["b"]
    assert changes[0].ratio == pytest.approx(2)
    assert changes[0].baseline == pytest.approx(4)


def test_a_busy_machine_is_named():
    assert timing.busy_note([]) is None
    assert timing.busy_note([0.1, 0.2, 3.0]) is None
    assert "busy" in (timing.busy_note([0.1, 0.6, 0.7]) or "")


# ---- timing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake clock, which only calls of contestants advance."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    return now


def test_measure_interleaves_and_takes_medians(clock: list[float]):
    order = []
    durations = {"a": itertools.cycle([0.25, 0.5, 0.75, 1.0]), "b": itertools.repeat(2.0)}

    def contestant(label: str):
        def run() -> None:
            order.append(label)
            clock[0] += next(durations[label])

        return run

    timings = timing.measure({label: contestant(label) for label in "ab"}, rounds=5, budget_seconds=1e9)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab" + "ba" + "ab"
    assert timings["a"].rounds == [0.5, 0.75, 1.0, 0.25, 0.5]
    assert timings["a"].median == 0.5
    assert timing.ratio(timings["b"], timings["a"]) == statistics.median(2 / value for value in timings["a"].rounds)


def test_measure_keeps_to_its_budget_and_to_its_least_rounds(clock: list[float]):
    def run() -> None:
        clock[0] += 1.0

    assert len(timing.measure({"a": run}, rounds=11, least_rounds=5, budget_seconds=0)["a"].rounds) == 5
    assert len(timing.measure({"a": run}, rounds=11, budget_seconds=7.5)["a"].rounds) == 8


def test_short_calls_are_repeated_and_warmed(clock: list[float]):
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        clock[0] += 1e-3

    timings = timing.measure({"a": run}, rounds=3, least_seconds=0.0105)
    assert timings["a"].rounds == pytest.approx([1e-3] * 3)
    assert calls == 2 + 3 * (1 + 10)


# ---- files -----------------------------------------------------------------------------------------------------------


def save_rows(path: Path, *rows: Row) -> Path:
    save(Results({"cpu_model": "some", "threads": 2}, list(rows)), path)
    return path


def test_a_file_gives_its_rows_back(tmp_path: Path):
    row = make_row()
    read = load(save_rows(tmp_path / "a.json", row))
    assert read.machine == {"cpu_model": "some", "threads": 2}
    (again,) = read.rows
    assert again.key == row.key
    assert again.ours.rounds == pytest.approx(row.ours.rounds, rel=1e-3)
    assert again.speedup == pytest.approx(row.speedup, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has schema None"),
        ('{"schema": "mlx_anvil.bench/0"}', f"allowed: '{SCHEMA}'"),
        (f'{{"schema": "{SCHEMA}", "machine": {{}}, "rows": [{{"suite": "op"}}]}}', "has a missing or invalid field"),
        (f'{{"schema": "{SCHEMA}", "machine": {{}}, "rows": 3}}', "has a missing or invalid field"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=r"other\.json") as caught:
        load(path)
    assert message in str(caught.value)
    result = invoke("--compare", path, save_rows(tmp_path / "a.json", make_row()))
    assert result.exit_code == 1
    assert "Error: " in result.output


# ---- the command -----------------------------------------------------------------------------------------------------


def test_measures_saves_and_draws(tmp_path: Path):
    picture = tmp_path / "a.png"
    result = invoke("op", "--op", "rope", "--quick", "--rounds", 5, "--save", tmp_path / "a.json", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "rope" in result.stdout
    body = json.loads((tmp_path / "a.json").read_text())
    assert body["machine"]["mlx"] == mlx_anvil.info()["mlx"]
    assert {row["name"].partition(",")[0].partition("/")[0] for row in body["rows"]} == {"rope"}
    assert {row["dtype"] for row in body["rows"]} == {"float32"}
    assert all(len(row[side]["rounds"]) == 5 for row in body["rows"] for side in ("ours", "mlx"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_goes_to_stdout_and_messages_to_stderr(tmp_path: Path):
    saved = tmp_path / "a.json"
    result = invoke("op", "--op", "rope_qk", "--quick", "--rounds", 5, "--json", "--save", saved)
    assert result.exit_code == 0, result.output
    assert result.stdout == saved.read_text()
    assert json.loads(result.stdout)["schema"] == SCHEMA
    assert " ".join(result.stderr.split()) == f"Results saved to {saved}."


def test_quartiles_of_a_speedup_are_those_of_its_rounds():
    row = make_row(ours=Timing.of([1.0, 2.0, 4.0, 1.0, 2.0]), mlx=Timing.of([4.0, 4.0, 4.0, 8.0, 2.0]))
    low, _, high = statistics.quantiles([4.0, 2.0, 1.0, 8.0, 1.0], n=4)
    assert row.speedup_quartiles == (low, high)
    assert low <= row.speedup <= high


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["layer", "model"])
def test_suites_of_modules_and_models_run(tmp_path: Path, suite: str):
    result = invoke(suite, "--quick", "--rounds", 5, "--save", tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    assert {row.suite for row in load(tmp_path / "a.json").rows} == {suite}


def test_compares_two_files(tmp_path: Path):
    before, other = make_row("softmax_topk"), make_row("rope")
    now = replace(before, ours=Timing.of([value / 2 for value in before.ours.rounds]))
    result = invoke("--compare", save_rows(tmp_path / "a.json", before, other), save_rows(tmp_path / "b.json", now))
    assert result.exit_code == 0, result.output
    heading, line = result.stdout.splitlines()[1:3]
    assert heading.split() == ["softmax_topk", "3x5", "cpu"]
    assert "2.00x" in line
    assert "faster" in line
    assert "1 row is only in the first file." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["everything"], "'everything' is not one of 'op', 'layer', 'model'"),
        (["op", "--op", "sort"], "'sort' is not one of"),
        (["op", "--backend", "abacus"], "abacus is not usable here; usable: cpu"),
        (["layer", "--op", "rope"], "--op is an option of the suite op"),
        (["op", "--rounds", "3"], "--rounds"),
        (["op", "--save", "/no/such/folder/a.json"], "the folder /no/such/folder does not exist"),
        (["--compare", "/no/such/a.json", "/no/such/b.json"], "does not exist"),
        (["op", "--compare", __file__, __file__], "neither a suite nor another option"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("arguments", [["op", "--op", "rope", "--quick"], ["layer", "--quick"]])
def test_tables_fit_80_columns(arguments: list[str]):
    lines = invoke(*arguments, "--rounds", 5).stdout.splitlines()
    assert all(len(line) <= 80 and "…" not in line for line in lines)


def test_the_suite_of_a_model_needs_mlx_lm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "is_installed", lambda name: False)
    result = invoke("model", "--quick")
    assert result.exit_code == 1
    assert result.output == f"Error: the suite model needs mlx-lm: {install_command('lm')}\n"


def test_files_without_a_common_row_are_refused(tmp_path: Path):
    a, b = (save_rows(tmp_path / f"{name}.json", make_row(name)) for name in "ab")
    result = invoke("--compare", a, b)
    assert result.exit_code == 1
    assert "no row in common" in result.output
