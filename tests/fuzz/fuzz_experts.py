"""How to draw a call of quantized_experts."""

from dataclasses import replace

from fuzz_case import Arg, Call, Result
from fuzz_choices import Draw, activation_of
from fuzz_quantized import dtype_of, format_of, matrix_of


def quantized_experts(draw: Draw) -> Call:
    sizes = draw.lead()
    rows = tuple(sizes)
    if draw.one_in(3):  # enough pairs to be sorted on a GPU
        sizes["tokens"] = draw.count(33, 70)
        rows = (*rows, "tokens")
    format, options = format_of(draw, sizes)
    sizes |= {"dims": sizes.pop("columns"), "experts": draw.count(1, 9), "hidden": format.group_size * draw.count(1, 3)}
    sizes["k"] = draw.count(1, sizes["experts"])
    dtype, scale_dtype = draw.dtype(), draw.other_dtype("float32")
    shapes = {"gate": ("hidden", "dims"), "up": ("hidden", "dims"), "down": ("outputs", "hidden")}
    kind = draw.choice("int32", "uint32", "int64", "uint8", "int16")
    low = 0 if kind.startswith("u") else -sizes["experts"]
    ids = f"integers({low}, {sizes['experts']}, {{shape}}, mx.{kind})"
    args = [
        Arg("x", (*rows, "dims"), dtype, f"{draw.choice(0.05, 1.0)} * normal({{shape}})"),
        Arg("ids", (*rows, "k"), kind, ids, differentiable=False),
    ]
    arguments = {"x": "x", "ids": "ids", "weights": "None"}
    if not draw.one_in(4):
        args.append(Arg("weights", (*rows, "k"), draw.other_dtype(dtype), "mx.abs(normal({shape}))"))
        arguments["weights"] = "weights"
    for name, (outputs, columns) in shapes.items():
        own = {"columns": sizes[columns], "outputs": sizes[outputs], "experts": sizes["experts"]}
        matrix = [_of_expert(arg, name, outputs) for arg in matrix_of(draw, format, own, scale_dtype, f"{name}_")]
        sizes |= {f"{name}_words": own["words"], f"{name}_groups": own["groups"]}
        args += matrix
        arguments[name] = f"({', '.join(arg.name for arg in matrix)})"
    if arguments["weights"] != "None":
        args += _terms(draw, rows, dtype, arguments)
    gate = {} if draw.maybe() else activation_of(draw)
    if gate.get("limit", "None") != "None" or gate.get("activation") == "'swiglu_oai'":
        # A gradient jumps at the limit, on whose other side a rounded product may be.
        args = [replace(arg, differentiable=False) for arg in args]
    with_sum = arguments["weights"] != "None"
    result = Result(
        (*rows, "outputs") if with_sum else (*rows, "k", "outputs"), dtype_of([args[0], *args[2 + with_sum :]])
    )
    return Call("quantized_experts", args, arguments | options | gate, [result], sizes, rows, tolerance=5e-5)


def _terms(draw: Draw, rows: tuple[str, ...], dtype: str, arguments: dict[str, str]) -> list[Arg]:
    """What is added to the sum, in the dtype of x."""
    names = draw.choice((), (), ("residual",), ("shared",), ("shared", "shared_gate"))
    arguments.update({name: name for name in names})
    return [Arg(name, (*rows, 1 if name == "shared_gate" else "outputs"), dtype, "normal({shape})") for name in names]


def _of_expert(arg: Arg, name: str, outputs: str) -> Arg:
    names = {"outputs": outputs, "words": f"{name}_words", "groups": f"{name}_groups"}
    return replace(arg, dims=tuple(names.get(dim, dim) for dim in arg.dims))
