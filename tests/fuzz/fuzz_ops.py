"""How to draw a call of each op: shapes, dtypes and every option, by the op's name."""

import math
from collections.abc import Callable

import mlx.core as mx
from fuzz_attention import flash_attention, mla_decode, terms_of_attention
from fuzz_delta import gated_delta, gated_delta_gates, ssd_scan
from fuzz_experts import quantized_experts

from fuzz_case import Arg, Call, Result
from fuzz_choices import Draw, activation_of, promoted
from fuzz_gather import gather_matmul, gather_quantized_matmul
from fuzz_quantized import (
    quantized_argmax,
    quantized_embedding,
    quantized_matmul,
    quantized_swiglu,
    quantized_topk,
)
from mlx_anvil.reference import OPS


def silu_gate(draw: Draw) -> Call:
    return _gate(draw, "silu_gate", {})


def gated(draw: Draw) -> Call:
    return _gate(draw, "gated", activation_of(draw))


def sigmoid_gate(draw: Draw) -> Call:
    return _gate(draw, "sigmoid_gate", {}, ("x", "gate"))


def _gate(draw: Draw, op: str, options: dict[str, str], roles: tuple[str, str] = ("gate", "up")) -> Call:
    first, second = roles
    arguments = {role: role for role in roles} | options
    if draw.one_in(25):  # a gradient that is a long sum
        sizes = {"rows": draw.choice(2**17, 2**20 - 3), "columns": draw.count(1, 2)}
        args = [Arg(first, ("rows", "columns")), Arg(second, draw.choice(("columns",), (1, "columns"), (1, 1)))]
        args[1] = Arg(second, args[1].dims, value="mx.abs(normal({shape}))")
        return Call(
            op,
            args,
            arguments,
            [Result(("rows", "columns"), "float32")],
            sizes,
            long_axis="rows",
        )
    sizes = {f"d{i}": 0 if draw.one_in(20) else draw.size() for i in range(draw.count(0, 3))}
    names, args = tuple(sizes), []
    for name in roles:
        dims = tuple(1 if draw.one_in(4) else d for d in names)
        dims = dims[draw.count(0, len(dims)) :] if draw.one_in(4) else dims
        args.append(Arg(name, dims, draw.dtype() if name == first else draw.other_dtype(args[0].dtype)))
    padded = [(1,) * (len(names) - len(arg.dims)) + arg.dims for arg in args]
    longest = max(len(arg.dims) for arg in args)
    dims = tuple(a if a != 1 else b for a, b in zip(*padded, strict=True))[len(names) - longest :]
    if draw.one_in(4):
        args[0] = Arg(first, args[0].dims, args[0].dtype, value="30 * normal({shape})")
    result = Result(dims, promoted(*(arg.dtype for arg in args)))
    return Call(op, args, arguments, [result], sizes, elastic=names)


# ---- convolutions ----------------------------------------------------------------------------------------------------


def causal_conv1d(draw: Draw) -> Call:
    width = draw.count(2, 8)
    sizes = {"batch": draw.count(1, 3), "length": 0 if draw.one_in(20) else draw.size(33), "channels": draw.size(64)}
    sizes |= {"width": width, "kept": width - 1}
    if long := draw.one_in(25):  # a weight's gradient that is a long sum
        sizes |= {"length": draw.choice(2**13, 2**16 - 3), "channels": draw.choice(1, 3)}
    rows, state, dtype = ("batch", "length", "channels"), ("batch", "kept", "channels"), draw.dtype()
    args = [Arg("x", rows, dtype), Arg("weight", ("channels", "width"), draw.other_dtype(dtype))]
    for name, dims in (("bias", ("channels",)), ("state", state)):
        if draw.maybe():
            args.append(Arg(name, dims, draw.other_dtype(dtype)))
    arguments = {arg.name: arg.name for arg in args}
    result = promoted(*(arg.dtype for arg in args))
    if draw.maybe():
        arguments["activation"] = repr(draw.choice("silu", None))
    if draw.one_in(3):
        value = f"integers(-2, {sizes['length'] + 3}, {{shape}}, mx.{draw.choice('int32', 'int64')})"
        args.append(Arg("lengths", ("batch",), "int32", value, differentiable=False))
        arguments["lengths"] = "lengths"
    results = [Result(rows, result), Result(state, result)]
    return Call("causal_conv1d", args, arguments, results, sizes, ("channels",), long_axis="length" if long else "")


def selective_scan(draw: Draw) -> Call:
    sizes = {"batch": draw.count(1, 3), "steps": 0 if draw.one_in(20) else draw.size(40), "channels": draw.size(70)}
    sizes |= {"states": draw.count(1, 20)}
    rows, states, dtype = ("batch", "steps", "channels"), ("batch", "steps", "states"), draw.dtype()
    state = ("batch", "channels", "states")
    args = [Arg("x", rows, dtype), Arg("dt", rows, draw.other_dtype(dtype), "0.2 * abs(normal({shape}))")]
    args += [Arg("A", ("channels", "states"), draw.other_dtype(dtype), "-abs(normal({shape}))")]
    args += [Arg(name, states, draw.other_dtype(dtype)) for name in "BC"]
    in_rows = [arg.dtype for arg in args if arg.name != "A"]
    for name, dims in (("D", ("channels",)), ("z", rows), ("state", state)):
        if draw.maybe():
            args.append(Arg(name, dims, draw.other_dtype(dtype)))
            in_rows += [args[-1].dtype] if name == "z" else []
    arguments = {arg.name: arg.name for arg in args}
    if draw.maybe():
        arguments["dt_softplus"] = "True"
    if draw.one_in(3):
        value = f"integers(0, {sizes['steps'] + 1}, {{shape}}, mx.{draw.choice('int32', 'int64')})"
        args.append(Arg("lengths", ("batch",), "int32", value, differentiable=False))
        arguments["lengths"] = "lengths"
    results = [Result(rows, promoted(*in_rows)), Result(state, "float32")]
    return Call("selective_scan", args, arguments, results, sizes, ("channels",))


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
    if "gate" in arguments and draw.maybe():
        arguments["gate_activation"] = repr(draw.choice("silu", "sigmoid"))
    result = Result(rows, promoted(*(arg.dtype for arg in args if arg.name not in of_columns)))
    results = [result] * (2 if "residual" in arguments else 1)
    call = Call(name, args, arguments, results, sizes, elastic=rows[:-1], long_axis="d0" if long else "")
    if "residual" in arguments and result.dtype != "float32":
        call.exact = norm_of_rounded_sum(call)
    return call


def norm_of_rounded_sum(call: Call) -> str:
    """The norm of h as returned, as docs/norm.md promises. Rounding h does not count as an error."""
    options = ", ".join(f"{key}={text}" for key, text in call.arguments.items() if key not in ("x", "residual"))
    norm = f"reference.{call.op}(h{options and ', '}{options})"
    return f"(lambda h: ({norm}, h))(rounded(x + residual, mx.{call.results[0].dtype}))"


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


def rope_and_cache(draw: Draw) -> Call:
    sizes = {"batch": draw.count(1, 3), "length": draw.count(0, 3), "dim": draw.size(26, 64) + 1}
    sizes |= {"q_heads": draw.count(1, 4), "kv_heads": draw.count(1, 3), "capacity": sizes["length"] + draw.count(0, 6)}
    dtype = draw.dtype()
    rows, cache = ("batch", "kv_heads", "length", "dim"), ("batch", "kv_heads", "capacity", "dim")
    q = ("batch", "q_heads", "length", "dim")
    args = [Arg("q", q, dtype), Arg("k", rows, dtype), Arg("v", rows, dtype)]
    args += [Arg("k_cache", cache, dtype), Arg("v_cache", cache, dtype)]
    arguments = {arg.name: arg.name for arg in args}
    arguments["dims"] = repr(2 * draw.count(1, sizes["dim"] // 2))
    arguments["offset"] = repr(draw.count(0, sizes["capacity"] - sizes["length"]))
    if draw.maybe():
        arguments["traditional"] = "True"
    results = [Result(q, dtype), Result(cache, dtype), Result(cache, dtype)]
    return Call("rope_and_cache", args, arguments, results, sizes, ("batch", "q_heads"))


def kv_append(draw: Draw) -> Call:
    sizes = {"batch": draw.count(1, 3), "length": draw.count(0, 3), "dim": draw.size(26, 64) + 1}
    sizes |= {"heads": draw.count(1, 3), "capacity": sizes["length"] + draw.count(1, 6)}
    dtype = draw.dtype()
    rows, cache = ("batch", "heads", "length", "dim"), ("batch", "heads", "capacity", "dim")
    args = [Arg("cache_k", cache, dtype), Arg("cache_v", cache, dtype), Arg("k", rows, dtype), Arg("v", rows, dtype)]
    arguments = {arg.name: arg.name for arg in args}
    arguments["offset"] = repr(draw.count(0, sizes["capacity"] - sizes["length"]))
    if draw.maybe():
        arguments["rope"] = repr({"dims": 2 * draw.count(1, sizes["dim"] // 2), "traditional": draw.maybe()})
    return Call("kv_append", args, arguments, [Result(cache, dtype), Result(cache, dtype)], sizes, ("batch",))


# ---- routers ---------------------------------------------------------------------------------------------------------


def softmax_topk(draw: Draw) -> Call:
    sizes = draw.lead(3)
    rows = tuple(sizes)
    sizes["experts"] = draw.size(64, 65, 130) if not draw.one_in(40) else 4097
    k = draw.count(1, min(sizes["experts"], 8)) if not draw.one_in(4) else draw.count(1, sizes["experts"])
    dtype = draw.dtype()
    arguments = {"logits": "logits", "k": repr(k)}
    scoring = draw.choice("sigmoid", "sqrtsoftplus")
    for option, value in (("norm", False), ("scoring", scoring), ("sorted", False), ("routed_scaling_factor", 2.5)):
        if draw.one_in(3):
            arguments[option] = repr(value)
    args = [Arg("logits", (*rows, "experts"), dtype, f"{draw.choice(1, 4)} * normal({{shape}})")]
    if draw.one_in(3):
        arguments["e_score_correction_bias"] = "bias"
        args.append(Arg("bias", ("experts",), draw.other_dtype(dtype), "normal({shape})"))
    groups = [n for n in range(2, sizes["experts"] // 2 + 1) if sizes["experts"] % n == 0]
    if groups and draw.one_in(2):
        n = draw.choice(*groups)
        kept = draw.count(-(-k * n // sizes["experts"]), n)
        arguments |= {"n_group": repr(n), "topk_group": repr(kept), "group_scoring": repr(draw.choice("top2", "max"))}
        arguments["masked_score"] = draw.choice("None", "0.0")
    results = [Result((*rows, k), dtype), Result((*rows, k), "uint32")]
    ranks_sums = len(args) == 2 or arguments.get("group_scoring") == "'top2'"
    return Call("softmax_topk", args, arguments, results, sizes, rows, floats="[:1]", ranks_sums=ranks_sums)


# ---- experts ---------------------------------------------------------------------------------------------------------


def _tokens(draw: Draw) -> tuple[dict[str, int], int]:
    """Axes of tokens, and how many there are. Some calls have more pairs than are sorted at once."""
    sizes = draw.lead(3) if not draw.one_in(8) else {"d0": draw.choice(300, 641)}
    return sizes, math.prod(sizes.values())


def moe_permute(draw: Draw) -> Call:
    sizes, tokens = _tokens(draw)
    rows = tuple(sizes)
    k, experts, dtype = draw.count(0, 8), draw.choice(1, 2, 5, 8, 64, 129, 300), draw.dtype()
    sizes |= {"columns": 0 if draw.one_in(30) else draw.size(64), "k": k, "pairs": tokens * k}
    kind = draw.choice("int32", "uint32", "int64", "uint8", "int16")
    low = 0 if kind.startswith("u") else -experts
    most = min(experts, 256) if kind == "uint8" else experts
    ids = Arg("ids", (*rows, "k"), kind, f"integers({low}, {most}, {{shape}}, mx.{kind})", differentiable=False)
    arguments = {"x": "x", "ids": "ids", "num_experts": repr(experts)}
    results = [Result(("pairs", "columns"), dtype), Result((experts + 1,), "int32"), Result(("pairs",), "int32")]
    results.append(Result((*rows, "k"), "int32"))
    args = [Arg("x", (*rows, "columns"), dtype), ids]
    return Call("moe_permute", args, arguments, results, sizes, ("columns",), floats="[:1]")


def moe_combine(draw: Draw) -> Call:
    sizes, tokens = _tokens(draw)
    rows = tuple(sizes)
    k, dtype = draw.count(0, 9), draw.dtype()
    sizes |= {"columns": 0 if draw.one_in(30) else draw.size(64, 127), "k": k, "pairs": tokens * k}
    of_rows, of_pairs = (*rows, "columns"), (*rows, "k")
    args = [Arg("y", ("pairs", "columns"), dtype)]
    arguments = {"y": "y", "weights": "None", "inverse": "inverse"}
    if weighted := not draw.one_in(4):
        args.append(Arg("weights", of_pairs, draw.other_dtype(dtype)))
        arguments["weights"] = "weights"
    places = of_pairs if not weighted or draw.maybe() else ("pairs",)
    args.append(Arg("inverse", places, "int32", "permutation({shape})", differentiable=False, alike=False))
    for name, dims in (("residual", of_rows), ("shared", of_rows), ("shared_gate", (*rows, 1))):
        if draw.maybe() and (name != "shared_gate" or "shared" in arguments):
            args.append(Arg(name, dims, draw.other_dtype(dtype)))
            arguments[name] = name
    result = promoted(*(arg.dtype for arg in args if arg.name in ("y", "residual", "shared")))
    return Call("moe_combine", args, arguments, [Result(of_rows, result)], sizes, ("columns",))


GENERATORS: dict[str, Callable[[Draw], Call]] = {
    f.__name__: f
    for f in (
        *(
            silu_gate,
            gated,
            sigmoid_gate,
            causal_conv1d,
            selective_scan,
            flash_attention,
            mla_decode,
            rms_norm,
            layer_norm,
            rope,
            rope_qk,
            rope_and_cache,
            kv_append,
            softmax_topk,
        ),
        *(moe_permute, moe_combine, gated_delta, gated_delta_gates, ssd_scan),
        *(quantized_matmul, quantized_swiglu, quantized_experts, quantized_embedding, quantized_argmax, quantized_topk),
        *(gather_quantized_matmul, gather_matmul),
    )
}


def from_registry(draw: Draw, name: str) -> Call:
    """A call from a registry entry, for an op that has no generator yet."""
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
    if name in ("flash_attention", "mla_decode"):
        call.terms = terms_of_attention(call.exact, with_lse=False)
    return call


def call_of(draw: Draw, name: str) -> Call:
    generator = GENERATORS.get(name)
    return from_registry(draw, name) if generator is None or draw.one_in(8) else generator(draw)
