"""How to draw a call of each op of quantized matrices."""

from dataclasses import replace

from fuzz_case import FLOATS, Arg, Call, Result
from fuzz_choices import Draw, activation_of, promoted
from quantized_numpy import FORMATS, Format

_HUGE = {"float32": 3e38, "bfloat16": 3e38, "float16": 6e4}


def matrix_of(draw: Draw, format: Format, sizes: dict[str, int], dtype: str, prefix: str = "") -> list[Arg]:
    lead = ("experts",) if "experts" in sizes else ()
    sizes |= {"words": sizes["columns"] * format.bits // 32, "groups": sizes["columns"] // format.group_size}
    keep = ", 0xBFBFBFBF" if format.mode == "mxfp8" else ""
    w = Arg(f"{prefix}w", (*lead, "outputs", "words"), "uint32", f"codes({{shape}}{keep})", differentiable=False)
    per_group = (*lead, "outputs", "groups")
    if not format.affine:
        low, high = (0x20, 0x38) if format.mode == "nvfp4" else (117, 121) if format.bits == 8 else (122, 128)
        value = f"integers({low}, {high}, {{shape}}, mx.uint8)"
        return [w, Arg(f"{prefix}scales", per_group, "uint8", value, differentiable=False)]
    scales = Arg(f"{prefix}scales", per_group, dtype, f"{2 / 2**format.bits} * normal({{shape}})")
    return [w, scales, Arg(f"{prefix}biases", per_group, draw.other_dtype(dtype))]


def format_of(
    draw: Draw, sizes: dict[str, int], formats: tuple[Format, ...] = FORMATS
) -> tuple[Format, dict[str, str]]:
    format = draw.choice(*formats)
    sizes["columns"] = format.group_size * draw.choice(1, 2, 3, 5)
    sizes["outputs"] = draw.size(33, 64, 65)
    return format, {key: repr(value) for key, value in format.options.items()}


def dtype_of(args: list[Arg]) -> str:
    return promoted(*(arg.dtype for arg in args if arg.dtype in FLOATS))


def quantized_kv(draw: Draw, sizes: dict[str, int], dtype: str) -> tuple[list[Arg], dict[str, str]]:
    """Keys and values of attention, and its arguments. Affine ones may have two numbers of bits."""
    of_k = draw.choice(*FORMATS)
    of_v = replace(of_k, bits=draw.choice(2, 3, 4, 5, 6, 8)) if of_k.affine and draw.one_in(3) else of_k
    args, arguments = [], {}
    for name, dim, format in (("k", "dim", of_k), ("v", "value_dim", of_v)):
        sizes[dim] = format.group_size * draw.choice(1, 1, 2)
        sizes |= {f"{name}_words": sizes[dim] * format.bits // 32, f"{name}_groups": sizes[dim] // format.group_size}
        parts = matrix_of(draw, format, {"columns": sizes[dim], "outputs": 0}, dtype, f"{name}_")
        lead, last = ("batch", "kv_heads", "keys"), {"words": f"{name}_words", "groups": f"{name}_groups"}
        parts = [replace(arg, dims=(*lead, last[arg.dims[-1]])) for arg in parts]
        parts[2:] = [replace(arg, dtype=dtype) for arg in parts[2:]]
        args += parts
        arguments[name] = f"({', '.join(arg.name for arg in parts)})"
    bits = of_k.bits if of_k == of_v else (of_k.bits, of_v.bits)
    options = {"kv_group_size": of_k.group_size, "kv_bits": bits, "kv_mode": of_k.mode}
    return args, arguments | {key: repr(value) for key, value in options.items()}


def quantized_matmul(draw: Draw) -> Call:
    sizes = {"rows": 0 if draw.one_in(20) else draw.size(9, 33)}
    format, options = format_of(draw, sizes)
    dtype, gemv = draw.dtype(), sizes["rows"] <= 8 and draw.one_in(3)
    lead: tuple[str, ...] = ()
    if not gemv and draw.one_in(3):
        sizes["experts"] = draw.count(1, 3)
        lead = ("experts",)
    transpose = gemv or not draw.one_in(3)
    of_x, of_result = ("columns", "outputs") if transpose else ("outputs", "columns")
    value = draw.choice(*["normal({shape})"] * 6, "0.001 * normal({shape})", f"huge({{shape}}, {_HUGE[dtype]})")
    args = [Arg("x", (*lead, "rows", of_x), dtype, value), *matrix_of(draw, format, sizes, draw.other_dtype(dtype))]
    if lead and draw.maybe():  # one matrix for all
        args[1:] = [Arg(a.name, a.dims[1:], a.dtype, a.value, a.differentiable) for a in args[1:]]
    arguments = {arg.name: arg.name for arg in args} | options
    if not transpose:
        arguments["transpose"] = "False"
    results = [Result((*lead, "rows", of_result), dtype_of(args))]
    call = Call("quantized_gemv" if gemv else "quantized_matmul", args, arguments, results, sizes, tolerance=5e-5)
    call.exact = f"reference.quantized_matmul({call.keywords})"
    if "huge" in value and dtype == "float16":  # results near the rounded element do not fit, others show by how much
        call.terms = terms_of_outliers(call)
    call.elastic = () if gemv else ("rows",)
    return call


def terms_of_outliers(call: Call) -> str:
    keywords = ", ".join(f"{key}={text}" for key, text in call.arguments.items() if key != "x")
    return f"reference.quantized_matmul(all_as_largest(x), {keywords})"


def quantized_swiglu(draw: Draw) -> Call:
    sizes = draw.lead()
    rows = tuple(sizes)
    format, options = format_of(draw, sizes)
    dtype = draw.dtype()
    args = [Arg("x", (*rows, "columns"), dtype, f"{draw.choice(0.05, 1.0)} * normal({{shape}})")]
    arguments = {"x": "x"}
    scale_dtype = draw.other_dtype(dtype)
    for name in ("gate", "up"):
        matrix = matrix_of(draw, format, sizes, scale_dtype, f"{name}_")
        args += matrix
        arguments[name] = f"({', '.join(arg.name for arg in matrix)})"
    gate = {} if draw.maybe() else activation_of(draw)
    if gate.get("limit", "None") != "None" or gate.get("activation") == "'swiglu_oai'":
        # A gradient jumps at the limit, on whose other side a rounded product may be.
        args = [replace(arg, differentiable=False) for arg in args]
    options |= gate
    results = [Result((*rows, "outputs"), dtype_of(args))]
    return Call("quantized_swiglu", args, arguments | options, results, sizes, rows, tolerance=5e-5)


def quantized_embedding(draw: Draw) -> Call:
    sizes = draw.lead()
    of_ids = tuple(sizes)
    format, options = format_of(draw, sizes)
    kind = draw.choice("int32", "uint32", "int64", "uint8", "int16")
    low = 0 if kind.startswith("u") else -sizes["outputs"]
    value = f"integers({low}, {sizes['outputs']}, {{shape}}, mx.{kind})"
    matrix = matrix_of(draw, format, sizes, draw.dtype())
    args = [Arg("ids", of_ids, kind, value, differentiable=False), *matrix]
    arguments = {arg.name: arg.name for arg in args} | options
    dtype = dtype_of(matrix) if format.affine else "bfloat16"
    given = ", ".join(f"{key}={text}" for key, text in arguments.items() if key != "ids")
    if draw.one_in(3):
        dtype = draw.dtype()
        arguments["dtype"] = f"mx.{dtype}"
    call = Call("quantized_embedding", args, arguments, [Result((*of_ids, "columns"), dtype)], sizes, of_ids)
    # Of all rows: MLX dequantizes no empty matrix.
    call.exact = f"reference.quantized_matmul(one_hot(ids, {sizes['outputs']}), {given}, transpose=False)"
    return call


def _head(draw: Draw, name: str) -> Call:
    """Rows of the matrix that differ clearly, so that rounded logits have the order of exact ones."""
    sizes = draw.lead()
    rows = tuple(sizes)
    format, options = format_of(draw, sizes, tuple(f for f in FORMATS if f.affine))
    k = 1 if name == "quantized_argmax" else draw.count(1, min(sizes["outputs"], 8))
    dtype = draw.dtype()
    w, scales, biases = matrix_of(draw, format, sizes, dtype)
    args = [
        Arg("x", (*rows, "columns"), dtype, "1 + 0.3 * normal({shape})"),
        w,
        Arg("scales", scales.dims, dtype, f"{0.03 / 2**format.bits} * normal({{shape}})"),
        Arg("biases", biases.dims, biases.dtype, f"levels({{shape}}, {k})", alike=False),
    ]
    arguments = {arg.name: arg.name for arg in args} | options
    arguments |= {"return_values": "True"} if name == "quantized_argmax" else {"k": repr(k)}
    dims = rows if name == "quantized_argmax" else (*rows, k)
    results = [Result(dims, "uint32"), Result(dims, dtype_of(args))]
    return Call(name, args, arguments, results, sizes, rows, tolerance=5e-5, floats="[1:]")


def quantized_argmax(draw: Draw) -> Call:
    return _head(draw, "quantized_argmax")


def quantized_topk(draw: Draw) -> Call:
    return _head(draw, "quantized_topk")
