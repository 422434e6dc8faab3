"""How to draw a call of gated_delta, of gated_delta_gates and of ssd_scan (fuzz_ops.py)."""

from fuzz_case import Arg, Call, Result
from fuzz_choices import Draw


def gated_delta(draw: Draw) -> Call:
    """Keys of length 1 and rates and decays up to 1, with which states do not grow."""
    sizes = {"batch": draw.count(0, 2), "steps": draw.count(1, 4), "key_heads": draw.count(1, 2)}
    sizes |= {"heads": sizes["key_heads"] * draw.count(1, 2), "key_dim": draw.count(1, 34), "dim": draw.count(1, 20)}
    dtype, per_channel = draw.dtype(), draw.maybe()
    of_gates = ("batch", "steps", "heads")
    keys, unit = ("batch", "steps", "key_heads", "key_dim"), f"normal({{shape}}) / {sizes['key_dim']} ** 0.5"
    gates = draw.choice("float32", dtype)
    args = [Arg(name, keys, dtype, unit) for name in ("q", "k")]
    args.append(Arg("v", (*of_gates, "dim"), dtype))
    args.append(
        Arg("g", (*of_gates, "key_dim") if per_channel else of_gates, gates, "mx.random.uniform(0.6, 1.0, {shape})")
    )
    args.append(Arg("beta", of_gates, gates, "mx.random.uniform(0.1, 1.0, {shape})"))
    state = ("batch", "heads", "dim", "key_dim")
    if draw.maybe():
        args.append(Arg("state", state))
    arguments = {arg.name: arg.name for arg in args}
    results = [Result((*of_gates, "dim"), dtype), Result(state, "float32")]
    _padding_and_states(draw, sizes["steps"], args, arguments, results)
    if draw.maybe() and sizes["key_dim"] >= 8:  # a normalised number alone has no gradient
        arguments["normalize_eps"] = "1e-3"
    return Call("gated_delta", args, arguments, results, sizes)


def _padding_and_states(
    draw: Draw, steps: int, args: list[Arg], arguments: dict[str, str], results: list[Result]
) -> None:
    """Adds lengths and return_states to some calls. The last result is the state."""
    if draw.maybe():
        lengths = f"integers(0, {steps + 1}, {{shape}}, mx.int32)"
        args.append(Arg("lengths", ("batch",), "int32", lengths, differentiable=False))
        arguments["lengths"] = "lengths"
    if draw.maybe():
        positions = [draw.count(0, steps - 1) for _ in range(draw.count(1, 3))]
        arguments["return_states"] = repr(positions)
        results.append(Result(("batch", len(positions), *results[-1].dims[1:]), "float32"))


def ssd_scan(draw: Draw) -> Call:
    """Steps and decays with which states grow slowly."""
    sizes = {"batch": draw.count(0, 2), "steps": draw.count(1, 4), "groups": draw.count(1, 2)}
    sizes |= {"heads": sizes["groups"] * draw.count(1, 3), "states": draw.count(1, 34), "dim": draw.count(1, 20)}
    dtype, rows, of_keys = draw.dtype(), ("batch", "steps", "heads", "dim"), ("batch", "steps", "groups", "states")
    args = [
        Arg("x", rows, dtype),
        Arg("dt", rows[:3], draw.other_dtype(dtype), "mx.random.uniform(0.05, 1.0, {shape})"),
    ]
    args.append(Arg("A", ("heads",), draw.other_dtype(dtype), "-mx.random.uniform(0.1, 1.0, {shape})"))
    args += [Arg(name, of_keys, draw.other_dtype(dtype)) for name in "BC"]
    state = ("batch", "heads", "dim", "states")
    for name, dims in (("D", ("heads",)), ("z", rows), ("state", state), ("dt_bias", ("heads",))):
        if draw.maybe():
            args.append(Arg(name, dims, draw.other_dtype(dtype)))
    arguments = {arg.name: arg.name for arg in args}
    if draw.maybe():
        arguments["dt_softplus"] = "True"
    if draw.maybe():
        arguments["dt_limit"] = "(0.001, 100.0)"
    results = [Result(rows, dtype), Result(state, "float32")]
    _padding_and_states(draw, sizes["steps"], args, arguments, results)
    return Call("ssd_scan", args, arguments, results, sizes)


def gated_delta_gates(draw: Draw) -> Call:
    sizes = {f"d{i}": draw.count(0, 3) for i in range(draw.count(0, 2))}
    lead = tuple(sizes)
    sizes |= {"heads": draw.count(1, 9), "channels": draw.count(1, 20)}
    dtype, per_channel = draw.dtype(), draw.maybe()
    heads = ("heads", "channels") if per_channel else ("heads",)
    weights = draw.choice("float32", dtype)
    args = [Arg("a", (*lead, *heads), dtype), Arg("b", (*lead, "heads"), draw.other_dtype(dtype))]
    args += [Arg("A_log", ("heads",), weights, "0.5 * normal({shape})"), Arg("dt_bias", heads, weights)]
    arguments = {arg.name: arg.name for arg in args}
    if draw.maybe():
        arguments["lower_bound"] = "-5.0"
    if draw.maybe():
        arguments["allow_neg_eigval"] = "True"
    results = [Result((*lead, *heads), "float32"), Result((*lead, "heads"), "float32")]
    return Call("gated_delta_gates", args, arguments, results, sizes)
