"""Random calls of attention, of latents too."""

from fuzz_case import Arg, Call, Result
from fuzz_choices import Draw
from fuzz_quantized import quantized_kv

_PARTS_OF_Q = (("nope", "rank"), ("rope", "rope"))


def _mask_and_sinks(draw: Draw, args: list[Arg], arguments: dict[str, str], dtype: str) -> None:
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
    if draw.one_in(3):
        args[1:], of_kv = quantized_kv(draw, sizes, dtype)
        arguments |= of_kv
    _mask_and_sinks(draw, args, arguments, dtype)
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
    if draw.one_in(4):
        for name, longest in (("lengths", "keys"), ("q_lengths", "queries")):
            if draw.maybe():
                value = f"integers(0, {sizes[longest] + 1}, {{shape}}, mx.int32)"
                args.append(Arg(name, ("batch",), "int32", value, differentiable=False))
                arguments[name] = name
                elastic = ("batch",)  # lengths are not larger
    call = Call("flash_attention", args, arguments, results, sizes, elastic, tolerance=2e-5)
    call.exact = f"reference.flash_attention({call.keywords})"
    if sizes["queries"] == 0 or sizes["keys"] == 0:
        call.exact = f"attention_without_pairs({call.keywords})"
    call.terms = terms_of_attention(call.exact, with_lse=len(results) > 1)
    return call


def mla_decode(draw: Draw) -> Call:
    dtype = draw.dtype()
    sizes = {
        "batch": 0 if draw.one_in(30) else draw.count(1, 2),
        "heads": draw.size(5, 17),
        "queries": draw.size(3, 9),
        "keys": draw.size(37, 70, 300),
        "rank": draw.size(64, 72, 128) if not draw.one_in(30) else 513,
        "rope": draw.size(8, 64),
    }
    args = [Arg(f"q_{part}", ("batch", "heads", "queries", dim), dtype) for part, dim in _PARTS_OF_Q]
    args += [Arg(name, ("batch", "one", "keys", dim), dtype) for name, dim in (("latent", "rank"), ("k_rope", "rope"))]
    arguments = {arg.name: arg.name for arg in args} | {"scale": repr(draw.choice(0.1, 0.3, -0.2, 0.0))}
    sizes["one"] = 1
    _mask_and_sinks(draw, args, arguments, dtype)
    if draw.one_in(3):
        arguments["softcap"] = repr(draw.choice(0.0, 3.0, 0.5, 50))
    results = [Result(("batch", "heads", "queries", "rank"), dtype)]
    if draw.one_in(4):
        arguments["return_lse"] = "True"
        results.append(Result(("batch", "heads", "queries"), "float32"))
    call = Call("mla_decode", args, arguments, results, sizes, ("batch", "queries", "keys"), tolerance=2e-5)
    call.exact = f"reference.mla_decode({call.keywords})"
    call.terms = terms_of_attention(call.exact, with_lse=len(results) > 1)
    return call


def terms_of_attention(definition: str, *, with_lse: bool) -> str:
    if with_lse:
        return f"(lambda out, lse: not_normalized(out, lse, lse))(*{definition})"
    return f"not_normalized(*{definition[:-1]}, return_lse=True))[0]"
