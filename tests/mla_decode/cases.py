"""Problems for mla_decode's tests. The formulas are those of attention over keys of two parts joined."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_anvil import mla_decode
from support import GRADIENT_FACTOR, assert_same_bits
from tests.flash_attention.cases import OUTPUT_FACTOR, assert_close
from tests.flash_attention.formulas import ROUNDING, Attention, attention

FEATURES = ("none", "causal", "softcap", "bool mask", "additive mask", "sinks")
ARRAYS = ("q_nope", "q_rope", "latent", "k_rope")


@dataclass
class Case:
    q_nope: mx.array
    q_rope: mx.array
    latent: mx.array
    k_rope: mx.array
    d_out: mx.array
    options: dict[str, Any]

    @property
    def arrays(self) -> list[mx.array]:
        return [getattr(self, name) for name in ARRAYS]

    @property
    def differentiable(self) -> dict[str, mx.array]:
        """Every array that has a gradient."""
        optional = {name: self.options.get(name) for name in ("mask", "sinks")}
        given = {name: x for name, x in optional.items() if isinstance(x, mx.array) and x.dtype != mx.bool_}
        return dict(zip(ARRAYS, self.arrays, strict=True)) | given

    def attend(self, **more: Any) -> mx.array | tuple[mx.array, mx.array]:
        return mla_decode(*self.arrays, **self.options, **more)

    def reference(self, **more: Any) -> Attention:
        rank = self.latent.shape[-1]
        q, k = (mx.concatenate(parts, axis=-1) for parts in (self.arrays[:2], self.arrays[2:]))
        result = attention(q, k, self.latent, self.d_out, **self.options, **more)
        of_q, of_k, of_v = (result.gradients.pop(name) for name in "qkv")
        result.gradients |= {"q_nope": of_q[..., :rank], "q_rope": of_q[..., rank:]}
        result.gradients |= {"latent": of_k[..., :rank] + of_v, "k_rope": of_k[..., rank:]}
        return result


def draw(
    heads: int,
    lengths: tuple[int, int],
    dims: tuple[int, int],
    dtype: mx.Dtype,
    feature: str = "none",
    batch: int = 1,
) -> Case:
    """`dims` are rank and rope dim."""

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    q_len, kv_len = lengths
    q = [normal(batch, heads, q_len, dim) for dim in dims]
    k = [normal(batch, 1, kv_len, dim) for dim in dims]
    options: dict[str, Any] = {"scale": sum(dims) ** -0.5}
    if feature == "causal":
        options["mask"] = "causal"
    if feature == "softcap":
        options["softcap"] = 1.5
    if feature == "bool mask":
        options["mask"] = mx.random.bernoulli(0.4, (heads, q_len, kv_len))
    if feature == "additive mask":
        options["mask"] = normal(batch, 1, q_len, kv_len)
    if feature == "sinks":
        options["sinks"] = normal(heads)
    case = Case(*q, *k, normal(batch, heads, q_len, dims[0]), options)
    mx.eval(*case.arrays, case.d_out, list(case.differentiable.values()))
    return case


def check_output(case: Case) -> mx.array:
    """Compares out and lse with the definition. Returns out."""
    exact = case.reference()
    rounding = ROUNDING.get(case.latent.dtype)
    composed = case.reference(round_to=rounding) if rounding else None
    out, lse = case.attend(return_lse=True)
    assert (out.dtype, lse.dtype) == (case.latent.dtype, mx.float32)
    assert_close("out", out, exact.out, composed and composed.out, OUTPUT_FACTOR)
    seen = exact.lse > -float("inf")
    assert (mx.isneginf(lse) == mx.array(~seen)).all().item()
    assert_close("lse", mx.where(mx.array(seen), lse, 0), exact.lse.copy().clip(min=-1e30) * seen, None, 0)
    return out


def check_gradients(case: Case) -> None:
    exact = case.reference()
    rounding = ROUNDING.get(case.latent.dtype)
    composed = case.reference(round_to=rounding) if rounding else None
    names = list(case.differentiable)

    def of_arrays(*values: mx.array) -> mx.array:
        given = {**case.options, **dict(zip(names, values, strict=True))}
        return mla_decode(**given)

    outputs, gradients = mx.vjp(of_arrays, list(case.differentiable.values()), [case.d_out])
    assert_same_bits(outputs[0], case.attend())
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.dtype == case.differentiable[name].dtype
        assert_close(
            f"gradient of {name}",
            gradient,
            exact.gradients[name],
            composed and composed.gradients[name],
            GRADIENT_FACTOR,
            terms=exact.terms.get(name),
        )
