"""The model of launch times on Apple's GPUs: its counts, its behaviour, and its stated errors."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_anvil.mslc import EstimateError, Source, estimate, measure_work
from mlx_anvil.mslc import estimation as model
from mlx_anvil.mslc.agx_flow import (
    cost,
    issue_of,
    non_negative_least_squares,
    read_blocks,
    read_layout,
    register_bytes,
)
from mlx_anvil.mslc.commands.estimate import command
from mlx_anvil.mslc.estimate_work import LINE
from tests.mslc.msl import HEAD
from tests.mslc.test_agx import needs_agx

COPY = """
kernel void copy(const device float* x [[buffer(0)]], device float* out [[buffer(1)]], constant int& steps [[buffer(2)]],
                 uint group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  for (int i = 0; i < steps; ++i) out[(group * steps + i) * 64 + t] = x[(group * steps + i) * 64 + t] + 1;
}
"""


def measure(steps=16, groups=32, **options):
    x = np.zeros(groups * steps * 64, np.float32)
    buffers = {0: x, 1: np.zeros_like(x), 2: steps}
    return measure_work(Source.load(HEAD + COPY), "copy", buffers, (groups,), (64,), **options)


def some_work(name="sigmoid float32 8388608"):
    return model.validation()[1][name]


# ---- how often blocks run


LOOP = """block0 {
   r0 = get_sr #80
   if_icmp r0, #0, #0, n=1
   jmp_exec_none #0
} -> block1 block4

block1 {
   r2 = imad r0, r1, #0
} -> block2  from block0

block2 {
   r4...r7 = device_load r0:r1, r2, xyzw, #0, slot 0
   wait #0, slot 0
   r4 = fadd r4, r5
   r10:r11 = iadd r10:r11, r12:r13, #0
   while_icmp r9, u78, #0, n=1
   jmp_exec_any #0
} -> block3 block2  from block1 block2

block3 {
   device_store r4l, r0:r1, r2, x, #0, slot 0
} -> block4  from block2

block4 {
   stop
}  from block0 block3

"""


def test_flows_meet_the_counts():
    assert [block.successors for block in read_blocks(LOOP)] == [[1, 4], [2], [3, 2], [4], []]
    issue = issue_of(LOOP, {"device read": 16 * 40, "device written": 2, "matrix": 0})
    assert np.allclose(issue.blocks, [1, 1, 40, 1, 1], rtol=1e-3)
    assert issue.unexplained < 1e-3
    assert issue.rounds == pytest.approx(40, rel=1e-3)
    assert issue.accesses == pytest.approx(41, rel=1e-3)
    assert issue.complex == pytest.approx(4, rel=1e-3)  # imad
    # In the loop a load, a sum, one of 64 bits for four, and two of the loop itself; 7 elsewhere.
    assert issue.simple == pytest.approx(40 * (1 + 1 + 4 + 2) + 3 + 1 + 1, rel=1e-2)


def test_half_of_the_simdgroups_may_skip_a_branch():
    issue = issue_of(LOOP, {"device read": 16 * 20, "device written": 1})
    assert issue.blocks[1] == pytest.approx(0.5, rel=1e-2)
    assert issue.blocks[4] == pytest.approx(1, rel=1e-2)


def test_counts_that_no_flow_makes_are_said():
    assert issue_of(LOOP, {"device read": 16, "device written": 200}).unexplained > 0.5


@pytest.mark.parametrize(
    ("operand", "size"), [("r3", 4), ("r3l", 2), ("r3h", 2), ("r4...r7", 16), ("r4l...r5h", 8), ("r4:r5", 8)]
)
def test_bytes_of_registers(operand, size):
    assert register_bytes(operand) == size


def test_cycles_of_instructions():
    assert cost("ffma") == ("simple", 1)
    assert cost("convert") == ("complex", 4)
    assert cost("iadd", "r4:r5") == ("simple", 4)
    assert cost("simd_reduce")[1] > cost("shuffle_xor")[1] > 1
    assert cost("wait") == ("simple", 0)


def test_least_squares_are_not_negative(rng):
    a = rng.standard_normal((30, 12))
    expected = np.maximum(rng.standard_normal(12), 0)
    np.testing.assert_allclose(non_negative_least_squares(a, a @ expected), expected, atol=1e-8)
    x, b = non_negative_least_squares(a, -a @ expected), -a @ expected
    gradient = a.T @ (b - a @ x)
    assert (x >= 0).all()
    assert gradient.max() <= 1e-8  # no step to a larger x helps
    assert np.abs(gradient * x).max() <= 1e-8


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-3, 0.3])
@pytest.mark.parametrize("scale", [1e-22, 1.0, 1e22])
def test_least_squares_end_whatever_the_rounding(rng, monkeypatch, noise, scale):
    """Some columns are multiples of others, and each solution is off: a few times as many are computed as there are
    numbers."""
    columns, solve, solved = 24, np.linalg.lstsq, []

    def inexact(*arguments, **options):
        x, *rest = solve(*arguments, **options)
        solved.append(len(x))
        return x * (1 + noise * rng.standard_normal(x.shape)), *rest

    a = rng.standard_normal((30, columns))
    a[:, columns // 2 :] = a[:, : columns // 2] * rng.choice([1e-8, 1.0, 1e8], columns // 2)
    b = scale * a @ np.maximum(rng.standard_normal(columns), 0)
    exact = non_negative_least_squares(a, b)
    assert np.linalg.norm(b - a @ exact) <= 1e-3 * np.linalg.norm(b)
    monkeypatch.setattr(np.linalg, "lstsq", inexact)
    x = non_negative_least_squares(a, b)
    assert len(solved) <= 10 * columns
    assert (x >= 0).all()
    assert np.linalg.norm(b - a @ x) <= (1e-3 + 2 * noise) * np.linalg.norm(b)


# A step whose last code is masked at the end, and a branch that no jump skips.
MASKED = """block0 {
   r0 = get_sr #80
   if_icmp r0, #0, #0, n=1
   jmp_exec_none #0
} -> block1 block6

block1 {
   r4...r7 = device_load r0:r1, r2, xyzw, #0, slot 0
   r8 = shuffle_xor r4, #1
   if_icmp r9, #0, #0, n=1
} -> block2 block3  from block0 block5

block2 {
   device_store r4, r0:r1, r2, x, #0, slot 0
} -> block4  from block1

block3 {
   pop_exec #0, n=1
} -> block4  from block1

block4 {
} -> block5 block7  from block2 block3

block5 {
   while_icmp r9, u78, #0, n=1
   r2 = iadd r2, #1, #0
   jmp_exec_any #0
   pop_exec #0, n=1
} -> block1  from block4

block6 {
   else_fcmp #0.0, #0.0, #0, n=1
   jmp_exec_none #0
   r4 = mov_imm #0
   pop_exec #0, n=1
} -> block7  from block0

block7 {
   stop
}  from block4 block6

"""


def test_masked_code_is_issued():
    blocks = read_layout(MASKED)
    assert [block.issued for block in blocks] == [3, 0, 3, 1, 1, 0, 3, 1, 2, 2, 1]
    assert [block.successors for block in blocks][:3] == [[1, 8], [2], [3]]
    assert blocks[6].successors == [7, 2]
    assert blocks[8].successors == [9, 10]
    # The source reads 16 bytes twice in each of 5 steps; one lane in two stores.
    counts = {"device read": 2 * 5 * 16, "device written": 5 * 4, "exchanges": 5}
    issue = issue_of(MASKED, counts, laid_out=True)
    assert issue.instructions == pytest.approx(3 + 5 * (3 + 1 + 1 + 3) + 1 + 2 + 2 + 1, rel=1e-3)
    assert issue.unexplained < 1e-3


# ---- what a launch asks


@needs_agx
def test_work_of_a_launch():
    work = measure()
    assert work.threadgroups == 32
    assert work.simdgroups == 64
    assert work.bytes_read == work.bytes_written == work.cache_bytes / 2 == 32 * 16 * 64 * 4
    assert work.port_cycles == 2 * 64 * 16 * LINE / 64
    assert work.unexplained < 1e-3
    assert work.rounds / work.simdgroups == pytest.approx(16, rel=0.01)
    longer = measure(steps=32)
    loop = (longer.instructions - work.instructions) / work.simdgroups / 16
    assert 5 < loop < 40
    assert work.instructions == pytest.approx(loop * 16 * work.simdgroups, rel=0.5)


@needs_agx
def test_a_part_stands_for_the_launch():
    whole, part = measure(), measure(sample=(4,))
    for name in ("threadgroups", "bytes_read", "bytes_written", "port_cycles", "instructions", "rounds"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name), rel=1e-6)
    small = measure(groups=4, sizes={"x": 5000.0})
    assert small.bytes_read == 5000


# ---- the model


@pytest.mark.parametrize("chip", model.chips())
def test_more_work_takes_longer(chip):
    work = some_work()
    base = estimate(work, chip).microseconds
    for name in ("bytes_read", "bytes_written", "port_cycles", "simple", "complex", "rounds", "cache_bytes"):
        larger = replace(work, **{name: 8 * getattr(work, name)})
        assert estimate(larger, chip).microseconds > base, name
    assert estimate(replace(work, registers=256), chip).microseconds > base
    doubled = replace(work, bytes_read=2e9, bytes_written=0)
    assert estimate(replace(doubled, bytes_read=4e9), chip).microseconds == pytest.approx(
        2 * estimate(doubled, chip).microseconds, rel=0.01
    )


@pytest.mark.parametrize(
    ("field", "bound"),
    [
        ("bytes_read", "memory"),
        ("cache_bytes", "shared cache"),
        ("port_cycles", "core's cache"),
        ("bank_cycles", "threadgroup memory"),
        ("simple", "instructions"),
        ("complex", "complex instructions"),
        ("rounds", "latency"),
    ],
)
def test_what_bounds_a_launch(field, bound):
    work = replace(some_work(), **{field: 1e12})
    assert estimate(work, "M2 Pro").bound == bound
    products = replace(some_work(), simple=1e12, matrix_cycles=9e11)
    assert estimate(products, "M2 Pro").bound == "matrix products"
    nothing = replace(some_work(), **dict.fromkeys(("bytes_read", "bytes_written", "rounds", "simple", "complex"), 1.0))
    small = replace(nothing, threadgroups=1, port_cycles=1, cache_bytes=1, complex_issued=1)
    assert estimate(small, "M2 Pro").bound == "launch"


def test_occupancy():
    core, work = model.core(), replace(some_work(), threads=128, threadgroup_memory=0)
    assert model.simdgroups_per_core(replace(work, registers=16), core) == 96
    assert model.simdgroups_per_core(replace(work, registers=104), core) == 32
    assert model.simdgroups_per_core(replace(work, registers=256), core) == 12
    assert model.simdgroups_per_core(replace(work, registers=16, threadgroup_memory=30000), core) == 8
    # Fewer cores than threadgroups, or a last round of few of them, leaves cores without work.
    chip = model.find_chip("M1 Pro")
    full = replace(work, threads=1024, registers=16)
    whole, uneven = (replace(full, threadgroups=n, simple=1e9 * n) for n in (16, 17))
    times = [model.resources(w, chip, model.validation()[0], core)["instructions"] for w in (whole, uneven)]
    assert times[1] == pytest.approx(2 * times[0], rel=0.01)


def test_what_fits_the_system_level_cache_may_be_warm():
    work = replace(some_work(), bytes_read=30e6, bytes_written=0)
    assert estimate(work, "M3 Max", warm=True).microseconds < estimate(work, "M3 Max").microseconds
    large = replace(work, bytes_read=300e6)
    assert estimate(large, "M3 Max", warm=True) == estimate(large, "M3 Max")


# ---- validation


def test_every_estimate_has_the_error_of_its_chip():
    found = estimate(some_work(), "m1 max")
    assert (found.chip.name, found.chip.cores) == ("M1 Max", 32)
    assert (found.error, found.worst, found.timings) == model.chip_error("M1 Max")
    assert found.low < found.microseconds < found.high
    assert estimate(some_work(), "M1 Ultra", 48).microseconds != estimate(some_work(), "M1 Ultra").microseconds


def test_published_times_are_reproduced():
    """The errors of docs/estimates.md, from the data: a change of the model that makes them worse has to say so."""
    parameters, works, timings = model.validation()
    assert len(timings) >= 20
    assert {timing.chip for timing in timings} == set(model.chips())
    assert all(timing.source.startswith("https://github.com/") for timing in timings)
    assert {timing.work for timing in timings} == set(works)
    assert all(work.unexplained < 0.3 for work in works.values())
    held = [model.ratio(timing, works, parameters) for timing in timings if timing.held]
    fitted = [model.ratio(timing, works, parameters) for timing in timings if not timing.held]
    assert len(held) > len(timings) / 3
    assert model.typical_error(held) < 0.1
    assert model.typical_error(fitted) < 0.1
    # An M3 serves qmv_wide, whose lanes read a line each, more lines a cycle than the model counts.
    wide = [timing for timing in timings if timing.work.startswith("qmv_wide")]
    assert all(timing.held and 1.5 < model.ratio(timing, works, parameters) < 3 for timing in wide)
    others = [model.ratio(timing, works, parameters) for timing in timings if timing not in wide]
    assert sum(abs(np.log(r)) > np.log(1.5) for r in others) <= 0.045 * len(others)
    assert all(model.chip_error(chip)[0] < 0.4 for chip in model.chips())


def test_numbers_of_chips_have_sources():
    data = model._read("chips.json")
    numbers = [data["core"], *data["chips"].values()]
    for name, number in ((n, v) for group in numbers for n, v in group.items()):
        assert number["source"] in data["sources"] or (number["source"] == "assumed" and number["range"]), name
        if "range" in number:
            low, high = number["range"]
            assert low <= number["value"] <= high
            assert number["note"]


@pytest.mark.parametrize("name", ["M5", "M5 Max", "A17 Pro", "H100", ""])
def test_chips_that_are_refused(name):
    with pytest.raises(
        EstimateError,
        match=rf"^\[mslc\.estimate\] there is no estimate for '{name}': the model was not validated .*M1,",
    ):
        estimate(some_work(), name)


def test_a_chip_with_too_few_published_times_is_refused(monkeypatch):
    parameters, works, timings = model.validation()
    few = [t for t in timings if t.chip != "M2"] + [t for t in timings if t.chip == "M2"][:2]
    monkeypatch.setattr(model, "validation", lambda: (parameters, works, tuple(few)))
    model.chip_error.cache_clear()
    try:
        with pytest.raises(EstimateError, match=r"^\[mslc\.estimate\] there is no estimate for M2: 2 of its times are"):
            estimate(some_work(), "M2")
    finally:
        model.chip_error.cache_clear()


def test_cores_that_a_chip_does_not_have():
    with pytest.raises(EstimateError, match=r"^\[mslc\.estimate\] an M2 Pro has 16 or 19 cores, not 38$"):
        estimate(some_work(), "M2 Pro", 38)


# ---- the command


def run(tmp_path, *arguments):
    path = tmp_path / "copy.metal"
    path.write_text(HEAD + COPY)
    buffers = ["0=zeros:float32:32768", "1=zeros:float32:32768", "2=16", "--grid", "32", "--threadgroup", "64"]
    return CliRunner().invoke(command, [str(path), "copy", *buffers, *arguments])


@needs_agx
def test_command(tmp_path):
    result = run(tmp_path, "--chip", "M2 Pro", "--chip", "M1")
    assert result.exit_code == 0, result.output
    assert "typical error" in result.output
    assert "no measurement" in result.output
    data = json.loads(run(tmp_path, "--chip", "M2 Pro", "--cores", "16", "--sample", "4,1,1", "--json").output)
    (found,) = data[0]["estimates"]
    assert found["chip"]["cores"] == 16
    assert found["microseconds"] == pytest.approx(estimate(measure(), "M2 Pro", 16).microseconds, rel=1e-6)
    assert found["error"] == model.chip_error("M2 Pro")[0]


def test_errors_of_the_command(tmp_path):
    refused = run(tmp_path, "--chip", "M5 Max")
    assert refused.exit_code == 1
    assert refused.output.startswith("[mslc.estimate] there is no estimate for 'M5 Max'")
    several = run(tmp_path, "--cores", "8")
    assert several.output == "[mslc.estimate] --cores needs exactly one --chip\n"
    threads = run(tmp_path, "--dispatch", "threads", "--sample", "1,1,1")
    assert threads.output.startswith("[mslc.estimate] --sample counts threadgroups")
