"""How to draw a call of each op: shapes, dtypes and every option, by the op's name."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
from hypothesis import strategies as st

from fuzz_case import FLOATS, Arg, Call, Result
from mlx_anvil.reference import OPS
from quantized_numpy import FORMATS, Format


@dataclass
class Draw:
    """What generators draw by. The first of a choice is what hypothesis shrinks towards."""

    of: Callable
    derivatives: int  # how many will be taken; two are judged in float32
    small: bool  # sizes of a quick run

    def choice(self, *values):
        return self.of(st.sampled_from(values))

    def maybe(self) -> bool:
        return self.of(st.booleans())

    def one_in(self, n: int) -> bool:
        return self.of(st.integers(0, n - 1)) == n - 1

    def count(self, low: int, high: int) -> int:
        return self.of(st.integers(low, high))

    def size(self, *more: int) -> int:
        large = () if self.small else (97, 128, 257)
        return self.choice(1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, *more, *large)

    def lead(self, most: int = 2) -> dict[str, int]:
        """Leading dims: none, some, now and then an empty one."""
        return {f"d{i}": 0 if self.one_in(20) else self.choice(1, 2, 3, 5) for i in range(self.count(0, most))}

    def dtype(self) -> str:
        return FLOATS[0] if self.derivatives > 1 else self.choice(*FLOATS)

    def other_dtype(self, dtype: str) -> str:
        return self.dtype() if self.one_in(5) else dtype


def promoted(*dtypes: str) -> str:
    return dtypes[0] if len(set(dtypes)) == 1 else "float32"


def silu_gate(draw: Draw) -> Call:
    return _gate(draw, "silu_gate", {})


def gated(draw: Draw) -> Call:
    return _gate(draw, "gated", _activation(draw))


def _activation(draw: Draw) -> dict[str, str]:
    activation = draw.choice("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
    limit = draw.choice(None, None, 0.5, 1.0, 7.0)
    return {"activation": repr(activation), "limit": repr(limit)}


def _gate(draw: Draw, op: str, options: dict[str, str]) -> Call:
    if draw.one_in(25):  # a gradient that is a long sum
        sizes = {"rows": draw.choice(2**17, 2**20 - 3), "columns": draw.count(1, 2)}
        args = [Arg("gate", ("rows", "columns")), Arg("up", draw.choice(("columns",), (1, "columns"), (1, 1)))]
        args[1] = Arg("up", args[1].dims, value="mx.abs(normal({shape}))")
        return Call(
            op,
            args,
            {"gate": "gate", "up": "up", **options},
            [Result(("rows", "columns"), "float32")],
            sizes,
            long_axis="rows",
        )
    sizes = {f"d{i}": 0 if draw.one_in(20) else draw.size() for i in range(draw.count(0, 3))}
    names, args = tuple(sizes), []
    for name in ("gate", "up"):
        dims = tuple(1 if draw.one_in(4) else d for d in names)
        dims = dims[draw.count(0, len(dims)) :] if draw.one_in(4) else dims
        args.append(Arg(name, dims, draw.dtype() if name == "gate" else draw.other_dtype(args[0].dtype)))
    padded = [(1,) * (len(names) - len(arg.dims)) + arg.dims for arg in args]
    longest = max(len(arg.dims) for arg in args)
    dims = tuple(a if a != 1 else b for a, b in zip(*padded, strict=True))[len(names) - longest :]
    if draw.one_in(4):
        args[0] = Arg("gate", args[0].dims, args[0].dtype, value="30 * normal({shape})")
    result = Result(dims, promoted(*(arg.dtype for arg in args)))
    return Call(op, args, {"gate": "gate", "up": "up", **options}, [result], sizes, elastic=names)


def flash_attention(draw: Draw) -> Call:
    kv_heads, dtype = draw.count(1, 3), draw.dtype()
    sizes = {
        "batch": 0 if draw.one_in(30) else draw.count(1, 2),
        "heads": kv_heads * draw.count(1, 3),
        "kv_heads": kv_heads,
        "queries": 0 if draw.one_in(30) else draw.size(37),
        "keys": 0 if draw.one_in(30) else draw.size(37, 70),
        "dim": draw.size(64, 72, 128) if not draw.one_in(30) else 257,
    }
    sizes["value_dim"] = draw.size(64, 72) if draw.one_in(4) else sizes["dim"]
    args = [
        Arg("q", ("batch", "heads", "queries", "dim"), dtype),
        Arg("k", ("batch", "kv_heads", "keys", "dim"), dtype),
        Arg("v", ("batch", "kv_heads", "keys", "value_dim"), dtype),
    ]
    arguments = {arg.name: arg.name for arg in args}
    mask = draw.choice(None, "causal", "bool", "additive", "hidden")
    if mask == "causal":
        arguments["mask"] = "'causal'"
    elif mask:
        dims = tuple(1 if draw.one_in(3) else d for d in ("batch", "heads", "queries", "keys"))[draw.count(0, 4) :]
        value = {"bool": "visible({shape})", "additive": "normal({shape})", "hidden": "some_hidden({shape})"}[mask]
        args.append(Arg("mask", dims, "bool_" if mask == "bool" else dtype, value, differentiable=mask == "additive"))
        arguments["mask"] = "mask"
    if draw.one_in(3):
        args.append(Arg("sinks", ("heads",), dtype))
        arguments["sinks"] = "sinks"
    if draw.one_in(3):
        window = draw.choice(-1, 1, 2, 9, (0, 0), (3, -1), (-1, 2), (40, 9))
        arguments["window_size"] = repr(window)
    if draw.one_in(3):
        arguments["softcap"] = repr(draw.choice(0.0, 3.0, 0.5, 50))
    if draw.one_in(3):
        arguments["scale"] = repr(draw.choice(1.0, 0.3, -0.5, 0.0))
    results = [Result(("batch", "heads", "queries", "value_dim"), dtype)]
    if draw.one_in(4):
        arguments["return_lse"] = "True"
        results.append(Result(("batch", "heads", "queries"), "float32"))
    elastic = ("batch", "queries", "keys")
    call = Call("flash_attention", args, arguments, results, sizes, elastic, tolerance=2e-5)
    call.terms = terms_of_attention(f"reference.flash_attention({call.keywords})", with_lse=len(results) > 1)
    return call


def terms_of_attention(definition: str, *, with_lse: bool) -> str:
    if with_lse:
        return f"(lambda out, lse: not_normalized(out, lse, lse))(*{definition})"
    return f"not_normalized(*{definition[:-1]}, return_lse=True))[0]"


# ---- norms -----------------------------------------------------------------------------------------------------------


def _norm(draw: Draw, name: str, of_columns: tuple[str, ...], of_rows: tuple[str, ...]) -> Call:
    sizes = draw.lead(3)
    sizes["columns"] = draw.size(64, 127, 257)
    if long := draw.one_in(25):  # a weight's gradient that is a long sum
        sizes = {"d0": draw.choice(2**13, 2**16 - 3), "columns": draw.choice(8, 9)}
    rows, dtype = tuple(sizes), draw.dtype()
    args = [Arg("x", rows, dtype, "normal({shape})" if not draw.one_in(5) else "30 + normal({shape})")]
    for role in (*of_columns, *of_rows):
        if draw.maybe():
            dims = ("columns",) if role in of_columns else rows
            args.append(Arg(role, dims, draw.other_dtype(dtype)))
    arguments = {arg.name: arg.name for arg in args}
    if draw.maybe():
        arguments["eps"] = repr(draw.choice(1e-6, 1e-2, 1.0, 0.0))
    if name == "rms_norm" and draw.one_in(3):
        arguments["weight_offset"] = repr(draw.choice(1.0, -0.5, 0))
    result = Result(rows, promoted(*(arg.dtype for arg in args if arg.name not in of_columns)))
    results = [result] * (2 if "residual" in arguments else 1)
    return Call(name, args, arguments, results, sizes, elastic=rows[:-1], long_axis="d0" if long else "")


def rms_norm(draw: Draw) -> Call:
    return _norm(draw, "rms_norm", ("weight",), ("residual", "gate"))


def layer_norm(draw: Draw) -> Call:
    return _norm(draw, "layer_norm", ("weight", "bias"), ("residual",))


# ---- rotary embedding ------------------------------------------------------------------------------------------------

# Beyond 2^33 the angles of the definition in float64 have errors of their own.
_FAR = {
    "int32": (0, 7, -3, 10**6, 2**31 - 40),
    "uint32": (0, 7, 10**6, 2**31 - 2, 2**31 + 5, 2**32 - 40),
    "int64": (0, 7, -3, 10**6, 2**31 - 2, 2**31 + 5, 2**33),
}


def _rope(draw: Draw, name: str, arrays: tuple[str, ...]) -> Call:
    sizes = {"batch": draw.count(1, 3), "length": 0 if draw.one_in(30) else draw.size(33), "dim": draw.size(26, 64) + 1}
    dtype, args, results = draw.dtype(), [], []
    for array in arrays:
        sizes[f"{array}_heads"] = draw.count(1, 3)
        dims = ("batch", f"{array}_heads", "length", "dim")
        args.append(Arg(array, dims, dtype))
        results.append(Result(dims, dtype))
    arguments = {array: array for array in arrays}
    arguments["dims"] = repr(sizes["dim"] // 2 * 2 if draw.maybe() else 2 * draw.count(1, sizes["dim"] // 2))
    if draw.maybe():
        arguments["traditional"] = "True"
    freqs = draw.one_in(3)
    if freqs:
        sizes["pairs"] = int(arguments["dims"]) // 2
        args.append(Arg("freqs", ("pairs",), value="1 + 99 * mx.abs(normal({shape}))"))
        arguments |= {"freqs": "freqs", "base": "None"}
    elif draw.maybe():
        arguments["base"] = repr(draw.choice(500.0, 10, 1e6))
    if draw.one_in(3):
        arguments["scale"] = repr(draw.choice(0.125, 2, -1.0))
    if draw.maybe():  # with freqs no further than their digits reach
        kind = draw.choice("int", "int32", "uint32", "int64")
        offset = draw.choice(*(x for x in _FAR.get(kind, _FAR["int32"]) if not freqs or x <= 10**6))
        if kind == "int":
            arguments["offset"] = repr(offset)
        else:
            value = f"integers({offset}, {offset + 9}, {{shape}}, mx.{kind})"
            args.append(Arg("offset", draw.choice((), ("batch",)), kind, value, differentiable=False))
            arguments["offset"] = "offset"
    elastic = ("batch", *(f"{array}_heads" for array in arrays), "length")
    call = Call(name, args, arguments, results, sizes, elastic)
    if name == "rope_qk":
        options = ", ".join(f"{key}={text}" for key, text in arguments.items() if key not in arrays)
        call.exact = f"({', '.join(f'reference.rope({array}, {options})' for array in arrays)})"
    if freqs:
        call.terms = f"[uneven(y) for y in {call.exact}]" if call.exact else f"uneven(reference.rope({call.keywords}))"
    return call


def rope(draw: Draw) -> Call:
    return _rope(draw, "rope", ("x",))


def rope_qk(draw: Draw) -> Call:
    return _rope(draw, "rope_qk", ("q", "k"))


# ---- quantized matrices ----------------------------------------------------------------------------------------------

_HUGE = {"float32": 3e38, "bfloat16": 3e38, "float16": 6e4}


def _matrix(draw: Draw, format: Format, sizes: dict[str, int], dtype: str, prefix: str = "") -> list[Arg]:
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


def _format(draw: Draw, sizes: dict[str, int], formats: tuple[Format, ...] = FORMATS) -> tuple[Format, dict[str, str]]:
    format = draw.choice(*formats)
    sizes["columns"] = format.group_size * draw.choice(1, 2, 3, 5)
    sizes["outputs"] = draw.size(33, 64, 65)
    return format, {key: repr(value) for key, value in format.options.items()}


def _dtype_of(args: list[Arg]) -> str:
    return promoted(*(arg.dtype for arg in args if arg.dtype in FLOATS))


def quantized_matmul(draw: Draw) -> Call:
    sizes = {"rows": 0 if draw.one_in(20) else draw.size(9, 33)}
    format, options = _format(draw, sizes)
    dtype, gemv = draw.dtype(), sizes["rows"] <= 8 and draw.one_in(3)
    lead: tuple[str, ...] = ()
    if not gemv and draw.one_in(3):
        sizes["experts"] = draw.count(1, 3)
        lead = ("experts",)
    transpose = gemv or not draw.one_in(3)
    of_x, of_result = ("columns", "outputs") if transpose else ("outputs", "columns")
    value = draw.choice(*["normal({shape})"] * 6, "0.001 * normal({shape})", f"huge({{shape}}, {_HUGE[dtype]})")
    args = [Arg("x", (*lead, "rows", of_x), dtype, value), *_matrix(draw, format, sizes, draw.other_dtype(dtype))]
    if lead and draw.maybe():  # one matrix for all
        args[1:] = [Arg(a.name, a.dims[1:], a.dtype, a.value, a.differentiable) for a in args[1:]]
    arguments = {arg.name: arg.name for arg in args} | options
    if not transpose:
        arguments["transpose"] = "False"
    results = [Result((*lead, "rows", of_result), _dtype_of(args))]
    call = Call("quantized_gemv" if gemv else "quantized_matmul", args, arguments, results, sizes, tolerance=5e-5)
    call.exact = f"reference.quantized_matmul({call.keywords})"
    call.elastic = () if gemv else ("rows",)
    return call


def quantized_swiglu(draw: Draw) -> Call:
    sizes = draw.lead()
    rows = tuple(sizes)
    format, options = _format(draw, sizes)
    dtype = draw.dtype()
    args = [Arg("x", (*rows, "columns"), dtype, f"{draw.choice(0.05, 1.0)} * normal({{shape}})")]
    arguments = {"x": "x"}
    scale_dtype = draw.other_dtype(dtype)
    for name in ("gate", "up"):
        matrix = _matrix(draw, format, sizes, scale_dtype, f"{name}_")
        args += matrix
        arguments[name] = f"({', '.join(arg.name for arg in matrix)})"
    gate = {} if draw.maybe() else _activation(draw)
    if gate.get("limit", "None") != "None" or gate.get("activation") == "'swiglu_oai'":
        # A gradient jumps at the limit, on whose other side a rounded product may be.
        args = [replace(arg, differentiable=False) for arg in args]
    options |= gate
    results = [Result((*rows, "outputs"), _dtype_of(args))]
    return Call("quantized_swiglu", args, arguments | options, results, sizes, rows, tolerance=5e-5)


def quantized_embedding(draw: Draw) -> Call:
    sizes = draw.lead()
    of_ids = tuple(sizes)
    format, options = _format(draw, sizes)
    kind = draw.choice("int32", "uint32", "int64", "uint8", "int16")
    low = 0 if kind.startswith("u") else -sizes["outputs"]
    value = f"integers({low}, {sizes['outputs']}, {{shape}}, mx.{kind})"
    matrix = _matrix(draw, format, sizes, draw.dtype())
    args = [Arg("ids", of_ids, kind, value, differentiable=False), *matrix]
    arguments = {arg.name: arg.name for arg in args} | options
    dtype = _dtype_of(matrix) if format.affine else "bfloat16"
    given = ", ".join(f"{key}={text}" for key, text in arguments.items() if key != "ids")
    if draw.one_in(3):
        dtype = draw.dtype()
        arguments["dtype"] = f"mx.{dtype}"
    call = Call("quantized_embedding", args, arguments, [Result((*of_ids, "columns"), dtype)], sizes, of_ids)
    # Of all rows: MLX dequantizes no empty matrix.
    call.exact = f"reference.quantized_matmul(one_hot(ids, {sizes['outputs']}), {given}, transpose=False)"
    return call


def _head(draw: Draw, name: str) -> Call:
    """Rows of the matrix that stand out: rounded logits have the order of exact ones."""
    sizes = draw.lead()
    rows = tuple(sizes)
    format, options = _format(draw, sizes, tuple(f for f in FORMATS if f.affine))
    k = 1 if name == "quantized_argmax" else draw.count(1, min(sizes["outputs"], 8))
    dtype = draw.dtype()
    w, scales, biases = _matrix(draw, format, sizes, dtype)
    args = [
        Arg("x", (*rows, "columns"), dtype, "1 + 0.3 * normal({shape})"),
        w,
        Arg("scales", scales.dims, dtype, f"{0.03 / 2**format.bits} * normal({{shape}})"),
        Arg("biases", biases.dims, biases.dtype, f"levels({{shape}}, {k})", alike=False),
    ]
    arguments = {arg.name: arg.name for arg in args} | options
    arguments |= {"return_values": "True"} if name == "quantized_argmax" else {"k": repr(k)}
    dims = rows if name == "quantized_argmax" else (*rows, k)
    results = [Result(dims, "uint32"), Result(dims, _dtype_of(args))]
    return Call(name, args, arguments, results, sizes, rows, tolerance=5e-5, floats="[1:]")


def quantized_argmax(draw: Draw) -> Call:
    return _head(draw, "quantized_argmax")


def quantized_topk(draw: Draw) -> Call:
    return _head(draw, "quantized_topk")


def softmax_topk(draw: Draw) -> Call:
    sizes = draw.lead(3)
    rows = tuple(sizes)
    sizes["experts"] = draw.size(64, 65, 130) if not draw.one_in(40) else 4097
    k = draw.count(1, min(sizes["experts"], 8)) if not draw.one_in(4) else draw.count(1, sizes["experts"])
    dtype = draw.dtype()
    arguments = {"logits": "logits", "k": repr(k)}
    for option, value in (("norm", False), ("scoring", "sigmoid"), ("sorted", False)):
        if draw.one_in(3):
            arguments[option] = repr(value)
    args = [Arg("logits", (*rows, "experts"), dtype, f"{draw.choice(1, 4)} * normal({{shape}})")]
    results = [Result((*rows, k), dtype), Result((*rows, k), "uint32")]
    return Call("softmax_topk", args, arguments, results, sizes, rows, floats="[:1]")


GENERATORS: dict[str, Callable[[Draw], Call]] = {
    f.__name__: f
    for f in (
        *(silu_gate, gated, flash_attention, rms_norm, layer_norm, rope, rope_qk, softmax_topk),
        *(quantized_matmul, quantized_swiglu, quantized_embedding, quantized_argmax, quantized_topk),
    )
}


def from_registry(draw: Draw, name: str) -> Call:
    """A call that an entry of the registry describes: what an op has before it has a generator."""
    spec = draw.choice(*(spec for spec in OPS.values() if spec.name == name))
    shape = draw.choice(*spec.contract_shapes)
    dtype = draw.dtype()
    inputs = spec.make_inputs(shape, getattr(mx, dtype))
    entry = f"reference.OPS[{spec.id!r}]"
    args = [
        Arg(role, tuple(x.shape), dtype, f"{entry}.make_inputs({shape}, mx.{dtype})[{i}]", alike=False)
        for i, (role, x) in enumerate(zip(spec.arguments, inputs, strict=True))
    ]
    results = [Result(tuple(spec.reference(*inputs).shape), dtype)]
    names = ", ".join(spec.arguments)
    call = Call(name, args, {}, results, {}, tolerance=spec.float32_tolerance)
    call.ours, call.exact = f"{entry}.function({names})", f"{entry}.reference({names})"
    if name == "flash_attention":
        call.terms = terms_of_attention(call.exact, with_lse=False)
    return call


def call_of(draw: Draw, name: str) -> Call:
    generator = GENERATORS.get(name)
    return from_registry(draw, name) if generator is None or draw.one_in(8) else generator(draw)
