"""Runs examples and judges them by the project's correctness bar."""

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from fuzz_case import FLOATS, Case, shape_of, with_helpers
from fuzz_draw import SLOPE, BadCall, ScalarCall
from support import GRADIENT_FACTOR, OUTPUT_FACTOR, Arrays, assert_accurate, in_float64, to_numpy

NO_JVP = re.compile(r"\[\w+\] JVP not yet implemented")
LARGEST = {mx.float32: 3.4028e38, mx.float16: 65504.0, mx.bfloat16: 3.389e38}
LAST_PLACE = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
# Rounding costs digits where numbers cancel; ours may lose a few times as many as the definition, or as arguments that
# are rounded once more. The most that is lost near the arguments counts: at one point it may be nothing by luck.
CANCELLATION = 4
NEARBY = 6
# A choice among sums is settled if it does not change while every argument moves by about PLACES last places of float32.
# If float32 rounds two sums to one number, all MOVES keep their order once in 65,536 cases.
PLACES = 8
MOVES = 16
ROUNDING = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
# Of results that are nothing but rounding, such as a gradient that cancels, the scale is this share of the other
# results'.
SHARE = 1e-3
# What the definition in 16 bits is off by depends on luck: an error counts if other numbers have it too.
OTHER_SEEDS = (10**6, 10**7)


class Wrong(AssertionError):
    """What is wrong, and the script that shows it."""

    def __init__(self, problem: str, script: str) -> None:
        super().__init__(problem)
        self.script = script


def run(script: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(script, "<example>", "exec"), namespace)
    return namespace


def check(case: Case) -> None:
    problem = _problem(case, case.seed)
    luck = problem.startswith("error") and not any(_problem(case, case.seed + more) for more in OTHER_SEEDS)
    if problem and not luck:
        raise Wrong(problem, case.script())


def _problem(case: Case, seed: int) -> str:
    """None, or what is wrong, starting with "error" if only digits differ."""
    try:
        example = run(with_helpers(case.body(seed)))
        mx.eval(example["results"])
    except Exception as error:
        kinds = [t.kind for t in case.transforms]
        if ("shapeless" in kinds and "infer" in str(error)) or NO_JVP.match(str(error)):
            return ""  # it, or an op of MLX, says that it cannot
        return f"raises {type(error).__name__}: {error}"
    ours = example["results"]
    dtypes = [str(x.dtype).removeprefix("mlx.core.") for x in ours]
    if dtypes != [result.dtype for result in case.results]:
        return f"dtypes are {dtypes}; wanted: {[result.dtype for result in case.results]}"
    for i, (x, result) in enumerate(zip(ours, case.results, strict=True)):
        if x.shape != shape_of(result.dims, case.sizes):
            return f"result {i} has shape {x.shape}; wanted: {shape_of(result.dims, case.sizes)}"
    if all(x.size == 0 for x in ours):
        return ""  # definitions of empty batches have ended MLX by a division by zero
    arrays = example["arrays"]
    # MLX 0.32.4's sum of an empty array that is strided, now and then, does not end on the CPU. Definitions have one in
    # derivatives; ours were evaluated above.
    if case.derivatives and any(x.size == 0 for x in arrays):
        return ""
    places = [i for i, arg in enumerate(case.args) if arg.dtype in FLOATS and arg.differentiable]
    floats = [arrays[i] for i in places]
    of_floats = [i for i, result in enumerate(case.results) if result.dtype in FLOATS]

    def definition(*values: mx.array) -> Arrays:
        given = dict(zip(places, values, strict=False))
        in_64 = values[0].dtype == mx.float64
        whole = [
            given.get(i, x.astype(mx.float64) if in_64 and x.dtype in LARGEST else x) for i, x in enumerate(arrays)
        ]
        with mx.stream(mx.cpu):
            wanted = [example["exact"](*whole)[i] for i in of_floats]
            return wanted if in_64 else [x.astype(ours[i].dtype) for i, x in zip(of_floats, wanted, strict=True)]

    for i in set(range(len(ours))) - set(of_floats):
        with mx.stream(mx.cpu):
            wanted = example["exact"](*(x.astype(mx.float64) if x.dtype in LARGEST else x for x in arrays))[i]
        differs = np.array(ours[i]) != np.array(wanted)
        if case.call.ranks_sums and differs.any():
            differs &= _settled(case, example["exact"], arrays, i)
        if differs.any():
            return f"result {i} is {np.array(ours[i]).tolist()}; wanted: {np.array(wanted).tolist()}"
    if not of_floats:
        return ""

    def terms() -> list[float]:
        return _largest_terms(case, seed, arrays, of_floats)

    try:
        return _inaccuracy(case, [ours[i] for i in of_floats], definition, floats or [mx.zeros(())], terms)
    except RuntimeError as error:
        if NO_JVP.match(str(error)):
            return ""  # an op of MLX in the definition says that it cannot
        raise


def _settled(case: Case, exact: Callable[..., Arrays], arrays: Arrays, i: int) -> np.ndarray:
    """Where integers of result `i` do not depend on the last places of the arguments, and of 1: a score near 0.5 is
    rounded by as much, however small its logit."""
    rng = np.random.default_rng(case.seed)
    size = PLACES * LAST_PLACE[mx.float32]

    def moved(x: mx.array) -> mx.array:
        if x.dtype not in LARGEST:
            return x
        exact = x.astype(mx.float64)
        return exact + (1 + mx.abs(exact)) * mx.array(size * rng.standard_normal(x.shape), mx.float64)

    with mx.stream(mx.cpu):
        results = [np.array(exact(*map(moved, arrays))[i]) for _ in range(MOVES)]
    return np.all([x == results[0] for x in results], axis=0)


def _largest_terms(case: Case, seed: int, arrays: Arrays, of_floats: list[int]) -> list[float]:
    """The magnitude of what cancels in each result, where the call says how to compute it."""
    if not case.call.terms:
        return [0.0] * len(of_floats)
    terms = run(with_helpers(case.body(seed, exact=case.call.terms)))["exact"]
    with mx.stream(mx.cpu):
        results = terms(*(x.astype(mx.float64) if x.dtype in LARGEST else x for x in arrays))
        values = [to_numpy(results[i]) for i in of_floats]
    return [np.abs(x).max(initial=0.0, where=np.isfinite(x)) for x in values]


def _inaccuracy(
    case: Case, ours: Arrays, definition: Callable[..., Arrays], floats: Arrays, terms: Callable[[], list[float]]
) -> str:
    factor = GRADIENT_FACTOR if case.derivatives else OUTPUT_FACTOR
    tolerance = case.call.tolerance * (10 if case.derivatives > 1 else 1)
    if case.derivatives:  # in float32, of results or by arguments that are not
        coarse = [ROUNDING.get(x.dtype, 0.0) for x in (*case.args, *case.call.results)]
        tolerance = max(tolerance, *coarse)
    try:
        with np.errstate(invalid="ignore"):
            assert_accurate(lambda *_: ours, definition, floats, factor=factor, float32_tolerance=tolerance)
        return ""
    except AssertionError:
        pass
    # The bar is for numbers that the definition in that dtype can reach: without infinities and overflow.
    truth = in_float64(definition, floats)
    composed = definition(*floats)
    largest = [np.abs(to_numpy(exact)).max(initial=0.0, where=np.isfinite(to_numpy(exact))) for exact in truth]
    lost, fits = _rounding(case, definition, floats, truth)
    if case.call.long_axis and case.derivatives < 2:
        dims = [result.dims for result in case.results if result.dtype in FLOATS]
        lost = [x if case.call.long_axis in d else 0.0 for x, d in zip(lost, dims, strict=True)]
    cancelled = terms()
    for i, (result, plain, exact) in enumerate(zip(ours, composed, truth, strict=True)):
        r, p, t = (to_numpy(x) for x in (result, plain, exact))
        reachable = fits[i] & np.isfinite(p) & np.isfinite(t) & (np.abs(t) < LARGEST[result.dtype])
        if not np.isfinite(r[reachable]).all():
            return f"result {i} is not finite where it should be"
        infinite = np.isinf(t) & (p == t)
        if not np.array_equal(r[infinite], t[infinite]):
            return f"result {i} is not infinite where it should be"
        with mx.stream(mx.cpu):
            mask = mx.array(reachable)

            def part(x: mx.array, mask: mx.array = mask) -> mx.array:
                return mx.where(mask, x, mx.zeros((), x.dtype))

            def reached(*values: mx.array, i: int = i, part: Callable[..., mx.array] = part) -> Arrays:
                with mx.stream(mx.cpu):
                    return [part(definition(*values)[i])]

            masked = part(result)
        often = CANCELLATION if result.dtype == mx.float32 else factor
        allowed = max(tolerance * SHARE * max(largest), tolerance * cancelled[i], often * lost[i])
        with np.errstate(invalid="ignore"):
            error = np.abs(r - t).max(initial=0.0, where=reachable)
        if error <= allowed:
            continue
        try:
            assert_accurate(lambda *_, x=masked: [x], reached, floats, factor=factor, float32_tolerance=tolerance)
        except AssertionError as problem:
            return f"error of result {i}: {problem} of its scale, and {error:.2e} more than {allowed:.2e} in all"
    return ""


def _rounding(
    case: Case, definition: Callable[..., Arrays], floats: Arrays, truth: Arrays
) -> tuple[list[float], list[np.ndarray]]:
    """How far rounding takes each result: by the definition in its dtype, and by a last place of the float32 arguments,
    which an op may round differently. Of arguments that differ in their last places, as an error may be small by
    luck. And where arguments larger by a last place take no number on the way beyond the largest: by luck the
    definition may stay below it, as 2 y does by a y of bfloat16 that it rounds to less than 2^127."""
    rng = np.random.default_rng(case.seed)
    exact = [to_numpy(t) for t in truth]
    worst = [0.0] * len(truth)
    fits = [np.ones(x.shape, np.bool_) for x in exact]

    def note(a: Arrays, b: Arrays | list[np.ndarray]) -> None:
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            with np.errstate(invalid="ignore"):
                difference = np.abs(to_numpy(x) - (to_numpy(y) if isinstance(y, mx.array) else y))
            worst[i] = max(worst[i], difference.max(initial=0.0, where=np.isfinite(difference)))

    note(definition(*floats), truth)
    for i in range(NEARBY):
        away = [1.0] if i == 0 else [-1.0, 0.0, 1.0]
        signs = [mx.array(rng.choice(away, x.shape), mx.float64) for x in floats]
        with mx.stream(mx.cpu):
            steps = [s * LAST_PLACE[x.dtype] for x, s in zip(floats, signs, strict=True)]
            moved = [x.astype(mx.float64) * (1 + s) for x, s in zip(floats, steps, strict=True)]
            near = [x.astype(y.dtype) for x, y in zip(moved, floats, strict=True)]
            at_near = in_float64(definition, near)
            fine = [x if y.dtype == mx.float32 else y.astype(mx.float64) for x, y in zip(moved, floats, strict=True)]
        coarse = definition(*near)
        note(coarse, at_near)
        fits = [some & np.isfinite(to_numpy(x)) for some, x in zip(fits, coarse, strict=True)]
        note(in_float64(definition, fine), exact)
    return worst, fits


def check_bad_call(bad: BadCall) -> None:
    """It gives a result that can be evaluated, or an error in the form of the project, at the call."""
    try:
        example = run(bad.before)
    except Exception:
        return  # MLX or NumPy has no such argument
    try:
        exec(bad.call, example)
    except (TypeError, ValueError) as error:
        if not re.match(rf"\[{bad.op}\] ", str(error)):
            raise Wrong(f"{type(error).__name__} that does not start with [{bad.op}]: {error}", bad.script()) from None
        return
    except Exception as error:
        raise Wrong(f"{type(error).__name__}, not a ValueError or TypeError: {error}", bad.script()) from None
    try:
        mx.eval(example["result"])
    except Exception as error:
        raise Wrong(f"raises when it is evaluated: {error}", f"{bad.script()}mx.eval(result)\n") from None


def check_scalar_call(call: ScalarCall) -> None:
    """The call has a gradient in the option, or raises a TypeError that says it has none. It never returns zero
    silently."""
    example = run(call.before)
    try:
        gradient = mx.grad(example["ours"])(mx.array(example["value"])).item()
    except Exception as error:
        if not (isinstance(error, TypeError) and str(error).startswith(f"[{call.op}] ")):
            raise Wrong(f"{type(error).__name__}, not a TypeError with [{call.op}]: {error}", call.script()) from None
        return
    exec(SLOPE, example)
    slope = example["slope"]
    if gradient == 0 and abs(slope) > 1e-3 * abs(example["ours"](example["value"]).item()) + 1e-3:
        raise Wrong(f"gradient {gradient:.3g}, but the slope is {slope:.3g}", call.script())
