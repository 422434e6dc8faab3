"""How to draw a call of gated_delta and of gated_delta_gates (fuzz_ops.py)."""

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
    if draw.maybe():
        lengths = f"integers(0, {sizes['steps'] + 1}, {{shape}}, mx.int32)"
        args.append(Arg("lengths", ("batch",), "int32", lengths, differentiable=False))
        arguments["lengths"] = "lengths"
    results = [Result((*of_gates, "dim"), dtype), Result(state, "float32")]
    if draw.maybe():
        positions = [draw.count(0, sizes["steps"] - 1) for _ in range(draw.count(1, 3))]
        arguments["return_states"] = repr(positions)
        results.append(Result(("batch", len(positions), *state[1:]), "float32"))
    if draw.maybe() and sizes["key_dim"] >= 8:  # a normalised number alone has no gradient
        arguments["normalize_eps"] = "1e-3"
    return Call("gated_delta", args, arguments, results, sizes)


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
