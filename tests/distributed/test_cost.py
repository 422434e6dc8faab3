"""The model of what distributing costs: its bytes and messages against counts of a simulation, its times against the
simulation's, its limits, and its error on measured runs that the fit has not seen."""

import io
import itertools
from dataclasses import replace
from math import inf, log

import numpy as np
import pytest
from rich.console import Console

import communication
import distributed_cost as cost
import distributed_fit
import distributed_tables
import ring_simulation as simulation
from distributed_cost import Link, Machine, Model
from distributed_public import LARGE, LINKS, SMALL, machine
from ring_simulation import CONTIGUOUS, ZIGZAG, Ring

pytestmark = pytest.mark.cpu_only

COUNTS = (2, 3, 4, 8)
PLAIN = Link("plain", 2e-6, 1e9)
MACHINE = Machine("machine", 1e11, 1e13, 1e12, 0.0)
TINY = Model("tiny", 4, 512, 1536, 8, 2, 64, 1000)
LENGTH = 3072  # every count and every piece of the zig-zag layout divides it
# What is off most is a time as long as its transfers, of which the formula counts one step too few or too many.
MOST_FORMULA_ERROR = 0.07
# Of runs that the fit has not seen. Processes of one machine share caches and memory, which the model leaves out.
MOST_HELD_ERROR = 0.3


# ---- Bytes and messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("size", [24, 25, 31])
def test_all_reduce_counts_what_a_ring_sends(n, size):
    values = np.random.default_rng(n).integers(-99, 99, (n, size)).tolist()
    sums, sent, steps = simulation.all_reduce(values)
    assert sums == [np.sum(values, axis=0).tolist()] * n
    counted = cost.all_reduce(PLAIN, n, size)
    assert counted.messages == steps
    # A size that the ranks do not divide leaves the last segment shorter.
    assert counted.sent == pytest.approx(sum(sent) / n)
    if size % n == 0:
        assert sent == [counted.sent] * n


def ring(n, layout, causal):
    return Ring(n, LENGTH, layout=layout, causal=causal)


CASES = [(n, layout, causal) for n in COUNTS for layout in (CONTIGUOUS, ZIGZAG) for causal in (True, False)]


@pytest.mark.parametrize(("n", "layout", "causal"), CASES)
def test_ring_attention_counts_what_the_schedule_sends(n, layout, causal):
    trace = traced(n, layout, causal, gradients=False)[0]
    for rank in range(n):
        parts = cost.ring_sent(n, LENGTH, rank, zigzag=layout == ZIGZAG, causal=causal)
        assert trace.messages[rank] == parts * 8
        assert trace.sent[rank] == parts * 8 * piece_bytes(n)
    for gradients in (False, True):
        counted = formula(n, layout, causal, gradients, PLAIN)
        traces = traced(n, layout, causal, gradients)
        assert counted.sent == pytest.approx(sum(max(each.sent) for each in traces))
        assert counted.messages == sum(max(each.messages) for each in traces)


@pytest.mark.parametrize("window", [1, 2, 300, 400, 5000])
def test_a_window_ends_the_travel(window):
    n = 8
    schedule = Ring(n, LENGTH, window=window)
    assert [schedule.hops(source) for source in range(n)] == [
        cost.ring_hops(n, LENGTH, source, zigzag=False, window=window) for source in range(n)
    ]


@pytest.mark.parametrize(("layout", "causal", "window"), [
    (CONTIGUOUS, True, None), (ZIGZAG, True, None), (CONTIGUOUS, True, 50), (ZIGZAG, True, 50), (ZIGZAG, False, None),
])  # fmt: skip
def test_the_schedule_does_all_the_work_and_sends_no_key_in_vain(layout, causal, window):
    n, length = 4, 256
    schedule = Ring(n, length, layout=layout, causal=causal, window=window)
    ranks, pieces = range(n), range(schedule.pieces)
    work = {pair: sum(schedule.work(*pair, piece) for piece in pieces) for pair in itertools.product(ranks, ranks)}
    seen = [min(query + 1, window or length) if causal else length for query in range(length)]
    assert sum(work.values()) == sum(seen)
    for source in ranks:
        needed = [hop for hop in range(1, n) if work[(source + hop) % n, source]]
        assert schedule.hops(source) == max(needed, default=0)


def test_zigzag_is_even_and_contiguous_is_not():
    assert simulation.imbalance(Ring(8, LENGTH, layout=ZIGZAG)) == pytest.approx(1.0)
    assert simulation.imbalance(Ring(8, LENGTH)) == pytest.approx(2 - 1 / 8, rel=0.01)


@pytest.mark.parametrize("n", [2, 4])
def test_schemes_send_what_their_collectives_send(n):
    hidden, layers = TINY.hidden, TINY.layers
    share = 2 * (n - 1) / n
    decode = cost.tensor_parallel(MACHINE, TINY, PLAIN, 2, 1, 100)
    assert decode.sent == 2 * layers * hidden * TINY.number  # 2 sums of a layer, each of 1 / 2 to the other, twice
    step = cost.data_parallel(MACHINE, TINY, PLAIN, n, 64)
    assert step.sent == pytest.approx(share * TINY.weights * 4)
    sharded = cost.data_parallel(MACHINE, TINY, PLAIN, n, 64, sharded=True)
    assert sharded.sent - step.sent == pytest.approx((n - 1) / n * TINY.weights * TINY.weight)
    cache = cost.sharded_cache(MACHINE, TINY, PLAIN, n, 100)
    assert cache.sent == layers * (n - 1) * TINY.heads * (TINY.head_dim + 1) * 4
    token = cost.pipeline_decode(MACHINE, TINY, PLAIN, n, 100)
    assert token.sent == n * hidden * TINY.number  # to the next stage, and at last to all others


# ---- Times -----------------------------------------------------------------------------------------------------------


def piece_bytes(n):
    return LENGTH / n / 8 * TINY.cache_bytes


def traced(n, layout, causal, gradients, link=PLAIN, **options):
    """The forward pass, and the backward if there are gradients."""
    pair = 4 * TINY.heads * TINY.head_dim / MACHINE.attention_flops
    common = {"piece_bytes": piece_bytes(n), "latency": link.latency, "bandwidth": link.bandwidth} | options
    traces = [simulation.simulate(ring(n, layout, causal), pair_seconds=pair, **common)]
    if gradients:
        home = piece_bytes(n) * 4 / TINY.number
        backward = pair * (cost.GRADIENT_FLOPS - 1)
        traces.append(
            simulation.simulate(ring(n, layout, causal), pair_seconds=backward, gradient_bytes=home, **common)
        )
    return traces


def formula(n, layout, causal, gradients, link):
    options = {"zigzag": layout == ZIGZAG, "causal": causal, "gradients": gradients}
    return cost.ring_attention(MACHINE, TINY, link, n, LENGTH, **options, pieces=Ring(n, LENGTH).pieces, turns=1)


@pytest.mark.parametrize("bandwidth", [1e7, 1e8, 1e9, 1e10, 1e12])
@pytest.mark.parametrize(("n", "layout", "causal"), CASES)
def test_ring_attention_takes_as_long_as_the_schedule(n, layout, causal, bandwidth):
    link = replace(PLAIN, bandwidth=bandwidth)
    for gradients in (False, True):
        simulated = sum(trace.total for trace in traced(n, layout, causal, gradients, link))
        ratio = formula(n, layout, causal, gradients, link).seconds / simulated
        assert abs(log(ratio)) < MOST_FORMULA_ERROR


def test_a_slow_rank_delays_all_and_jitter_costs_less_than_its_largest_share():
    even = traced(4, ZIGZAG, True, False)[0].total
    slow = traced(4, ZIGZAG, True, False, factor=simulation.slower(2, 1.5))[0]
    assert slow.total == pytest.approx(1.5 * even, rel=0.02)
    jittery = [traced(4, ZIGZAG, True, False, factor=simulation.jitter(0.2, seed))[0].total for seed in range(5)]
    assert all(even < total < 1.2 * even for total in jittery)


@pytest.mark.parametrize(("n", "chunks"), [(2, 1), (2, 8), (4, 3), (8, 16)])
@pytest.mark.parametrize("bandwidth", [1e7, 1e8, 1e9])
def test_a_pipeline_takes_as_long_as_its_stages(n, chunks, bandwidth):
    link, tokens = replace(PLAIN, bandwidth=bandwidth), 256
    stage = cost.forward(MACHINE, TINY, chunks * tokens, chunks * tokens).compute / n / chunks
    transfer = cost.exchange(link, n, tokens * TINY.hidden * TINY.number).seconds
    arrived, ready = [0.0] * chunks, 0.0
    for _ in range(n):
        sending = ready = 0.0
        for chunk in range(chunks):
            ready = max(ready, arrived[chunk]) + stage
            sending = max(sending, ready) + transfer
            arrived[chunk] = sending
    found = cost.pipeline_prefill(MACHINE, TINY, link, n, chunks * tokens, chunk=tokens)
    assert found.seconds == pytest.approx(ready)  # of the last stage, which sends nothing on


# ---- Limits ----------------------------------------------------------------------------------------------------------

RUNS = {scheme.name: scheme for scheme in distributed_tables.SCHEMES}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("published", LINKS, ids=lambda link: link.name)
def test_a_better_link_is_never_slower_and_one_machine_is_the_unit(name, published):
    scheme = RUNS[name]
    assert scheme.speedup(published, 1) == pytest.approx(1)
    for n in distributed_tables.COUNTS:
        slow, expected, fast = (scheme.speedup(published, n, which) for which in ("slow", "expected", "fast"))
        assert (slow is None) == (expected is None) == (fast is None)
        if expected is not None:
            rounding = 1 + 1e-9
            assert slow <= expected * rounding
            assert expected <= fast * rounding
            assert fast <= n * rounding


def test_nothing_is_sent_by_one_machine():
    free = Link("free", 0.0, inf)
    for transfer in (cost.all_reduce, cost.all_gather, cost.exchange):
        assert transfer(PLAIN, 1, 4096) == cost.Cost()
        assert transfer(free, 4, 4096).seconds == 0
    here = machine("M3 Ultra")
    one = cost.forward(here, LARGE, 1, 4096)
    assert one.sent == one.communication == 0
    # Without a price of messages, what is left is the machine's share of the work.
    split = cost.tensor_parallel(here, LARGE, free, 8, 1, 4096)
    assert one.seconds / 8 < split.seconds < one.seconds
    assert (
        cost.data_parallel(here, SMALL, free, 8, 4096).seconds == cost.data_parallel(here, SMALL, free, 1, 4096).seconds
    )


def test_tensor_parallelism_is_refused_where_heads_do_not_divide():
    with pytest.raises(ValueError, match="16 ranks do not divide 8 KV heads"):
        cost.tensor_parallel(MACHINE, LARGE, PLAIN, 16, 1, 1)


def test_chunks_hide_communication_but_not_all_of_it():
    slow = replace(PLAIN, bandwidth=1e8)
    plain = cost.tensor_parallel(MACHINE, TINY, slow, 2, 2048, 2048)
    best = cost.best_tensor_parallel(MACHINE, TINY, slow, 2, 2048, 2048)
    assert 0 < best.hidden < best.communication
    assert best.compute < best.seconds < plain.seconds


def test_a_mesh_needs_fewer_steps_than_a_ring():
    mesh = replace(PLAIN, collective=cost.MESH, most_peers=5)
    assert cost.all_reduce(mesh, 4, 16384).seconds < cost.all_reduce(PLAIN, 4, 16384).seconds
    assert cost.all_reduce(mesh, 4, 1 << 20).sent == cost.all_reduce(PLAIN, 4, 1 << 20).sent
    assert cost.all_reduce(mesh, 8, 16384) == cost.all_reduce(PLAIN, 8, 16384)  # more peers than cables


# ---- The benchmark ---------------------------------------------------------------------------------------------------


def test_the_benchmark_times_every_transfer_and_fits_80_columns():
    sizes, rounds = [4096, 2 << 20], 3
    rows = communication.transfer_rows(2, sizes, rounds)
    assert [(row["what"], row["bytes"]) for row in rows] == list(itertools.product(distributed_fit.TRANSFERS, sizes))
    for row in rows:
        assert row["processes"] == 2
        assert len(row["seconds"]["rounds"]) == rounds
        assert 0 < row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"] < 10
    committed = distributed_fit.read()["rows"]
    console = Console(width=80, record=True, file=io.StringIO())
    for table in (communication.transfer_table(committed), communication.other_table(committed)):
        console.print(table)
    text = console.export_text()
    for row in committed:
        assert row["what"].removeprefix("rate: ") in text


def test_the_slowest_rank_counts():
    found = communication.of_slowest([[1.0, 5.0, 2.0], [3.0, 1.0, 4.0]])
    assert found["seconds"]["rounds"] == [3.0, 5.0, 4.0]
    assert found["seconds"]["median"] == 4.0


# ---- The fit ---------------------------------------------------------------------------------------------------------


def test_the_fit_predicts_runs_that_it_has_not_seen():
    parameters, runs = distributed_fit.fitted_to(distributed_fit.read())
    held = [run for run in runs if run.held]
    fitted = [run for run in runs if not run.held]
    assert len(held) >= 6
    assert {run.what for run in held} >= set(distributed_fit.TRANSFERS)
    assert not {(run.what, run.processes, run.measured) for run in held} & {
        (run.what, run.processes, run.measured) for run in fitted
    }
    assert distributed_fit.error(held, parameters) < MOST_HELD_ERROR


def test_the_fit_finds_the_parameters_of_made_up_times():
    true = distributed_fit.Parameters(20e-6, 2e9, 50e-6, 200e-6, 8e9, 1.4, 0.5)
    runs = []
    for what, transfer in distributed_fit.TRANSFERS.items():
        for n, size in itertools.product((2, 4), (4096, 1 << 18, 1 << 22, 1 << 26)):
            seconds = transfer(true, n, size)
            predicted = lambda p, n=n, size=size, transfer=transfer: transfer(p, n, size)  # noqa: E731
            runs.append(distributed_fit.Run(what, n, seconds, predicted, False))
    assert distributed_fit.error(runs, distributed_fit.fit(runs)) < 0.05
