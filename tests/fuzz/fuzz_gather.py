"""How to draw a call of each op of gathered matrices."""

from fuzz_case import Arg, Call, Result
from fuzz_choices import Draw, promoted
from fuzz_quantized import dtype_of, format_of, matrix_of


def _ids(draw: Draw, sizes: dict[str, int], given: bool) -> tuple[list[Arg], tuple[str | int, ...]]:
    """Ids of tokens (if ``given``) and of experts, and the leading dims of x."""
    sizes |= {"tokens": 0 if draw.one_in(20) else draw.size(33, 64), "chosen": draw.count(1, 4)}
    sizes |= {"lefts": draw.count(1, 5), "rows": draw.choice(1, 1, 1, 2, 9)}
    names = {"rhs_indices": "experts"} | ({"lhs_indices": "lefts"} if given else {})
    kind = draw.choice("int32", "uint32", "int64", "uint8")
    args = []
    for name, of in names.items():
        low = 0 if kind.startswith("u") else -sizes[of]
        value = f"integers({low}, {sizes[of]}, {{shape}}, mx.{kind})"
        args.append(Arg(name, ("tokens", "chosen"), kind, value, differentiable=False))
    return args, ("lefts",) if given else ("tokens", 1)


def gather_quantized_matmul(draw: Draw) -> Call:
    sizes = {"experts": draw.count(1, 6)}
    format, options = format_of(draw, sizes)
    given, transpose = draw.one_in(3), not draw.one_in(3)
    ids, lead = _ids(draw, sizes, given)
    of_x, of_result = ("columns", "outputs") if transpose else ("outputs", "columns")
    dtype = draw.dtype()
    args = [Arg("x", (*lead, "rows", of_x), dtype), *matrix_of(draw, format, sizes, draw.other_dtype(dtype)), *ids]
    arguments = {arg.name: arg.name for arg in args} | options
    arguments["transpose"] = repr(transpose)
    result = Result(("tokens", "chosen", "rows", of_result), dtype_of(args))
    call = Call("gather_quantized_matmul", args, arguments, [result], sizes, tolerance=5e-5)
    call.elastic = ("rows",) if given else ("rows", "tokens")
    biases = "biases" if format.affine else "None"
    weights = (
        f"reference._quantized.dequantized(w, scales, {biases}, {format.group_size}, {format.bits}, {format.mode!r})"
    )
    weights += "" if format.affine else ".astype(x.dtype)"
    right = f"chosen({weights}, rhs_indices)" + (".swapaxes(-1, -2)" if transpose else "")
    call.exact = f"{_left('x', given)} @ {right}"
    return call


def _left(x: str, given: bool) -> str:
    return f"chosen({x}, lhs_indices)" if given else x


def gather_matmul(draw: Draw) -> Call:
    sizes = {"experts": draw.count(1, 6), "columns": draw.size(), "outputs": draw.size()}
    given = draw.one_in(3)
    ids, lead = _ids(draw, sizes, given)
    dtype = draw.dtype()
    args = [
        Arg("a", (*lead, "rows", "columns"), dtype),
        Arg("b", ("experts", "columns", "outputs"), draw.other_dtype(dtype)),
        *ids,
    ]
    result = Result(("tokens", "chosen", "rows", "outputs"), promoted(args[0].dtype, args[1].dtype))
    call = Call("gather_matmul", args, {arg.name: arg.name for arg in args}, [result], sizes)
    call.elastic = ("rows", "outputs") if given else ("rows", "tokens", "outputs")
    call.exact = f"{_left('a', given)} @ chosen(b, rhs_indices)"
    return call
