"""An example of the random tests: a call of an op with its arrays, and the transformations around it, as the text of a
plain script. The tests run that text, so what a failure prints is what was run."""

import dataclasses
import inspect
import re
from dataclasses import dataclass, field

from fuzz_helpers import HELPERS

Sizes = dict[str, int]
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Arg:
    """An array argument. Its dims are names, which stand for the sizes of the call, or numbers."""

    name: str
    dims: tuple[str | int, ...]
    dtype: str = "float32"
    value: str = "normal({shape})"
    differentiable: bool = True
    alike: bool = True  # whether the elements of a batch can be drawn at once
    batches: tuple[tuple[int, str], ...] = ()  # (axis, name of the size) of each vmap over it, from the inside
    layout: str = "{x}"

    @property
    def all_dims(self) -> tuple[str | int, ...]:
        dims = list(self.dims)
        for axis, name in self.batches:
            dims.insert(axis, name)
        return tuple(dims)

    def text(self, sizes: Sizes) -> str:
        if self.alike:
            text = self.value.format(shape=shape_of(self.all_dims, sizes))
        else:
            text = self.value.format(shape=shape_of(self.dims, sizes))
            for axis, name in self.batches:
                text = f"mx.stack([{text} for _ in range({sizes[name]})], axis={axis})"
        if self.dtype in FLOATS[1:]:
            text = f"({text}).astype(mx.{self.dtype})"
        return self.layout.format(x=text)


@dataclass(frozen=True)
class Result:
    dims: tuple[str | int, ...]
    dtype: str


@dataclass
class Call:
    """A call of an op: `arguments` are keywords and their text, which names arrays of `args`."""

    op: str
    args: list[Arg]
    arguments: dict[str, str]
    results: list[Result]
    sizes: Sizes
    elastic: tuple[str, ...] = ()  # sizes that shapeless compilation is shown another value of
    tolerance: float = 1e-5
    exact: str = ""  # the definition's text, where it is not the same call of `reference`
    terms: str = ""  # one whose derivatives are as large as the terms that cancel in those of the definition
    floats: str = ""  # what takes the results with derivatives out of all
    ours: str = ""  # the call's text, where it is not that of `op`
    ranks_sums: bool = False  # integer results choose among sums, which float32 may round to the same number
    long_axis: str = ""  # results without it are long sums, in which the definition loses digits that ours must not

    @property
    def keywords(self) -> str:
        return ", ".join(f"{name}={text}" for name, text in self.arguments.items())


@dataclass(frozen=True)
class Transform:
    kind: str
    argnums: tuple[int, ...] = ()
    in_axes: tuple[int | None, ...] = ()
    out_axis: int = 0
    size: int = 2

    @property
    def derivative(self) -> bool:
        return self.kind in DERIVATIVES


DERIVATIVES = ("grad", "vjp", "jvp")
KINDS = (*DERIVATIVES, "vmap", "vmap", "compile", "shapeless", "shapeless", "checkpoint")  # weighted


@dataclass(repr=False)
class Case:
    """An example. `apply` adds transformations, from the call outwards."""

    call: Call
    derivatives: int  # how many there will be: results without derivatives are left out then
    seed: int = 0
    transforms: list[Transform] = field(default_factory=list)
    lines: list[str | list[Arg]] = field(default_factory=list)  # arguments: of a call with other shapes

    def __post_init__(self) -> None:
        self.args, self.results = list(self.call.args), list(self.call.results)
        self.sizes = dict(self.call.sizes)
        self.first_sizes = {name: n + 1 if name in self.call.elastic else n for name, n in self.call.sizes.items()}
        if self.derivatives:
            self.results = [r for r in self.results if r.dtype in FLOATS]

    def apply(self, transform: Transform) -> None:
        kind, level = transform.kind, len(self.transforms)
        self.transforms.append(transform)
        ours = exact = ""
        if kind in DERIVATIVES:
            argnums = transform.argnums
            ours = exact = f"{kind}({{f}}, {argnums})"
            like = [Result(self.args[i].all_dims, self.args[i].dtype) for i in argnums]
            if kind == "vjp":
                ours = exact = f"vjp({{f}}, {argnums}, {len(self.results)})"
                self.args += [Arg(f"cotangent{level}{i}", r.dims, r.dtype) for i, r in enumerate(self.results)]
                self.results = like
            elif kind == "jvp":
                self.args += [Arg(f"tangent{level}{i}", r.dims, r.dtype) for i, r in enumerate(like)]
            else:
                self.results = like
        elif kind == "vmap":
            size = f"batch{level}"
            self.sizes[size], self.first_sizes[size] = transform.size, transform.size + 1
            rank = {i: len(arg.all_dims) for i, arg in enumerate(self.args)}
            for i, axis in enumerate(transform.in_axes):
                if axis is not None:
                    arg, place = self.args[i], axis if axis >= 0 else axis + rank[i] + 1
                    self.args[i] = dataclasses.replace(arg, batches=(*arg.batches, (place, size)))
            self.results = [Result(inserted(r.dims, transform.out_axis, size), r.dtype) for r in self.results]
            axes = f"in_axes={transform.in_axes}, out_axes={transform.out_axis}"
            inner = "distinct({f})" if len(self.results) > 1 else "{f}"
            ours, exact = f"mx.vmap({inner}, {axes})", f"one_by_one({{f}}, {axes})"
        elif kind == "checkpoint":
            some = len(transform.argnums) < len(self.args)
            ours = f"checkpoint({{f}}, {transform.argnums})" if some else "mx.checkpoint({f})"
        else:
            ours = f"mx.compile({{f}}{', shapeless=True' if kind == 'shapeless' else ''})"
        self.lines.append(f"ours = {ours.format(f='ours')}")
        if exact:
            self.lines.append(f"exact = {exact.format(f='exact')}")
        if kind == "shapeless":
            self.lines.append(list(self.args))

    def __repr__(self) -> str:  # hypothesis prints it; the script comes with the failure
        return f"<{self.call.op} {self.kinds}>"

    @property
    def kinds(self) -> str:
        """The transformations in the order in which they are written: the last one applied is the outermost."""
        return " of ".join(t.kind for t in reversed(self.transforms))

    def with_layouts(self, layouts: list[str]) -> None:
        self.args = [dataclasses.replace(arg, layout=x) for arg, x in zip(self.args, layouts, strict=True)]

    # ---- text --------------------------------------------------------------------------------------------------------

    def body(self, seed: int | None = None, *, exact: str = "") -> str:
        """Defines ``ours``, ``exact``, ``arrays`` and ``results``."""
        call = self.call
        names = ", ".join(arg.name for arg in call.args)
        exact = exact or call.exact or f"reference.{call.op}({call.keywords})"
        one = len(call.results) == 1
        taken = call.floats if self.derivatives else ""
        definition = "def {}({}):\n    return " + ("[{}]" if one else f"list({{}}){taken}") + "\n"
        lines = [
            f"rng = np.random.default_rng({self.seed if seed is None else seed})",
            "mx.random.seed(rng.integers(2**31))",
            "",
        ]
        ours = call.ours or f"mlx_anvil.{call.op}({call.keywords})"
        lines += [definition.format("ours", names, ours), definition.format("exact", names, exact)]
        for line in self.lines:
            if isinstance(line, list):
                first = ", ".join(arg.text(self.first_sizes) for arg in line)
                line = f"mx.eval(ours({first}))  # other shapes first"
            lines.append(line)
        lines += [f"{arg.name} = {arg.text(self.sizes)}" for arg in self.args]
        lines += [f"arrays = [{', '.join(arg.name for arg in self.args)}]", "results = ours(*arrays)"]
        return "\n".join(lines) + "\n"

    def script(self, seed: int | None = None) -> str:
        """The script as it is printed."""
        return with_helpers(self.body(seed)) + TAIL


HEAD = """import math

import mlx.core as mx
import numpy as np

import mlx_anvil
from mlx_anvil import reference

"""

TAIL = """
with mx.stream(mx.cpu):
    exactly = exact(*(x.astype(mx.float64) if mx.issubdtype(x.dtype, mx.floating) else x for x in arrays))
    for ours, wanted in zip(results, exactly):
        print("error", mx.abs(ours.astype(mx.float64) - wanted).max(), "of", mx.abs(wanted).max())
"""


SOURCES = {name: inspect.getsource(f) for name, f in HELPERS.items()}


def with_helpers(body: str) -> str:
    """A script that runs by itself."""
    used: dict[str, str] = {}

    def add(text: str) -> None:
        for name in re.findall(r"\w+", text):
            if name in SOURCES and name not in used:
                used[name] = SOURCES[name]
                add(used[name])

    add(body)
    return HEAD + "\n\n".join(used.values()) + "\n\n" + body


def shape_of(dims: tuple[str | int, ...], sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[d] if isinstance(d, str) else d for d in dims)


def inserted(dims: tuple[str | int, ...], axis: int, name: str) -> tuple[str | int, ...]:
    place = axis if axis >= 0 else axis + len(dims) + 1
    return (*dims[:place], name, *dims[place:])
