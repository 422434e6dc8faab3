"""Runs examples and judges them by the project's correctness bar."""

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from fuzz_case import FLOATS, Case, shape_of, with_helpers
from fuzz_draw import SLOPE, BadCall, ScalarCall
from support import GRADIENT_FACTOR, OUTPUT_FACTOR, Arrays, assert_accurate, in_float64, max_error, to_numpy

LARGEST = {mx.float32: 3.4028e38, mx.float16: 65504.0, mx.bfloat16: 3.389e38}
# A definition in float32 loses digits where numbers cancel; ours may lose a few times as many.
CANCELLATION = 4
ROUNDING = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
# Of results that are nothing but rounding, such as a gradient that cancels, the scale is this share of the other results'.
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
    """Nothing, or what is wrong; with "error" first where it is a matter of digits."""
    try:
        example = run(with_helpers(case.body(seed)))
        mx.eval(example["results"])
    except Exception as error:
        shapeless = any(t.kind == "shapeless" for t in case.transforms)
        if (shapeless and "infer" in str(error)) or re.match(r"\[\w+\] JVP not yet implemented", str(error)):
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
        if not np.array_equal(np.array(ours[i]), np.array(wanted)):
            return f"result {i} is {np.array(ours[i]).tolist()}; wanted: {np.array(wanted).tolist()}"
    if not of_floats:
        return ""
    return _inaccuracy(case, [ours[i] for i in of_floats], definition, floats or [mx.zeros(())])


def _inaccuracy(case: Case, ours: Arrays, definition: Callable[..., Arrays], floats: Arrays) -> str:
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
    for i, (result, plain, exact) in enumerate(zip(ours, composed, truth, strict=True)):
        r, p, t = (to_numpy(x) for x in (result, plain, exact))
        reachable = np.isfinite(p) & np.isfinite(t) & (np.abs(t) < LARGEST[result.dtype])
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
            lost = 0.0 if case.call.strict else CANCELLATION * max_error(part(plain), part(exact))
        limit = max(tolerance, lost, tolerance * SHARE * max(largest) / (largest[i] or 1.0))
        try:
            assert_accurate(lambda *_, x=masked: [x], reached, floats, factor=factor, float32_tolerance=limit)
        except AssertionError as error:
            return f"error of result {i}: {error}"
    return ""


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
    """It has a gradient in the option, or says with a TypeError that it has none. It is not zero without a word."""
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
