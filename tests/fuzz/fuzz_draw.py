"""Draws an example: a call, the transformations around it, the memory layout of every array."""

import re
from dataclasses import dataclass

from hypothesis import strategies as st

import mlx_anvil
from fuzz_case import DERIVATIVES, KINDS, Case, Transform, shape_of, with_helpers
from fuzz_choices import Draw
from fuzz_ops import call_of

LAYOUTS = ("transposed", "inside_larger", "every_second", "reversed_twice", "off_alignment", "repeated")


@st.composite
def cases(draw, name: str, depth: int, small: bool) -> Case:
    kinds = [draw(st.sampled_from(KINDS)) for _ in range(depth)]
    source = Draw(draw, sum(kind in DERIVATIVES for kind in kinds), small)
    call = call_of(source, name)
    if not any(arg.differentiable for arg in call.args):
        kinds = ["vmap" if kind in DERIVATIVES else kind for kind in kinds]
    case = Case(call, sum(kind in DERIVATIVES for kind in kinds), seed=draw(st.integers(0, 2**16)))
    for kind, after in zip(kinds, [*kinds[1:], ""], strict=False):
        case.apply(_transform(source, case, kind, after))
    case.with_layouts([_layout(source, case, arg) for arg in case.args])
    return case


def _transform(draw: Draw, case: Case, kind: str, after: str) -> Transform:
    able = [i for i, arg in enumerate(case.args) if arg.differentiable]
    if kind == "checkpoint":
        return Transform(kind, argnums=tuple(able if after in DERIVATIVES else range(len(case.args))))
    if kind in DERIVATIVES:
        some = [i for i in able if not draw.one_in(3)]
        return Transform(kind, argnums=tuple(some or able[:1]))
    if kind != "vmap":
        return Transform(kind)
    axes: list[int | None] = []
    for arg in case.args:
        rank = len(arg.all_dims)
        axes.append(draw.choice(None, 0, *range(1, rank + 1), *range(-rank - 1, 0)))
    if all(axis is None for axis in axes):
        axes[draw.count(0, len(axes) - 1)] = 0
    rank = min(len(result.dims) for result in case.results)
    return Transform(kind, in_axes=tuple(axes), out_axis=draw.choice(0, *range(1, rank + 1), -1), size=draw.count(1, 3))


def _layout(draw: Draw, case: Case, arg) -> str:
    shape = shape_of(arg.all_dims, case.sizes)
    if not shape or not draw.one_in(4):
        return "{x}"
    layout = draw.choice(*LAYOUTS)
    if layout != "repeated":
        return f"{layout}({{x}})"
    axes = [axis for axis, n in enumerate(shape) if n > 0]
    # Rows that are alike would tie, by how they round.
    return f"repeated({{x}}, {draw.choice(*axes)})" if axes and arg.alike else "{x}"


# ---- bad calls -------------------------------------------------------------------------------------------------------

WRONG = (
    *("None", "True", "-1", "0", "3", "2**31", "2**63", "2**70", "-(2**63)", "1.5", "-1e300"),
    *("math.nan", "math.inf", "'bogus'", "''", "b'x'", "[1.0]", "()", "(1, 2, 3)", "{}", "object()"),
    *("np.ones(3, np.float32)", "np.float32(2)", "mx.cpu", "mx.float32", "mx.array(2.0)", "mx.array(True)"),
    *("mx.zeros((0,))", "mx.zeros((2, 3))", "mx.ones((1, 2, 3, 4, 5, 6))", "mx.array([1, 2], mx.int64)"),
)
# Of an array that was right.
CHANGED = (
    *("{x}[None]", "{x}.reshape(-1)", "{x}[..., None]", "mx.concatenate([{x}, {x}], axis=-1)", "{x}.T"),
    *("mx.concatenate([{x}, {x}], axis=0)", "{x}[..., :-1]", "{x}[:0]", "{x}.astype(mx.int32)", "{x}.astype(mx.bool_)"),
    *("{x}.astype(mx.complex64)", "{x}.astype(mx.float16)", "{x}.astype(mx.float64)", "np.array({x})", "[{x}]"),
    *("{x} * 10**6", "({x}, {x})", "{x}.tolist()"),
)


def signature(op: str) -> str:
    """The parameters, as text."""
    return getattr(mlx_anvil, op).__nb_signature__[0][0].split("->")[0]


def scalars(op: str) -> list[str]:
    """The parameters that are numbers."""
    return re.findall(r"(\w+): float", signature(op))


@dataclass(frozen=True)
class ScalarCall:
    """The gradient in an option that is a number, given as an array."""

    op: str
    before: str

    def script(self) -> str:
        return f"{self.before}gradient = mx.grad(ours)(mx.array(value))\n{SLOPE}print(gradient, slope)\n"


SLOPE = "step = 1e-2\nslope = (ours(value + step).item() - ours(value - step).item()) / (2 * step)\n"


@st.composite
def scalar_calls(draw, name: str) -> ScalarCall:
    source = Draw(draw, 2, small=True)  # float32
    call = call_of(source, name)
    while not call.arguments:
        call = call_of(source, name)
    key = source.choice(*scalars(call.op))
    arguments = call.arguments | {key: "value"}
    if key == "base":
        arguments.pop("freqs", None)
    text = f"mlx_anvil.{call.op}({', '.join(f'{key}={text}' for key, text in arguments.items())})"
    results = f"[{text}]" if len(call.results) == 1 else f"{text}{call.floats}"
    lines = [f"rng = np.random.default_rng({draw(st.integers(0, 99))})"]
    lines += [f"{arg.name} = {arg.text(call.sizes)}" for arg in call.args]
    lines += ["", "def ours(value):", f"    return sum((y * mx.cos(y)).sum() for y in {results})", ""]
    lines.append(f"value = {100.0 if key == 'base' else source.choice(0.5, 1.5)}")
    return ScalarCall(call.op, with_helpers("\n".join(lines) + "\n"))


@dataclass(frozen=True)
class BadCall:
    op: str
    before: str  # what makes the arguments
    call: str

    def script(self) -> str:
        return self.before + self.call


@st.composite
def bad_calls(draw, name: str) -> BadCall:
    source = Draw(draw, 0, small=True)
    call = call_of(source, name)
    while not call.arguments:
        call = call_of(source, name)
    names = re.findall(r"(\w+):", signature(call.op))
    arguments = dict(call.arguments)
    for _ in range(source.count(1, 2)):
        key = source.choice(*names)
        array = key in arguments and any(arg.name == key for arg in call.args)
        wrong = source.choice(*CHANGED) if array and source.maybe() else source.choice(*WRONG)
        arguments[key] = wrong.format(x=key) if "{x}" in wrong else wrong
    lines = [f"rng = np.random.default_rng({draw(st.integers(0, 99))})"]
    lines += [f"{arg.name} = {arg.text(call.sizes)}" for arg in call.args]
    lines += [f"arguments = {{{', '.join(f'{key!r}: {text}' for key, text in arguments.items())}}}"]
    return BadCall(call.op, with_helpers("\n".join(lines) + "\n"), f"result = mlx_anvil.{call.op}(**arguments)\n")
